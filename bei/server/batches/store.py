"""The journal of files and batches: an SQLite database and a folder of contents, for all processes of a server.

A record is committed when what it tells of is on the disk. A content without a record that is ready is of a process
that ended, and is removed.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from bei.config.settings import ServeConfig
from bei.errors import (
    BeiError,
    ConfigError,
    ConflictError,
    DiskFullError,
    InvalidRequestError,
    ObjectNotFoundError,
    QuotaExceededError,
    RecordUnreadableError,
)
from bei.server.batches.answer_files import Checkpoint
from bei.server.batches.records import BatchRecord, FileRecord, Purpose
from bei.utils.durable_files import sync_folder
from bei.utils.file_lock import try_acquire
from bei.utils.full_disk import full_disk
from bei.utils.units import shown_size
from bei.utils.untrusted_files import home_expanded

log = logging.getLogger(__name__)

RecordT = TypeVar("RecordT", FileRecord, BatchRecord)

# Files of a client, so that a list of them is made in a moment.
_MOST_FILES = 10_000
# Finished batches are forgotten after so long, as files are where nothing else is said.
LIFETIME_S = 30 * 86_400
# Another process may hold the database for as long as a disk takes to write.
_BUSY_S = 30.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, purpose TEXT NOT NULL,
    num_bytes INTEGER NOT NULL, expires_s INTEGER NOT NULL, is_ready INTEGER NOT NULL, record BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, input_id TEXT NOT NULL,
    is_open INTEGER NOT NULL, finished_s INTEGER NOT NULL, record BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS files_of_owner ON files (owner, number);
CREATE INDEX IF NOT EXISTS batches_of_owner ON batches (owner, number);
CREATE INDEX IF NOT EXISTS open_batches ON batches (is_open, number);
"""


class OwnerLimits(NamedTuple):
    """Of an API key."""

    num_open: int
    num_bytes: int


Row: TypeAlias = tuple[Any, ...]
_Listed: TypeAlias = tuple[list[RecordT], bool]

_LAST_NUMBER = (1 << 63) - 1


class Page(NamedTuple):
    """Which records a client wants: at most ``limit``, behind the one called ``after``."""

    limit: int
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"


