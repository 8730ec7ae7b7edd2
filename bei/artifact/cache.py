"""The cache folder of ``bei serve``: artifacts that it has built and measured costs, kept within a size limit.

    NAME-TARGET-PRECISION-KEY/   an artifact; the key is a hash of everything it was built from (bei_build.cache)
    .<entry>.used                lock, shared by the users and builders of the entry; its mtime is the last use
    .<entry>.lock                lock of the process that builds the entry
    .<entry>.xxxxxxxx/           an incomplete artifact: being built or removed, or left by a killed process
    .bei.lock                    lock for operations on all entries
    costs/*.json                 measurements (bei.artifact.cost_cache)

A user of an entry locks ``.used`` first and ``.lock`` second; removal locks ``.used`` exclusively, so that no process
uses, builds or awaits the entry. Only entries with a ``.used`` file, and costs, are ever removed: the folder may hold
foreign files.
"""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bei.artifact.cost_cache import FOLDER as COSTS
from bei.errors import ConfigError
from bei.utils.file_lock import FileLock, acquire, try_acquire
from bei.utils.full_disk import full_disk
from bei.utils.units import shown_size

log = logging.getLogger(__name__)

Kind = Literal["artifact", "costs", "leftover"]

_USED = re.compile(r"\.(?P<entry>.+-[0-9a-f]{12})\.used")
_LOCK = ".bei.lock"
# Names by tempfile.mkdtemp and _removed below; ".replaced": bei_build.pipeline renames a replaced artifact so.
_HALF = r"\.{entry}\.[a-z0-9_]{{8}}(\.replaced)?"
_COSTS = re.compile(r".+-[0-9a-f]{24}\.json")
_HALF_COSTS = re.compile(r"tmp[a-z0-9_]+\.partial")
# The age from which half-written costs count as leftovers; writing takes milliseconds.
_HALF_COSTS_AGE_S = 3600.0


@dataclass(frozen=True)
class CacheEntry:
    """An entry that can be removed. ``last_used_s``: since the epoch; ``in_use``: by a process, now."""

    kind: Kind
    path: Path
    size_bytes: int
    last_used_s: float
    in_use: bool

    @property
    def name(self) -> str:
        """The name of the file or folder."""
        return self.path.name


class EntryUse:
    """Protects the entry at ``path`` from removal while open. A context manager."""

    def __init__(self, path: Path, lock: FileLock) -> None:
        self.path = path
        self._lock = lock
        lock.touch()

    def __enter__(self) -> EntryUse:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the use, and note its time."""
        self._lock.touch()
        self._lock.close()


class ModelCache:
    """The cache in ``folder``, which is created by the first write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def use(self, entry: str) -> EntryUse:
        """Protect ``entry``, existing or about to be built. Raises ConfigError."""
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            return EntryUse(self.folder / entry, acquire(self.folder / f".{entry}.used", shared=True))

    @contextmanager
    def building(self, entry: str, waits: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold the build lock of ``entry``, for a process that uses it already: other builders call ``waits``, wait,
        and then find it built. Leftovers of killed builds are removed. Raises ConfigError."""
        path = self.folder / f".{entry}.lock"
        with self._writing():
            lock = try_acquire(path)
        if lock is None:
            waits()
            with self._writing():
                lock = acquire(path)
        with lock:
            for path in self._halves(entry):
                shutil.rmtree(path, ignore_errors=True)
            yield

    def artifacts(self) -> list[Path]:
        """The folders of artifacts that were built into the cache. Raises no error: where none can be read, there is
        none."""
        try:
            names = sorted(os.listdir(self.folder))
        except OSError:
            return []
        entries = [match["entry"] for name in names if (match := _USED.fullmatch(name))]
        return [self.folder / entry for entry in entries if (self.folder / entry).is_dir()]

    def entries(self) -> list[CacheEntry]:
        """All entries, the last used first. Raises OSError if the folder cannot be read."""
        if not self.folder.is_dir():
            return []
        try:
            lock = acquire(self.folder / _LOCK)
        except OSError:
            return self._entries()  # in a read-only folder nothing is removed either
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
        """Remove, and return, leftovers and entries not used for ``older_than_s``; then the least recently used entries
        until the rest has at most ``max_bytes``. ``everything``: all entries.

        Entries in use are never removed. ``dry_run``: nothing is removed. Raises OSError.
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

    def enforce_limit(self, max_bytes: int | None) -> None:
        """``prune`` at server start, which never fails: the log reports removals and problems. None: no limit."""
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
        """The entries, for a holder of ``_LOCK``: each entry's lock is tried, which other processes would take for
        use."""
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
        """Remove ``entry``; False if it came into use. It is renamed first: others find a whole entry or none."""
        if entry.path.parent != self.folder:
            entry.path.unlink(missing_ok=True)
            return True
        if entry.kind == "leftover":
            name = entry.name[1:].removesuffix(".replaced").rpartition(".")[0]
            lock = try_acquire(self.folder / f".{name}.lock")
        else:
            lock = try_acquire(self.folder / f".{entry.name}.used")
        if lock is None:
            return False  # came into use since
        with lock:
            path = entry.path
            if entry.kind == "artifact":
                path = path.rename(self.folder / f".{entry.name}.{secrets.token_hex(4)}")
            shutil.rmtree(path)
        return True

    def _forget_removed(self) -> None:
        """Remove the lock files of entries that are gone."""
        for name in os.listdir(self.folder):
            match = _USED.fullmatch(name)
            lock = try_acquire(self.folder / name) if match else None
            if match is None or lock is None:
                continue
            with lock:  # exclusive: no process holds or awaits the other lock
                if not (self.folder / match["entry"]).exists() and not self._halves(match["entry"]):
                    (self.folder / f".{match['entry']}.lock").unlink(missing_ok=True)
                    lock.path.unlink()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if (full := full_disk(error, self.folder)) is not None:
                raise full from error
            fault = f"cannot be written ({error})" if not self.folder.is_file() else "is a file, not a folder"
            raise ConfigError(
                f"The cache {self.folder} {fault}: name another folder with --cache-dir or "
                "BEI_CACHE_DIR, or build first and serve the artifact."
            ) from error


def _chosen(entries: Seq[CacheEntry], max_bytes: int | None, older_than_s: float | None) -> list[CacheEntry]:
    """The entries to remove from ``entries``, which are sorted by last use, latest first."""
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
    """True if another process holds the lock ``path``, or if that is unknown."""
    try:
        lock = try_acquire(path, create=False)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    if lock is None:
        return True
    lock.close()
    return False


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # just removed
        return 0.0


def _size(path: Path) -> int:
    """The size of a file, or of all files below a folder; links are not followed."""
    below = [os.path.join(root, name) for root, _, files in os.walk(path) for name in files]
    total = 0
    for file in below or [str(path)]:
        with suppress(OSError):  # just removed
            total += os.lstat(file).st_size
    return total
