"""Bare roots of Debian releases, in which tests run with this environment's packages of Python.

Those are wheels for systems as old, so the site-packages folder is mounted and nothing but the wheel under test is
installed. Python is the release's own, or for a release with an older one Debian 12's source, compiled there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
COMMANDS = ("mmdebstrap", "cmake", "g++", "patchelf", "auditwheel")
PYTHON = "python3.11"

# A shell script; $1 is the root of a release with a compiler. Sources of the next release are read from its mirrors.
_COMPILE_PYTHON = rf"""
chroot "$1" sh -euxc '
  sed -n "s/^deb \(.*\) bullseye main/deb-src \1 bookworm main/p" /etc/apt/sources.list \
    >/etc/apt/sources.list.d/source.list
  apt-get update --quiet
  mkdir /source && cd /source
  apt-get source --quiet --download-only {PYTHON}
  tar --extract --strip-components 1 --file {PYTHON}_*.orig.tar.*
  ./configure --quiet --prefix=/opt/python --without-ensurepip --disable-test-modules CFLAGS="-O0 -g0" \
    ac_cv_posix_semaphores_enabled=yes
  make --silent --jobs "$(nproc)" && make --silent install'
"""
_COMPILER = ("build-essential", "libbz2-dev", "libffi-dev", "liblzma-dev", "libsqlite3-dev", "libssl-dev", "zlib1g-dev")

# $1 is the root, $2 the repository, $3 site-packages; then the command. What is mounted ends with the command.
_IN_ROOT = """
mount --make-rprivate /
mount -t proc proc "$1/proc"
for name in sys dev; do mount --rbind "/$name" "$1/$name"; done
mkdir -p "$1/bei" "$1/site-packages"
mount --bind "$2" "$1/bei"
mount --bind "$3" "$1/site-packages"
root=$1; shift 3
exec chroot "$root" "$@"
"""
# Nothing is written into the repository.
_QUIET = ("LC_ALL=C.UTF-8", "PYTHONDONTWRITEBYTECODE=1", "HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis")


@dataclass(frozen=True)
class Release:
    """A release of Debian. ``packages``: Python, or what a compiled one loads."""

    name: str
    packages: tuple[str, ...]
    has_python: bool


RELEASES = (
    Release("bullseye", ("libbz2-1.0", "libffi7", "liblzma5", "libsqlite3-0", "libssl1.1", "zlib1g"), has_python=False),
    Release("bookworm", (PYTHON,), has_python=True),
)


def lack() -> str:
    """Why the wheel cannot be built and tried here; empty if it can."""
    if os.geteuid() != 0:
        return "it needs root, to mount and change roots"
    if f"python{sys.version_info.major}.{sys.version_info.minor}" != PYTHON:
        return f"it needs {PYTHON}, which Debian 12 has"
    if lacking := [command for command in COMMANDS if shutil.which(command) is None]:
        return f"it needs {', '.join(lacking)}: apt-get install cmake g++ mmdebstrap, and pip install -e '.[manylinux]'"
    return ""


@dataclass(frozen=True)
class Root:
    """A root in ``folder``, with a Python at ``python`` inside."""

    folder: Path
    python: str

    def run(self, *command: str) -> str:
        """Run a command in it, from the repository's folder, to its end; what it printed."""
        site_packages = sysconfig.get_path("platlib")
        path = "/kernels:/bei:/bei/build:/site-packages"
        environment = ("env", "-i", "--chdir=/bei", "PATH=/usr/bin:/bin", "HOME=/root", f"PYTHONPATH={path}", *_QUIET)
        mounted = ("unshare", "--mount", "sh", "-euc", _IN_ROOT, "sh", self.folder, REPOSITORY, site_packages)
        words = [str(word) for word in (*mounted, *environment, *command)]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    def put(self, file: Path) -> str:
        """Copy a file into it; its place there."""
        shutil.copy(file, self.folder / "tmp" / file.name)
        return f"/tmp/{file.name}"

    def install(self, wheel: Path) -> None:
        """By pip, which refuses a wheel for a newer C library than the root's."""
        alone = ("--quiet", "--no-deps", "--no-index", "--no-cache-dir", "--upgrade", "--target", "/kernels")
        self.run(self.python, "-m", "pip", "install", *alone, self.put(wheel))

    def glibc(self) -> str:
        """The version of its C library."""
        return self.run(self.python, "-c", "import platform; print(platform.libc_ver()[1])").strip()

    def pytest(self, files: Sequence[str]) -> str:
        """Run tests of these files; pytest's last line. None may be skipped for want of the package."""
        code = "import bei_kernels_cpu; print(bei_kernels_cpu.LIBRARY)"
        assert self.run(self.python, "-c", code).startswith("/kernels/")
        printed = self.run(self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files)
        return printed.splitlines()[-1]


def make_root(release: Release, work: Path) -> Root:
    """The bare root of ``release`` in ``work``, unless it is there."""
    folder = work / release.name
    if not folder.exists():
        compiled = None if release.has_python else _compiled_python(release, work)
        _debian(release.name, folder, release.packages)
        if compiled is not None:
            shutil.copytree(compiled, folder / "opt" / "python", symlinks=True)
    return Root(folder, f"/usr/bin/{PYTHON}" if release.has_python else f"/opt/python/bin/{PYTHON}")


def _compiled_python(release: Release, work: Path) -> Path:
    folder = work / f"{release.name}-compiler"
    if not folder.exists():
        _debian(release.name, folder, _COMPILER, f"--customize-hook={_COMPILE_PYTHON}")
    return folder / "opt" / "python"


def _debian(release: str, folder: Path, packages: Sequence[str], *options: str) -> None:
    unfinished = folder.with_name(f"{folder.name}-unfinished")  # what failed is not taken for a root
    shutil.rmtree(unfinished, ignore_errors=True)
    include = f"--include={','.join(packages)}"
    command = ["mmdebstrap", "--quiet", "--variant=minbase", include, *options, release, str(unfinished)]
    subprocess.run(command, capture_output=True, text=True, check=True)
    unfinished.rename(folder)