class BatchStore:
    """Safe in threads and processes. Every method may wait for the disk: it is not for the event loop.

    All raise DiskFullError, OSError.
    """

    def __init__(self, folder: Path, limits: OwnerLimits) -> None:
        self._limits = limits
        self._contents = folder / "files"
        self._contents.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.lock_path = folder / "lock"
        self._folder = folder
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(
            folder / "batches.sqlite3", timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        self._connection.executescript(_SCHEMA)

    def close(self) -> None:
        """Call nothing else afterwards."""
        with self._lock:
            self._connection.close()

    def content(self, file_id: str) -> Path:
        """Where the content of a file lies."""
        return self._contents / file_id

    # Files.

    def add_file(self, record: FileRecord) -> None:
        """Reserve the bytes of a file that is to be written. Raises QuotaExceededError."""
        with self._transaction() as run:
            self._check_room(run, record.owner, record.num_bytes)
            ((count,),) = run("SELECT count(*) FROM files WHERE owner = ?", record.owner)
            if count >= _MOST_FILES:
                raise QuotaExceededError(f"There are {count} files, the most that there may be: delete some.")
            self._insert_file(run, record)

    def finish_file(self, record: FileRecord) -> None:
        """Its content, of ``num_bytes``, is on the disk."""
        sync_folder(self._contents)
        record.is_ready = True
        with self._transaction() as run:
            _update_file(run, record)

    def drop_file(self, file_id: str) -> None:
        """Remove a file that could not be written. Its content first: on a full disk the database needs room."""
        self.content(file_id).unlink(missing_ok=True)
        with self._transaction() as run:
            run("DELETE FROM files WHERE id = ?", file_id)

    def file(self, owner: str, file_id: str) -> FileRecord:
        """Raises ObjectNotFoundError, RecordUnreadableError."""
        with self._transaction() as run:
            _, record = self._file(run, owner, file_id)
        return _files.read(file_id, record)

    def files(self, owner: str, page: Page, purpose: Purpose | None = None) -> tuple[list[FileRecord], bool]:
        """A page of files, and whether there are more. One whose record cannot be read is left out. Raises
        InvalidRequestError for an unknown ``after``."""
        of_purpose = "AND purpose = ?" if purpose else ""
        where = f"owner = ? AND is_ready AND expires_s > ? {of_purpose}"
        values = (owner, int(time.time()), *((purpose,) if purpose else ()))
        return self._page(_files, page, where, values)

    def delete_file(self, owner: str, file_id: str) -> None:
        """Whatever its record holds. Raises ObjectNotFoundError, and ConflictError while a batch reads it."""
        with self._transaction() as run:
            self._file(run, owner, file_id)
            using = run("SELECT id FROM batches WHERE input_id = ? AND is_open", file_id)
            if using:
                raise ConflictError(f"The batch {using[0][0]} reads this file: cancel it, or wait until it has ended.")
            self.content(file_id).unlink(missing_ok=True)  # first, as in ``drop_file``
            run("DELETE FROM files WHERE id = ?", file_id)

    # Batches.

    def add_batch(self, record: BatchRecord) -> None:
        """Raises ObjectNotFoundError where its input is not there, InvalidRequestError, QuotaExceededError."""
        with self._transaction() as run:
            purpose, _ = self._file(run, record.owner, record.input_id)
            if purpose != "batch":
                raise InvalidRequestError("The file is no input: upload one with purpose batch.", "input_file_id")
            ((count,),) = run("SELECT count(*) FROM batches WHERE owner = ? AND is_open", record.owner)
            if count >= self._limits.num_open:
                raise QuotaExceededError(
                    f"{count} batches are not finished, the most that there may be (batch_open_limit): wait, or cancel "
                    "one."
                )
            run(
                "INSERT INTO batches (id, owner, input_id, is_open, finished_s, record) VALUES (?, ?, ?, 1, 0, ?)",
                *(record.id, record.owner, record.input_id, msgspec.json.encode(record)),
            )

    def batch(self, owner: str, batch_id: str) -> BatchRecord:
        """Raises ObjectNotFoundError, RecordUnreadableError."""
        with self._transaction() as run:
            return self._batch(run, owner, batch_id)

    def batches(self, owner: str, page: Page) -> tuple[list[BatchRecord], bool]:
        """A page of batches, and whether there are more. One whose record cannot be read is left out. Raises
        InvalidRequestError for an unknown ``after``."""
        return self._page(_batches, page, "owner = ?", (owner,))

    def open_batches(self) -> list[BatchRecord]:
        """Those that are not finished, of all clients, the oldest first. One whose record cannot be read fails."""
        found = []
        with self._transaction() as run:
            for batch_id, record in run("SELECT id, record FROM batches WHERE is_open ORDER BY number"):
                try:
                    found.append(_batches.read(batch_id, record))
                except RecordUnreadableError as error:
                    log.error("batch %s fails: its record cannot be read: %s", batch_id, error.__cause__)
                    self._fail_unreadable(run, batch_id)
        return found

    def change(self, owner: str, batch_id: str, change: Callable[[BatchRecord], object]) -> BatchRecord:
        """Change a batch as it is now. Raises ObjectNotFoundError, RecordUnreadableError, and what ``change`` does."""
        with self._transaction() as run:
            record = self._batch(run, owner, batch_id)
            change(record)
            _update_batch(run, record)
        return record

    def begin_answers(self, batch: BatchRecord) -> None:
        """Make the records of the files that its answers are written to."""
        with self._transaction() as run:
            for file in _answer_files(batch, LIFETIME_S):
                if not run("SELECT 1 FROM files WHERE id = ?", file.id):
                    self._insert_file(run, file)
        sync_folder(self._contents)

    def save(self, batch: BatchRecord, checkpoint: Checkpoint) -> None:
        """The answers of a batch are on the disk up to ``checkpoint``. Raises QuotaExceededError."""
        with self._transaction() as run:
            record = self._batch(run, batch.owner, batch.id)
            record.checkpoint = checkpoint
            _update_batch(run, record)
            for file in _answer_files(record, LIFETIME_S):
                run("UPDATE files SET num_bytes = ? WHERE id = ?", file.num_bytes, file.id)
            self._check_room(run, batch.owner, 0)

    def finish(self, batch: BatchRecord, change: Callable[[BatchRecord], object]) -> BatchRecord:
        """Bring a batch into its last state by ``change``, and hand its files to its client: none of a failed one, and
        none that is empty."""
        dropped = []
        with self._transaction() as run:
            record = self._batch(run, batch.owner, batch.id)
            change(record)
            _update_batch(run, record)
            for file in _answer_files(record, record.output_lifetime_s):
                if file.num_bytes:
                    file.is_ready = True
                    _update_file(run, file)
                else:
                    run("DELETE FROM files WHERE id = ?", file.id)
                    dropped.append(file.id)
        for file_id in dropped:
            self.content(file_id).unlink(missing_ok=True)
        return record

    # What is not needed any more.

    def clean(self) -> None:
        """Remove expired files and batches, and what processes that ended have left. For one process at a time."""
        now_s = int(time.time())
        # Before the records are read: whoever writes one of these has made its record by then, or holds its lock.
        there = {path.name for path in self._contents.iterdir()}
        with self._transaction() as run:
            run("DELETE FROM batches WHERE NOT is_open AND finished_s < ?", now_s - LIFETIME_S)
            run(
                "DELETE FROM files WHERE expires_s <= ? AND is_ready "
                "AND id NOT IN (SELECT input_id FROM batches WHERE is_open)",
                now_s,
            )
            ready = {name for (name,) in run("SELECT id FROM files WHERE is_ready")}
            unready = {name for (name,) in run("SELECT id FROM files WHERE NOT is_ready AND purpose = 'batch'")}
            known = {name for (name,) in run("SELECT id FROM files")}
        for name in (there - known) | unready:
            self._drop_abandoned(name)
        for name in ready - there:
            if not self.content(name).exists():  # a deletion that ended in the middle
                self.drop_file(name)

    def _drop_abandoned(self, name: str) -> None:
        """Remove a content, unless a process is writing it: then that holds its lock."""
        try:
            lock = try_acquire(self.content(name), create=False)
        except FileNotFoundError:  # its upload was refused meanwhile, or removing it ended in the middle
            self.drop_file(name)
            return
        if lock is not None:
            with lock, self._transaction() as run:
                if not run("SELECT 1 FROM files WHERE id = ? AND is_ready", name):  # it may have become so
                    run("DELETE FROM files WHERE id = ?", name)
                    self.content(name).unlink(missing_ok=True)

    # Within a transaction.

    def _fail_unreadable(self, run: Run, batch_id: str) -> None:
        """Put a record of a failed batch in the place of one that cannot be read, and drop its answers' records: what
        they lie in is then cleaned."""
        ((owner, input_id),) = run("SELECT owner, input_id FROM batches WHERE id = ?", batch_id)
        now_s = int(time.time())
        record = BatchRecord(
            *(batch_id, owner, "", input_id, "24h", now_s, LIFETIME_S),
            metadata=None,
            status="validating",
            moved_s={"validating": now_s},
            output_id="",
            error_id="",
        )
        message = "What the server has kept of this batch cannot be read: create it again."
        record.fail([{"code": BeiError.code, "message": message, "param": None, "line": None}], now_s)
        _update_batch(run, record)
        query = (
            "DELETE FROM files WHERE owner = ? AND purpose = 'batch_output' AND NOT is_ready "
            "AND instr(CAST(record AS TEXT), ?)"  # which is not decoded: it may be damaged, too
        )
        run(query, owner, f'"filename":"{batch_id}_')

    def _check_room(self, run: Run, owner: str, num_bytes: int) -> None:
        ((used,),) = run("SELECT coalesce(sum(num_bytes), 0) FROM files WHERE owner = ?", owner)
        if used + num_bytes > self._limits.num_bytes:
            raise QuotaExceededError(
                f"The files would have {shown_size(used + num_bytes)}, more than the "
                f"{shown_size(self._limits.num_bytes)} that they may have (batch_disk_limit): delete some."
            )

    def _insert_file(self, run: Run, record: FileRecord) -> None:
        run(
            "INSERT INTO files (id, owner, purpose, num_bytes, expires_s, is_ready, record) "
            "VALUES (?, ?, ?, ?, ?, 0, ?)",
            *(record.id, record.owner, record.purpose, record.num_bytes, record.expires_s),
            msgspec.json.encode(record),
        )

    def _file(self, run: Run, owner: str, file_id: str) -> Row:
        """Purpose and record."""
        query = "SELECT purpose, record FROM files WHERE id = ? AND owner = ? AND is_ready AND expires_s > ?"
        rows = run(query, file_id, owner, int(time.time()))
        if not rows:
            raise ObjectNotFoundError(f"There is no file {file_id[:100]!r}: see GET /v1/files.")
        return rows[0]

    def _batch(self, run: Run, owner: str, batch_id: str) -> BatchRecord:
        rows = run("SELECT record FROM batches WHERE id = ? AND owner = ?", batch_id, owner)
        if not rows:
            raise ObjectNotFoundError(f"There is no batch {batch_id[:100]!r}: see GET /v1/batches.")
        return _batches.read(batch_id, rows[0][0])

    def _page(self, records: _Records[RecordT], page: Page, where: str, values: Seq[object]) -> _Listed[RecordT]:
        sign, place = ("<", _LAST_NUMBER) if page.order == "desc" else (">", 0)
        query = (
            f"SELECT number, id, record FROM {records.table} WHERE {where} AND number {sign} ? "
            f"ORDER BY number {page.order} LIMIT ?"
        )
        found: list[RecordT] = []
        with self._transaction() as run:
            if page.after is not None:
                rows = run(f"SELECT number FROM {records.table} WHERE id = ? AND owner = ?", page.after, values[0])
                if not rows:
                    raise InvalidRequestError(f"after names {page.after[:100]!r}, which is not there.", "after")
                place = rows[0][0]
            while missing := page.limit + 1 - len(found):
                rows = run(query, *values, place, missing)
                found += records.readable(rows)
                if len(rows) < missing:
                    break
                place = rows[-1][0]
        return found[: page.limit], len(found) > page.limit

    @contextmanager
    def _transaction(self) -> Iterator[Run]:
        """All of it, or nothing; alone among all processes."""
        try:
            with self._lock:
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    yield lambda query, *values: self._connection.execute(query, values).fetchall()
                    self._connection.execute("COMMIT")
                except BaseException:  # raised again: half a change is taken back
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                    raise
        except sqlite3.DatabaseError as error:
            if (full := full_disk(error, self._folder)) is not None or "full" in str(error):
                raise full or DiskFullError(f"The disk of {self._folder} is full: free space there.") from error
            raise OSError(f"The database in {self._folder} cannot be used: {error}.") from error


Run: TypeAlias = Callable[..., list[Row]]


class _Records(Generic[RecordT]):
    """The records of ``table``. ``remedy``: what a client may do about one that cannot be read."""

    def __init__(self, table: str, decoder: msgspec.json.Decoder[RecordT], remedy: str) -> None:
        self.table = table
        self._decoder: msgspec.json.Decoder[RecordT] = decoder
        self._remedy = remedy

    def read(self, record_id: str, record: bytes) -> RecordT:
        """Raises RecordUnreadableError."""
        try:
            return self._decoder.decode(record)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            message = f"What the server has kept of {record_id} cannot be read: {self._remedy.format(record_id)}."
            raise RecordUnreadableError(message) from error

    def readable(self, rows: Seq[Row]) -> Iterator[RecordT]:
        """Those of ``rows`` (number, id, record) that can be read; the others are logged."""
        for _, record_id, record in rows:
            try:
                yield self.read(record_id, record)
            except RecordUnreadableError as error:
                log.error("a list leaves out %s: its record cannot be read: %s", record_id, error.__cause__)


def _answer_files(batch: BatchRecord, lifetime_s: int) -> list[FileRecord]:
    """The files of its answers and its errors, as they are now."""
    now_s, at = int(time.time()), batch.checkpoint
    return [
        FileRecord(file_id, batch.owner, "batch_output", f"{batch.id}_{what}.jsonl", size, now_s, now_s + lifetime_s)
        for file_id, what, size in (
            (batch.output_id, "output", at.output_bytes),
            (batch.error_id, "error", at.error_bytes),
        )
    ]


def _update_file(run: Run, record: FileRecord) -> None:
    query = "UPDATE files SET num_bytes = ?, expires_s = ?, is_ready = ?, record = ? WHERE id = ?"
    run(query, record.num_bytes, record.expires_s, record.is_ready, msgspec.json.encode(record), record.id)


def _update_batch(run: Run, record: BatchRecord) -> None:
    query = "UPDATE batches SET is_open = ?, finished_s = ?, record = ? WHERE id = ?"
    run(query, record.is_open, record.finished_s, msgspec.json.encode(record), record.id)


def store_of(config: ServeConfig) -> BatchStore | None:
    """The store of a server with ``config``; None: it has no batches. Raises ConfigError."""
    if config.batch_dir is None:
        return None
    folder = home_expanded(config.batch_dir)
    try:
        return BatchStore(folder, OwnerLimits(config.batch_open_limit, config.batch_disk_limit))
    except (OSError, sqlite3.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"batch_dir {folder} cannot be used: {reason}. Give a folder that can be written.") from error


_files = _Records("files", msgspec.json.Decoder(FileRecord), "delete it, and upload it again")
_batches = _Records(
    "batches",
    msgspec.json.Decoder(BatchRecord),
    "its answers, if any, are files called {0}_output.jsonl and {0}_error.jsonl (GET /v1/files)",
)
