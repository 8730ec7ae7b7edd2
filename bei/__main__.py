"""The command ``bei``, and ``python -m bei``."""

import sys

from bei.utils.sighup import remember


def main() -> None:
    """Run a command. A server remembers SIGHUP before anything else is imported."""
    if next((word for word in sys.argv[1:] if not word.startswith("-")), None) == "serve":
        remember()
    from bei.utils.scarce_resources import prepare_for_scarcity, scarce_resource

    prepare_for_scarcity()
    try:
        from bei.cli.main import main as run
    # A lack shows as any error of any library, and OpenBLAS sends SIGINT; others are raised again.
    except (Exception, KeyboardInterrupt) as error:
        if (lack := scarce_resource(error)) is not None:
            print(f"error: {lack}", file=sys.stderr)  # noqa: T201
            sys.exit(2)
        if isinstance(error, KeyboardInterrupt):  # Ctrl-C, before main can take it
            sys.exit(130)
        raise
    run()


if __name__ == "__main__":
    main()
