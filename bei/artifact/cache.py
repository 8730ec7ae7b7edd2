"""The folder in which ``bei serve`` keeps artifacts that it has built, and measured costs: what is in it, who uses it,
and how it stays within its bound.

    NAME-TARGET-PRECISION-KEY/   an artifact; the key is a hash of all that it was made of (bei_build.cache)
    .<entry>.used                held, shared, by all who use or build the entry; changed when it was last used
    .<entry>.lock                held by the one process that builds it
    .<entry>.xxxxxxxx/           half an artifact: being built or removed, or left there by a process that was killed
    .bei.lock                    held by whoever looks at all entries
    costs/*.json                 measurements (bei.cost_cache)

Who uses an entry has its ``.used`` file first and its ``.lock`` second; who removes it has the ``.used`` file alone to
himself, so that nobody uses it, builds it or waits to. Only entries with a ``.used`` file, and costs, are ever removed:
other people's files may lie in the folder.
"""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bei.artifact.cost_cache import FOLDER as COSTS
from bei.errors import ConfigError
from bei.utils.file_lock import FileLock, acquire, try_acquire
from bei.utils.units import shown_size

log = logging.getLogger(__name__)

Kind = Literal["artifact", "costs", "leftover"]

_USED = re.compile(r"\.(?P<entry>.+-[0-9a-f]{12})\.used")
_LOCK = ".bei.lock"
# Of tempfile.mkdtemp, and of _removed below; ".replaced" is bei_build.pipeline's, of an artifact that steps aside.
_HALF = r"\.{entry}\.[a-z0-9_]{{8}}(\.replaced)?"
_COSTS = re.compile(r".+-[0-9a-f]{24}\.json")
_HALF_COSTS = re.compile(r"tmp[a-z0-9_]+\.partial")
# Writing costs takes milliseconds.
_HALF_COSTS_AGE_S = 3600.0


@dataclass(frozen=True)
class CacheEntry:
    """One thing that can be removed. ``last_used_s`` is since the epoch; ``in_use``: by a process, at this moment."""

    kind: Kind
    path: Path
    size_bytes: int
    last_used_s: float
    in_use: bool

    @property
    def name(self) -> str:
        """Of the file or folder."""
        return self.path.name


class EntryUse:
    """While it is open, nobody removes the entry at ``path``. A context manager."""

    def __init__(self, path: Path, lock: FileLock) -> None:
        self.path = path
        self._lock = lock
        lock.touch()

    def __enter__(self) -> EntryUse:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """It was used until now."""
        self._lock.touch()
        self._lock.close()


