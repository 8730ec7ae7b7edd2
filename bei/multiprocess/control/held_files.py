"""The files of a served artifact, held open: a restarted process opens the served files even if the path has others.

A build puts its folder in the place of the former one, and removes that. Until SIGHUP the former artifact is served,
and a process that ends must be followed by one that has the same model: with another one's engine or tokenizer, answers
of two artifacts would go out under one digest. A file that is open can be read though it is removed. So the supervisor
holds the files, and processes get their descriptors along with the order to open the model.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path

import msgspec

from bei.artifact.manifest import ENGINE_DIR, MANIFEST, TOKEN_WEIGHTS, TOKENIZER, Artifact, FileInfo, Manifest
from bei.artifact.store import load_manifest
from bei.errors import ArtifactError
from bei.multiprocess.transport.channel import MOST_DESCRIPTORS
from bei.service.loader import SHOWN_DIGITS

log = logging.getLogger(__name__)


class HeldFiles:
    """The supervisor's open files of ``artifact``, which was just verified; other processes read them by ``readable``.

    Raises ArtifactError if its folder was replaced meanwhile or has too many files, and OSError.
    """

    def __init__(self, artifact: Artifact) -> None:
        names = _names(artifact)
        if len(names) > MOST_DESCRIPTORS:
            raise ArtifactError(
                f"{artifact.path} has {len(names)} files that an engine process reads, and the supervisor can pass on "
                f"{MOST_DESCRIPTORS}: serve it from one process (one of --http-workers, one of --devices)."
            )
        self._descriptors: list[int] = []
        try:
            for name in names:
                self._descriptors.append(os.open(artifact.path / name, os.O_RDONLY | os.O_CLOEXEC))
            if _files_to_serve(load_manifest(artifact.path)) != _files_to_serve(artifact.manifest):
                raise ArtifactError(f"{artifact.path} was replaced while it was opened: try it again.")
        except BaseException:
            self.close()
            raise

    @contextmanager
    def lent(self) -> Iterator[list[int]]:
        """Duplicates of the descriptors. They stay open within the block even if ``close`` is called meanwhile."""
        duplicates: list[int] = []
        try:
            duplicates += map(os.dup, self._descriptors)
            yield duplicates
        finally:
            for descriptor in duplicates:
                os.close(descriptor)

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


@contextmanager
def readable(artifact: Artifact, descriptors: Seq[int]) -> Iterator[Artifact]:
    """``artifact``, with a path at which the files of ``descriptors`` can be read within the block. Then closes them.

    It is the artifact's own path if that still has these files, and else a temporary folder of links to them.
    """
    held_as = dict(zip(_names(artifact), descriptors, strict=True))
    try:
        # The manifest may be a newer file: a new certificate writes it again.
        if all(name == MANIFEST or _lies_at(artifact.path / name, held) for name, held in held_as.items()):
            yield artifact
            return
        log.warning(
            "%s: %s was replaced; opened is the artifact that is served, %s. Send SIGHUP to have the other one served",
            *(artifact.manifest.name, artifact.path, artifact.manifest.digest[:SHOWN_DIGITS]),
        )
        with tempfile.TemporaryDirectory(prefix="bei-") as folder:
            for name, held in held_as.items():
                link = Path(folder, name)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(f"/proc/{os.getpid()}/fd/{held}")  # also for processes that an engine starts
            yield msgspec.structs.replace(artifact, path=Path(folder))
    finally:
        for held in descriptors:
            os.close(held)


def _names(artifact: Artifact) -> list[str]:
    """Paths of the held files, relative to the artifact's folder, in the same order in all processes."""
    return [MANIFEST, *(info.path for info in _files_to_serve(artifact.manifest))]


def _files_to_serve(manifest: Manifest) -> list[FileInfo]:
    """The files that a process reads to serve a verified artifact. None of them changes with a new certificate."""
    single_files = (TOKENIZER, TOKEN_WEIGHTS)
    return [info for info in manifest.files if info.path in single_files or info.path.startswith(f"{ENGINE_DIR}/")]


def _lies_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False
