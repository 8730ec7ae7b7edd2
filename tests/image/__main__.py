"""Builds the images ``cpu`` and ``cpu-build`` and tries them: ``python -m tests.image``.

No registry of images is asked: the base is made from Debian's packages and this machine's Python, in place of the
python:3-slim that the Dockerfile names. buildah builds in a chroot, podman runs with runc, which works without systemd.
Packages of Python come from the index. Takes a quarter of an hour and 10 GB of disk.

Exit code 1 where a check fails, 77 where this machine cannot do it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from pathlib import Path

import httpx

from tests.image import checks
from tests.image.container import serving
from tests.image.tools import BASE, Tools, lack, python_prefix

SKIPPED = 77
TARGETS = ("cpu", "cpu-build")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="a folder for the images, which is kept (default: a temporary one)")
    parser.add_argument("--python", type=Path, default=python_prefix(), help="the base's Python (default: pyenv's)")
    parser.add_argument("--driver", choices=("overlay", "vfs"), default="overlay", help="vfs works anywhere, slowly")
    arguments = parser.parse_args()
    if why := lack(arguments.python):
        _say(f"skipped: {why}.")
        return SKIPPED
    with ExitStack() as stack:
        work = arguments.work or stack.enter_context(tempfile.TemporaryDirectory(prefix="bei-image-"))
        tools = Tools(Path(work).absolute(), arguments.driver)
        try:
            tools.make_base(arguments.python)
            _say(f"base: {_megabytes(*tools.sizes(BASE))}")
            for target in TARGETS:
                _try(tools, target)
        except (AssertionError, httpx.HTTPError, subprocess.TimeoutExpired) as error:
            _say(f"FAILED: {str(error) or traceback.format_exc()}")
            return 1
    return 0


def _try(tools: Tools, target: str) -> None:
    started_s = time.monotonic()
    image = tools.build(target)
    _say(f"{target}: built in {time.monotonic() - started_s:.0f} s")
    size, compressed = tools.sizes(image)
    _say(f"{target}: {_megabytes(size, compressed)}")
    assert target != "cpu" or compressed <= checks.CPU_LIMIT_BYTES, "the image has become too large"
    _say(f"{target}: {checks.configuration(tools, image)}")
    with serving(tools, image) as container:
        _say(f"{target}: ready after {container.wait_until_up():.0f} s")
        _say(f"{target}: {checks.confined(container)}")
        _say(f"{target}: {checks.contents(container, target)}")
        _say(f"{target}: {checks.answers(container)}")
        _say(f"{target}: {checks.health(tools, container, image)}")
        _say(f"{target}: {checks.ends_under_load(container)}")
    if target == "cpu":
        _say(f"{target}: {checks.refuses_to_build(tools, image)}")
    else:
        with tempfile.TemporaryDirectory() as folder:
            for seen in checks.builds_and_embeds(tools, image, Path(folder) / "work"):
                _say(f"{target}: {seen}")


def _megabytes(size: int, compressed: int) -> str:
    return f"{size / 1e6:.0f} MB, {compressed / 1e6:.0f} MB compressed"


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