class ModelCache:
    """The cache in ``folder``, which is made when it is first written to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def use(self, entry: str) -> EntryUse:
        """Keep ``entry``, whether it is there or about to be built. Raises ConfigError."""
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            return EntryUse(self.folder / entry, acquire(self.folder / f".{entry}.used", shared=True))

    @contextmanager
    def building(self, entry: str) -> Iterator[None]:
        """Alone, for somebody who uses ``entry`` already: others who want to build it wait, and find it built. What
        processes that were killed have left of it is removed. Raises ConfigError."""
        with self._writing():
            lock = acquire(self.folder / f".{entry}.lock")
        with lock:
            for path in self._halves(entry):
                shutil.rmtree(path, ignore_errors=True)
            yield

    def entries(self) -> list[CacheEntry]:
        """All there are, the last used first. Raises OSError where the folder cannot be read."""
        if not self.folder.is_dir():
            return []
        try:
            lock = acquire(self.folder / _LOCK)
        except OSError:
            return self._entries()  # in a folder that cannot be written nothing is removed either
        with lock:
            return self._entries()

    def prune(
        self,
        *,
        max_bytes: int | None = None,
        older_than_s: float | None = None,
        everything: bool = False,
        dry_run: bool = False,
    ) -> list[CacheEntry]:
        """Remove, and return, leftovers and what has not been used for ``older_than_s``; then, the least recently used
        first, as many entries as it takes for the rest to have at most ``max_bytes``. ``everything``: all of them.

        What is in use stays, whatever the bounds. ``dry_run``: nothing is removed. Raises OSError.
        """
        if not self.folder.is_dir():
            return []
        with acquire(self.folder / _LOCK):
            chosen = _chosen(self._entries(), max_bytes, -math.inf if everything else older_than_s)
            if dry_run:
                return chosen
            removed = [entry for entry in chosen if self._removed(entry)]
            self._forget_removed()
            return removed

    def keep_bound(self, max_bytes: int | None) -> None:
        """``prune`` at a start, which goes on whatever happens: the log says what was removed, and what kept it from
        that. None: no bound."""
        try:
            entries = self.entries()
            removed = self.prune(max_bytes=max_bytes) if _chosen(entries, max_bytes, None) else []
        except OSError as error:
            log.warning("the cache %s cannot be kept below cache_max_size: %s", self.folder, error)
            return
        for entry in removed:
            log.info("removed %s (%s) from the cache", entry.path, shown_size(entry.size_bytes))
        held = sum(entry.size_bytes for entry in entries) - sum(entry.size_bytes for entry in removed)
        if max_bytes is not None and held > max_bytes:
            log.warning(
                "the cache %s holds %s, more than cache_max_size (%s), and all of it is in use",
                self.folder,
                shown_size(held),
                shown_size(max_bytes),
            )

    def _entries(self) -> list[CacheEntry]:
        """For somebody who has ``_LOCK``: it takes each entry's own for a moment, which others would see as use."""
        found = [*self._artifacts(), *self._costs()]
        return sorted(found, key=lambda entry: entry.last_used_s, reverse=True)

    def _artifacts(self) -> Iterator[CacheEntry]:
        for name in sorted(os.listdir(self.folder)):
            match = _USED.fullmatch(name)
            if match is None:
                continue
            entry, marker = match["entry"], self.folder / name
            used_s = _changed_s(marker)
            path = self.folder / entry
            if path.is_dir() and not path.is_symlink():
                in_use = _is_held(marker)
                yield CacheEntry("artifact", path, _size(path), time.time() if in_use else used_s, in_use)
            for half in self._halves(entry):
                yield CacheEntry("leftover", half, _size(half), used_s, _is_held(self.folder / f".{entry}.lock"))

    def _halves(self, entry: str) -> list[Path]:
        pattern = re.compile(_HALF.format(entry=re.escape(entry)))
        paths = [self.folder / name for name in os.listdir(self.folder) if pattern.fullmatch(name)]
        return [path for path in paths if path.is_dir() and not path.is_symlink()]

    def _costs(self) -> Iterator[CacheEntry]:
        folder = self.folder / COSTS
        if not folder.is_dir():
            return
        for name in sorted(os.listdir(folder)):
            path = folder / name
            is_half = _HALF_COSTS.fullmatch(name) is not None
            if path.is_symlink() or not path.is_file() or not (is_half or _COSTS.fullmatch(name)):
                continue
            used_s = _changed_s(path)
            is_fresh = is_half and time.time() - used_s < _HALF_COSTS_AGE_S
            yield CacheEntry("leftover" if is_half else "costs", path, _size(path), used_s, is_fresh)

    def _removed(self, entry: CacheEntry) -> bool:
        """Whether it is gone. It steps aside first: whoever comes meanwhile finds a whole entry or none."""
        if entry.path.parent != self.folder:
            entry.path.unlink(missing_ok=True)
            return True
        if entry.kind == "leftover":
            name = entry.name[1:].removesuffix(".replaced").rpartition(".")[0]
            lock = try_acquire(self.folder / f".{name}.lock")
        else:
            lock = try_acquire(self.folder / f".{entry.name}.used")
        if lock is None:
            return False  # somebody has come since
        with lock:
            path = entry.path
            if entry.kind == "artifact":
                path = path.rename(self.folder / f".{entry.name}.{secrets.token_hex(4)}")
            shutil.rmtree(path)
        return True

    def _forget_removed(self) -> None:
        """Remove the locks of entries of which nothing is there."""
        for name in os.listdir(self.folder):
            match = _USED.fullmatch(name)
            lock = try_acquire(self.folder / name) if match else None
            if match is None or lock is None:
                continue
            with lock:  # alone: nobody has the other lock, or waits for it
                if not (self.folder / match["entry"]).exists() and not self._halves(match["entry"]):
                    (self.folder / f".{match['entry']}.lock").unlink(missing_ok=True)
                    lock.path.unlink()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"The cache {self.folder} cannot be written ({error}): name another folder with --cache-dir or "
                "BEI_CACHE_DIR, or build first and serve the artifact."
            ) from error


def _chosen(entries: Seq[CacheEntry], max_bytes: int | None, older_than_s: float | None) -> list[CacheEntry]:
    """Which of ``entries``, the last used first, are to be removed."""
    now_s = time.time()
    free = [entry for entry in entries if not entry.in_use]
    chosen = [
        entry
        for entry in free
        if entry.kind == "leftover" or (older_than_s is not None and now_s - entry.last_used_s >= older_than_s)
    ]
    if max_bytes is not None:
        left = sum(entry.size_bytes for entry in entries) - sum(entry.size_bytes for entry in chosen)
        for entry in reversed(free):
            if left <= max_bytes:
                break
            if entry not in chosen:
                chosen.append(entry)
                left -= entry.size_bytes
    return chosen


def _is_held(path: Path) -> bool:
    """Whether another process has the lock ``path``. A lock that cannot be asked is taken for one that is held."""
    try:
        if not path.exists():
            return False
        lock = try_acquire(path)
    except OSError:
        return True
    if lock is None:
        return True
    lock.close()
    return False


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # it has been removed at this moment
        return 0.0


def _size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; links are not followed."""
    below = [os.path.join(root, name) for root, _, files in os.walk(path) for name in files]
    total = 0
    for file in below or [str(path)]:
        with suppress(OSError):  # it has been removed at this moment
            total += os.lstat(file).st_size
    return total
