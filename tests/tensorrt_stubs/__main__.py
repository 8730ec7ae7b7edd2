"""``python -m tests.tensorrt_stubs OUT`` writes the stubs; ``--mypy [FILES]`` checks with them what uses them."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.tensorrt_stubs.checking import ROOT, check, users
from tests.tensorrt_stubs.generation import StubError, generate, generated_folder


def main() -> int:
    """The exit code: 1 where mypy finds something or the stubs cannot be made."""
    parser = argparse.ArgumentParser(prog="python -m tests.tensorrt_stubs", description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", help="the folder to write into")
    parser.add_argument(
        "--mypy", type=Path, nargs="*", metavar="FILE", help="check these files, or all that import tensorrt_module"
    )
    arguments = parser.parse_args()
    if (arguments.out is None) == (arguments.mypy is None):
        parser.error("give a folder to write into, or --mypy")
    try:
        if arguments.out is not None:
            generate(arguments.out)
            return 0
        return _checked(arguments.mypy)
    except StubError as error:
        print(error, file=sys.stderr)
        return 1


def _checked(chosen: list[Path]) -> int:
    files = [path.resolve() for path in chosen] or users()
    stubs = generated_folder()
    with tempfile.TemporaryDirectory() as scratch:
        lines = check(stubs, files, Path(scratch), ROOT / ".mypy_cache") if files else []
    for line in lines:
        print(line, file=sys.stderr)
    for path in files if not lines else []:
        print(f"no error: {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
