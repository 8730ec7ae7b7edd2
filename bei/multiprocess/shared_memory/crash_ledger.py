"""What an engine runs, in memory that outlives its process: so the next process knows which inputs may have ended it.

    page 0      what this memory is
    suspects    an input's digest, how many processes have ended while they ran it, and when the last one did
    regions     one an engine: the token ids that each of its streams runs now

The memory is anonymous (memfd) and the supervisor's, so nothing is left of it, whoever is killed. One process at a time
writes to it. A step costs two copies of integers: digests are made of what a process that has ended has left.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from bei.core import Limits, PackedBatch
from bei.multiprocess.shared_memory.segment import in_pages

_MAGIC: Final = b"bei steps 1"
_MOST_SUSPECTS: Final = 4096
_SUSPECT: Final = struct.Struct("@16sqd")
_SUSPECTS_AT: Final = mmap.PAGESIZE
_REGIONS_AT: Final = _SUSPECTS_AT + in_pages(_MOST_SUSPECTS * _SUSPECT.size)

# Of a region: its bytes, the digest of what its engine is called, how many slots it has, the int32 words of a slot, and
# how many of those are for bounds.
_REGION: Final = struct.Struct("@q16s3q")
# Of a slot: whether a step runs there, and of how many sequences. Then come its bounds (cu_seqlens) and its ids.
_STATE_WORDS: Final = 2

# An input is to blame when so many processes have ended while they ran it.
GUILTY: Final = 2
# Nobody is suspected for ever, as the ends may have had other reasons.
_SUSPECTED_S: Final = 600.0
_GUILTY_S: Final = 60.0


class Slot:
    """What one stream runs. Of one thread at a time."""

    def __init__(self, words: npt.NDArray[np.int32], num_bounds: int) -> None:
        self._state = words[:_STATE_WORDS]
        self._bounds = words[_STATE_WORDS : _STATE_WORDS + num_bounds]
        self._ids = words[_STATE_WORDS + num_bounds :]

    def begin(self, batch: PackedBatch) -> None:
        """``batch`` runs from now on."""
        self._bounds[: batch.batch_size + 1] = batch.cu_seqlens
        self._ids[: batch.num_tokens] = batch.input_ids
        self._state[1] = batch.batch_size
        self._state[0] = 1  # last, as the process may end at any moment

    def end(self) -> None:
        """Nothing runs."""
        self._state[0] = 0

    def running(self) -> Iterator[bytes]:
        """The token ids of each sequence that runs, or ran when its process ended."""
        if self._state[0]:
            bounds = self._bounds[: int(self._state[1]) + 1].tolist()
            for first, last in itertools.pairwise(bounds):
                yield self._ids[first:last].tobytes()


class Region:
    """The slots of one engine. ``salt``: of the digests of its inputs, as other models have other token ids."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.num_bytes, self._salt, num_slots, num_words, num_bounds = _REGION.unpack_from(memory)
        words = np.frombuffer(memory, np.int32, num_slots * num_words, _REGION.size)
        self.slots = [Slot(part, num_bounds) for part in words.reshape(num_slots, num_words)]

    def digests(self, batch: PackedBatch) -> list[bytes]:
        """One of each sequence."""
        parts = np.split(batch.input_ids, batch.cu_seqlens[1:-1])
        return [_digest(ids.tobytes(), self._salt) for ids in parts]

    def running(self) -> Iterator[bytes]:
        """The digests of all sequences that run."""
        for slot in self.slots:
            for ids in slot.running():
                yield _digest(ids, self._salt)


