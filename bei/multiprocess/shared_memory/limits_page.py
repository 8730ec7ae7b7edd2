"""Memory that all processes of a server map: what each front end uses of the limits that are the server's.

    cells       one for each front end: numbers that it alone writes, and all read
    buckets     a key's name and what is counted, as a digest, and how full that bucket is

It is anonymous (memfd): nothing is left of it, whichever process is killed. Numbers are words of 8 bytes, which x86-64
and arm64 read and write whole. Pages that were never written take no memory, so the table of buckets can be large.

Where two processes would change one word (a bucket; a place that is not taken yet), they take turns by a record lock of
fcntl on its bytes, which the system frees when its holder is killed. It belongs to a process: threads need a lock of
their own beside it, and no process may close a second descriptor of the memory, which would free all of its locks.
(flock and open file description locks belong to the opening of a file, which these processes share.)
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterable
from typing import Any, Final

from bei.errors import ConfigError

_WORD: Final = 8
_MOST_BUCKETS: Final = 1 << 20  # a file of keys (10 MB at most) cannot name so many rates
_BUCKET_WORDS: Final = 4  # two of a digest, two of the bucket

# Words of a cell, before those of each model.
ALIVE_NS: Final = 0  # of the monotonic clock: when the front end has said that it accepts connections; 0: it does not
NUM_OPEN: Final = 1  # connections
NUM_COMING: Final = 2  # connections that were accepted and are not made yet
NUM_IDLE: Final = 3
BODY_BYTES: Final = 4
BODIES_REFUSED: Final = 5  # for want of memory that others use; since the front end began
ANSWER_BYTES: Final = 6
ANSWERS_REFUSED: Final = 7
_FIRST_OF_MODELS: Final = 8
OF_MODEL: Final = 7
# As ``bei.service.admission.Accepted`` has them. Native: each word is copied whole.
_MODEL_STRUCT: Final = struct.Struct("@2q3d2q")

# A lock is held for some microseconds; who does not get it for so long waits for a process that does not run.
_PATIENCE_S: Final = 0.05
_PATIENCE_FOR_NAMES_S: Final = 1.0
_RETRY_S: Final = 1e-4


class SharedPage:
    """The memory of ``descriptor``, as one process sees it. ``cell``: the front end's own; None: of another process.

    Thread-safe, but for ``lock``.
    """

    def __init__(self, descriptor: int, num_cells: int, num_models: int, cell: int | None = None) -> None:
        self._descriptor = descriptor
        self.num_cells = num_cells
        self._cell_words = _FIRST_OF_MODELS + num_models * OF_MODEL
        self._first_bucket = num_cells * self._cell_words
        num_bytes = (self._first_bucket + _MOST_BUCKETS * _BUCKET_WORDS) * _WORD
        if cell is None:
            os.ftruncate(descriptor, num_bytes)
        self._memory = mmap.mmap(descriptor, num_bytes)
        self._words = memoryview(self._memory).cast("q")
        first = num_cells if cell is None else cell  # of another process: none
        self._own = self._words[first * self._cell_words : min(first + 1, num_cells) * self._cell_words]
        self._other_cells = [other * self._cell_words for other in range(num_cells) if other != cell]
        self._floats = memoryview(self._memory).cast("d")
        self._claiming = threading.Lock()

    @classmethod
    def create(cls, num_cells: int, num_models: int) -> SharedPage:
        return cls(os.memfd_create("bei-shared", os.MFD_CLOEXEC), num_cells, num_models)

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        """Whatever was got from here must not be used any more."""
        self._own.release()
        self._words.release()
        self._floats.release()
        self._memory.close()
        os.close(self._descriptor)

    def clear(self, cell: int) -> None:
        """The front end of this cell is dead: it uses nothing. Before another one gets the cell."""
        first, size = cell * self._cell_words, self._cell_words
        self._words[first : first + size] = memoryview(bytes(size * _WORD)).cast("q")

    # Cells.

    def read(self, word: int) -> int:
        return self._own[word]

    def write(self, word: int, value: int) -> None:
        self._own[word] = value

    def of_others(self, word: int) -> list[int]:
        """A word of every other cell."""
        return [self._words[cell + word] for cell in self._other_cells]

    def write_model(self, model: int, values: Iterable[float]) -> None:
        """The words of a model, of one's own cell."""
        _MODEL_STRUCT.pack_into(self._own, (_FIRST_OF_MODELS + model * OF_MODEL) * _WORD, *values)

    def model_of_others(self, model: int) -> list[tuple[Any, ...]]:
        """The words of a model, of every other cell."""
        first = _FIRST_OF_MODELS + model * OF_MODEL
        return [_MODEL_STRUCT.unpack_from(self._memory, (cell + first) * _WORD) for cell in self._other_cells]

    # Words that several processes change.

    def word_of_bucket(self, name: str, what: str) -> int:
        """The first of the two words of the bucket of a key's name and of what is counted, taken when it is first asked
        for. Raises ConfigError where there have been too many."""
        digest = hashlib.blake2b(f"{name}\0{what}".encode(), digest_size=2 * _WORD).digest()
        wanted = [*memoryview(digest).cast("q")]
        with self._claiming:
            if not self.lock(self._first_bucket, _PATIENCE_FOR_NAMES_S):
                raise ConfigError(
                    "A process of this server holds a lock that all share and does not run: restart the server."
                )
            try:
                for attempt in range(_MOST_BUCKETS):
                    place = self._first_bucket + (wanted[0] + attempt) % _MOST_BUCKETS * _BUCKET_WORDS
                    found = [self._words[place], self._words[place + 1]]
                    if found == [0, 0]:  # half of one, by a process that was killed meanwhile, is lost
                        self._words[place], self._words[place + 1] = found = wanted
                    if found == wanted:
                        return place + 2
            finally:
                self.unlock(self._first_bucket)
        raise ConfigError(
            f"API keys have had {_MOST_BUCKETS} rates since the start, and there can be no more: restart the server."
        )

    def lock(self, word: int, patience_s: float = _PATIENCE_S) -> bool:
        """Keep other processes from ``word`` until ``unlock``. False: one of them has it for longer than that."""
        until_s = time.monotonic() + patience_s
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, _WORD, word * _WORD)
                return True
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
            if time.monotonic() > until_s:
                return False
            time.sleep(_RETRY_S)

    def unlock(self, word: int) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, _WORD, word * _WORD)

    def pair(self, word: int) -> tuple[float, float]:
        """Two numbers, beginning at ``word``."""
        return self._floats[word], self._floats[word + 1]

    def set_pair(self, word: int, first: float, second: float) -> None:
        """Write both, one after the other: of a process that is killed between, the first."""
        self._floats[word] = first
        self._floats[word + 1] = second
