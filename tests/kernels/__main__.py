"""Builds the wheel of kernels/ for older systems and tries it on them: ``python -m tests.kernels --out dist``.

Needs the extra ``manylinux``, root, mmdebstrap, and GCC 12 and Python 3.11, which Debian 12 has. Takes ten minutes,
half of it for a Python that runs on Debian 11. Debian's packages come from its mirrors.

Exit code 1 where a check fails, 77 where this machine cannot do it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.kernels.roots import RELEASES, lack, make_root
from tests.kernels.wheel import build_fuzz, build_wheel, make_sysroot

SKIPPED = 77
TESTS = tuple(f"tests/bei/engine/test_{of}.py" for of in ("normalized_sums", "packed_attention", "rounded_rows"))
FUZZ = ("0", "20")  # seeds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder for the wheel")
    parser.add_argument("--work", type=Path, help="a folder for the roots, which is kept (default: a temporary one)")
    arguments = parser.parse_args()
    if why := lack():
        _say(f"skipped: {why}.")
        return SKIPPED
    with tempfile.TemporaryDirectory(prefix="bei-kernels-") as temporary:
        work = (arguments.work or Path(temporary)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        try:
            _try(work, arguments.out)
        except subprocess.CalledProcessError as error:
            _say(f"FAILED: {' '.join(map(str, error.cmd))}\n{error.stdout or ''}{error.stderr or ''}")
            return 1
    return 0


def _try(work: Path, out: Path | None) -> None:
    sysroot = make_sysroot(work / "sysroot")
    wheel = build_wheel(sysroot, work / "wheels")
    _say(f"built {wheel.name}")
    fuzz = build_fuzz(sysroot, work / "fuzz")
    for release in RELEASES:
        root = make_root(release, work)
        root.install(wheel)
        _say(f"{release.name}, glibc {root.glibc()}: installed; {root.pytest(TESTS)}")
        root.run(root.put(fuzz), *FUZZ)
        _say(f"{release.name}: the fuzz of the kernels found nothing")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        _say(f"wrote {shutil.copy(wheel, out)}")


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