class Ledger:
    """The memory, as one process sees it. ``has_found_steps``: the process before this one ended while a step ran.

    The supervisor makes it (``create``); a process that runs engines takes it over (``attach``): what ran in the one
    before is suspected from then on. Safe in threads.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _REGIONS_AT)
        self._lock = threading.Lock()
        # By digest: how many processes have ended, and when the last one did. The one noted first comes first.
        self._suspects: dict[bytes, tuple[int, float]] = {}
        self._free: list[Region] = []
        self.has_found_steps = False

    @classmethod
    def create(cls) -> Ledger:
        """One without suspects."""
        descriptor = os.memfd_create("bei-steps", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _REGIONS_AT)
        os.pwrite(descriptor, _MAGIC, 0)
        return cls(descriptor)

    @classmethod
    def attach(cls, descriptor: int) -> Ledger:
        """What the supervisor has made, once the process before has ended. Takes over ``descriptor``.

        Raises ValueError where it is something else.
        """
        if os.pread(descriptor, len(_MAGIC), 0) != _MAGIC:
            raise ValueError("this is not the memory in which steps are noted")
        ledger = cls(descriptor)
        ledger._take_over(time.monotonic())
        return ledger

    def fileno(self) -> int:
        """The descriptor that the engine's process gets."""
        return self._descriptor

    def close(self) -> None:
        """By the supervisor."""
        self._memory.close()
        os.close(self._descriptor)

    # What runs.

    def region(self, name: str, limits: Limits, num_slots: int) -> Region:
        """For the engine of the model ``name``, whose batches keep ``limits``. To be given back."""
        num_bounds = limits.max_batch_size + 1
        num_words = _STATE_WORDS + num_bounds + limits.max_num_tokens
        num_bytes = in_pages(_REGION.size + num_slots * num_words * 4)
        with self._lock:
            memory = self._room(num_bytes)
        _REGION.pack_into(memory, 0, num_bytes, _digest(name.encode()), num_slots, num_words, num_bounds)
        return Region(memory)

    def give_back(self, region: Region) -> None:
        """Nothing runs there any more."""
        with self._lock:
            self._free.append(region)

    def _room(self, num_bytes: int) -> mmap.mmap:
        for region in self._free:
            if region.num_bytes == num_bytes:
                self._free.remove(region)
                return region.memory
        start = os.fstat(self._descriptor).st_size
        os.ftruncate(self._descriptor, start + num_bytes)
        return mmap.mmap(self._descriptor, num_bytes, offset=start)

    # Who is suspected.

    @property
    def has_suspects(self) -> bool:
        """Whether anything is suspected at all, as is hardly ever so."""
        return bool(self._suspects)

    def num_ended(self, digest: bytes) -> int:
        """How many processes have ended while they ran the input of this digest, as far as it still counts."""
        with self._lock:
            num_ended, ended_s = self._suspects.get(digest, (0, 0.0))
            if num_ended and time.monotonic() - ended_s > (_GUILTY_S if num_ended >= GUILTY else _SUSPECTED_S):
                self._forget(digest)
                return 0
            return num_ended

    def acquit(self, digest: bytes) -> None:
        """The input was run alone, and the process is still there."""
        with self._lock:
            self._forget(digest)

    def _forget(self, digest: bytes) -> None:
        if self._suspects.pop(digest, None) is not None:
            self._write_suspects()

    def _take_over(self, now_s: float) -> None:
        """Suspect what ran, and make room for what will run."""
        for index in range(_MOST_SUSPECTS):
            digest, num_ended, ended_s = _SUSPECT.unpack_from(self._memory, _SUSPECTS_AT + index * _SUSPECT.size)
            if not num_ended:
                break
            self._suspects[digest] = num_ended, ended_s
        self._free = self._left()
        for digest in {digest for region in self._free for digest in region.running()}:
            num_ended, _ = self._suspects.pop(digest, (0, 0.0))
            self._suspects[digest] = num_ended + 1, now_s
            self.has_found_steps = True
        while len(self._suspects) > _MOST_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]
        self._write_suspects()
        for region in self._free:
            for slot in region.slots:
                slot.end()

    def _left(self) -> list[Region]:
        """The regions of the process before."""
        found = []
        start, end = _REGIONS_AT, os.fstat(self._descriptor).st_size
        while start < end:
            num_bytes = _REGION.unpack(os.pread(self._descriptor, _REGION.size, start))[0]
            if not num_bytes:  # the last one: the process ended before it had said what it is for
                os.ftruncate(self._descriptor, start)
                break
            found.append(Region(mmap.mmap(self._descriptor, num_bytes, offset=start)))
            start += num_bytes
        return found

    def _write_suspects(self) -> None:
        place = _SUSPECTS_AT
        for digest, (num_ended, ended_s) in self._suspects.items():
            _SUSPECT.pack_into(self._memory, place, digest, num_ended, ended_s)
            place += _SUSPECT.size
        self._memory[place:_REGIONS_AT] = bytes(_REGIONS_AT - place)


def _digest(data: bytes, salt: bytes = b"") -> bytes:
    return hashlib.blake2b(data, digest_size=16, salt=salt).digest()
