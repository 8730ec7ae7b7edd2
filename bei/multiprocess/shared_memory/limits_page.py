"""Memory that all processes of a server map: what each front end holds of the limits that are the server's.

    header      what this memory is
    models      a name in each place that is taken
    cells       one for each front end: numbers that it alone writes, and all read
    buckets     a key's name and what is counted in each place that is taken, and how full that bucket is

It is anonymous (memfd): nothing is left of it, whoever is killed. Numbers are words of 8 bytes, which x86-64 and arm64
read and write whole. Pages that nobody has written take no memory, so tables can be large.

Where two processes would change one word (a bucket; a place that is not taken yet), they take turns by a lock on its
bytes. That must be a record lock of fcntl: the system frees it when its holder is killed, as it does with flock, but
flock and open file description locks belong to the opening of a file, and processes that have got one descriptor from
the supervisor share that: none would keep the others out. A record lock belongs to a process, so threads need a lock of
their own beside it; and no process may close a second descriptor of the memory, which would free all of its locks.
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
from typing import Final

from bei.errors import ConfigError

_WORD: Final = 8
_PAGE_WORDS: Final = 512
_MAGIC: Final = 0x62656900_00000001  # "bei", and the version of what follows

_MOST_MODELS: Final = 256
_MOST_BUCKETS: Final = 1 << 20  # a file of keys (10 MB at most) cannot name so many rates

# A place of the tables of names: the name's digest, and what belongs to it.
_DIGEST_WORDS: Final = 2
_BUCKET_WORDS: Final = _DIGEST_WORDS + 2
_MODEL_WORDS: Final = _DIGEST_WORDS

# Words of a cell. Of each model there are as many more as ``OF_MODEL`` has.
ALIVE_NS: Final = 0  # of the monotonic clock: when the front end has said that it accepts connections; 0: it does not
NUM_OPEN: Final = 1  # connections
NUM_COMING: Final = 2  # connections that were accepted and are not made yet
NUM_IDLE: Final = 3
BODY_BYTES: Final = 4
NUM_REFUSED: Final = 5  # uploads, for want of memory that others hold; since the front end began
ANSWER_BYTES: Final = 6
_FIRST_OF_MODELS: Final = 8
OF_MODEL: Final = 5
_MODEL_STRUCT: Final = struct.Struct(f"@{OF_MODEL}q")  # native: each word is copied whole
_CELL_WORDS: Final = _FIRST_OF_MODELS + _MOST_MODELS * OF_MODEL

_MODELS: Final = _PAGE_WORDS
_CELLS: Final = _MODELS + _MOST_MODELS * _MODEL_WORDS

# A lock is held for some microseconds; who does not get it for so long waits for a process that does not run.
_PATIENCE_S: Final = 0.05
_PATIENCE_FOR_NAMES_S: Final = 1.0
_RETRY_S: Final = 1e-4

_BUSY: Final = (errno.EACCES, errno.EAGAIN)


class SharedPage:
    """The memory, as one process sees it. ``cell``: the front end's own; None: of another process.

    Safe in threads, but for ``lock``.
    """

    def __init__(self, descriptor: int, num_cells: int, cell: int | None) -> None:
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _num_bytes(num_cells))
        self._words = memoryview(self._memory).cast("q")
        self._floats = memoryview(self._memory).cast("d")
        self._num_cells = num_cells
        self._cell = cell
        self._claiming = threading.Lock()

    @classmethod
    def create(cls, num_cells: int) -> SharedPage:
        """The supervisor's, for so many front ends."""
        descriptor = os.memfd_create("bei-shared", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _num_bytes(num_cells))
        page = cls(descriptor, num_cells, None)
        page._words[0], page._words[1] = _MAGIC, num_cells
        return page

    @classmethod
    def attach(cls, descriptor: int, cell: int | None = None) -> SharedPage:
        """What the supervisor has created. Takes over ``descriptor``. Raises ValueError where it is something else."""
        header = os.pread(descriptor, 2 * _WORD, 0)
        magic, num_cells = memoryview(header).cast("q") if len(header) == 2 * _WORD else (0, 0)
        if magic != _MAGIC or os.fstat(descriptor).st_size != _num_bytes(num_cells):
            raise ValueError("this is not the memory that bei's processes share")
        if cell is not None and not 0 <= cell < num_cells:
            raise ValueError(f"there are {num_cells} cells, and none has the number {cell}")
        return cls(descriptor, num_cells, cell)

    def fileno(self) -> int:
        """The descriptor that other processes get."""
        return self._descriptor

    def close(self) -> None:
        """Whatever was got from here must not be used any more."""
        self._words.release()
        self._floats.release()
        self._memory.close()
        os.close(self._descriptor)

    def clear(self, cell: int) -> None:
        """The front end of this cell is dead: it holds nothing. Before another one gets the cell."""
        first = _CELLS + cell * _CELL_WORDS
        self._words[first : first + _CELL_WORDS] = memoryview(bytes(_CELL_WORDS * _WORD)).cast("q")

    # Cells.

    def read(self, word: int) -> int:
        """A word of one's own cell."""
        return self._words[self._own(word)]

    def write(self, word: int, value: int) -> None:
        """A word of one's own cell."""
        self._words[self._own(word)] = value

    def write_model(self, word: int, values: Iterable[int]) -> None:
        """The words of a model, of which ``word`` is the first, of one's own cell."""
        _MODEL_STRUCT.pack_into(self._memory, self._own(word) * _WORD, *values)

    def model_of_others(self, word: int) -> list[tuple[int, ...]]:
        """The words of a model, of which ``word`` is the first, of every other cell."""
        first, step = (_CELLS + word) * _WORD, _CELL_WORDS * _WORD
        return [
            _MODEL_STRUCT.unpack_from(self._memory, first + cell * step)
            for cell in range(self._num_cells)
            if cell != self._cell
        ]

    def of_others(self, word: int) -> list[int]:
        """A word of every other cell."""
        first = _CELLS + word
        found = self._words[first : first + self._num_cells * _CELL_WORDS : _CELL_WORDS].tolist()
        if self._cell is not None:
            del found[self._cell]
        return found

    def _own(self, word: int) -> int:
        assert self._cell is not None, "only front ends have cells"
        return _CELLS + self._cell * _CELL_WORDS + word

    # Tables of names.

    def words_of_model(self, name: str) -> int:
        """The first of the words that a cell has for the model. Raises ConfigError where too many have been served."""
        place = self._claimed(_MODELS, _MODEL_WORDS, _MOST_MODELS, name)
        if place is None:
            raise ConfigError(f"More than {_MOST_MODELS} models are served: start several servers.")
        return _FIRST_OF_MODELS + (place - _MODELS) // _MODEL_WORDS * OF_MODEL

    def word_of_bucket(self, name: str, what: str) -> int:
        """The first of the two words of the bucket of a key's name and of what is counted.

        Raises ConfigError where there have been too many.
        """
        first = _CELLS + self._num_cells * _CELL_WORDS
        place = self._claimed(first, _BUCKET_WORDS, _MOST_BUCKETS, f"{name}\0{what}")
        if place is None:
            raise ConfigError(
                f"API keys have had {_MOST_BUCKETS} rates since the start, and there can be no more: restart the "
                "server."
            )
        return place + _DIGEST_WORDS

    def _claimed(self, first: int, width: int, capacity: int, name: str) -> int | None:
        """The place of ``name`` in a table, taken when it is first asked for; None: there is none left."""
        digest = hashlib.blake2b(name.encode(), digest_size=_DIGEST_WORDS * _WORD).digest()
        wanted = [*memoryview(digest).cast("q")]
        step = wanted[0] % capacity
        with self._claiming:
            if not self.lock(first, _PATIENCE_FOR_NAMES_S):
                raise ConfigError(
                    "A process of this server holds a lock that all share and does not run: restart the server."
                )
            try:
                for attempt in range(capacity):
                    place = first + (step + attempt) % capacity * width
                    found = [*self._words[place : place + _DIGEST_WORDS]]
                    if found == wanted:
                        return place
                    if found == [0, 0]:  # half of one, by a process that was killed meanwhile, is lost
                        self._words[place], self._words[place + 1] = wanted
                        return place
                return None
            finally:
                self.unlock(first)

    # Words that several processes change.

    def lock(self, word: int, patience_s: float = _PATIENCE_S) -> bool:
        """Keep other processes from ``word`` until ``unlock``. False: one of them has it for longer than that."""
        until_s = time.monotonic() + patience_s
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, _WORD, word * _WORD)
            except OSError as error:
                if error.errno not in _BUSY:
                    raise
            else:
                return True
            if time.monotonic() > until_s:
                return False
            time.sleep(_RETRY_S)

    def unlock(self, word: int) -> None:
        """The opposite of ``lock``."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, _WORD, word * _WORD)

    def pair(self, word: int) -> tuple[float, float]:
        """Two numbers, beginning at ``word``."""
        return self._floats[word], self._floats[word + 1]

    def set_pair(self, word: int, first: float, second: float) -> None:
        """Write both, one after the other: of a process that is killed between, the first."""
        self._floats[word] = first
        self._floats[word + 1] = second


def _num_bytes(num_cells: int) -> int:
    words = _CELLS + num_cells * _CELL_WORDS + _MOST_BUCKETS * _BUCKET_WORDS
    return words * _WORD
