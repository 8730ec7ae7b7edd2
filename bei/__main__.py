"""The command ``bei``, and ``python -m bei``."""

import sys

from bei.utils.sighup import remember


def main() -> None:
    """Run a command. A server remembers SIGHUP before anything else is imported."""
    if next((word for word in sys.argv[1:] if not word.startswith("-")), None) == "serve":
        remember()
    from bei.utils.scarce_resources import load_unwinder, scarce_resource

    load_unwinder()
    try:
        from bei.cli.main import main as run
    except Exception as error:  # a lack shows as any error of any library; others are raised again
        if (lack := scarce_resource(error)) is None:
            raise
        print(f"error: {lack}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
