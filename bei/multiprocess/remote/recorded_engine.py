"""An engine whose steps are recorded, so that an input that ends its process is found though the queue ends with it.

The record outlives the process, and no process waits for it or reads it until the next one starts: a step costs two
writes to memory.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Set
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from bei.core import Engine, EngineInfo, Outputs, PackedBatch
from bei.errors import EngineDeadError, EngineDiedError

log = logging.getLogger(__name__)

# The exit code of a process whose engine is dead.
EXIT_ENGINE_DEAD = 70

# Of a slot, which takes as much memory as was ever written there: bytes of a value, and the value. The first one has
# the suspects.
_SLOT_BYTES = 1 << 26
_SIZE = struct.Struct("@q")
_MOST_SUSPECTS = 4096
_Suspects = dict[bytes, tuple[int, float]]
# Digest of the model; int32, where the bytes of each sequence begin and end; token ids, or digests of images.
_Record = tuple[bytes, bytes, bytes]

# An input is to blame when so many processes have ended while they ran it.
GUILTY = 2
# Nothing is suspected for ever, as the processes may have ended for other reasons.
_SUSPECTED_S = 600.0
_GUILTY_S = 60.0


class StepRecords:
    """The token ids, or images' digests, that each stream of a process runs, in anonymous memory (memfd) of the
    supervisor's.

    The supervisor makes it (``create``); a process that runs engines takes it over (``attach``) once the process before
    has ended: the inputs that ran there are suspected from then on. Thread-safe.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._num_running = 0
        self._is_reserved = False  # for one step alone, which may wait for others to end
        self._suspects: _Suspects = {}  # by digest: how many processes have ended, and when the last one did
        self._num_slots = 1
        self._free: list[int] = []
        self._mapped: dict[int, mmap.mmap] = {}  # what has been written of each slot
        self.has_found_steps = False  # the process before ended while a step ran

    @classmethod
    def create(cls) -> StepRecords:
        return cls(os.memfd_create("bei-steps", os.MFD_CLOEXEC))

    @classmethod
    def attach(cls, descriptor: int) -> StepRecords:
        """Takes ``descriptor`` over."""
        records = cls(descriptor)
        records._suspects = records._read(0, _Suspects) or {}
        slots = range(_SLOT_BYTES, os.fstat(descriptor).st_size, _SLOT_BYTES)
        ran = {digest for slot in slots for digest in _digests_of(records._read(slot, _Record))}
        for digest in ran:
            num_ended, _ = records._suspects.pop(digest, (0, 0.0))
            records._suspects[digest] = num_ended + 1, time.monotonic()
        records.has_found_steps = bool(ran)
        records._write_suspects()
        for slot in slots:  # last, as this process may end too
            records._map(slot, _SIZE.size)
            records._clear(slot)
        records._num_slots += len(slots)
        return records

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        for memory in self._mapped.values():
            memory.close()
        os.close(self._descriptor)

    # Steps.

    def begin(self, batch: PackedBatch, salt: bytes, *, alone: bool = False) -> int:
        """``batch`` runs from now on, in the slot that is returned. ``alone``: no other step runs until it ends."""
        with self._lock:
            self._changed.wait_for(lambda: not self._is_reserved)
            if alone:
                self._is_reserved = True
                self._changed.wait_for(lambda: not self._num_running)
            self._num_running += 1
            if not self._free:
                self._free.append(self._num_slots * _SLOT_BYTES)
                self._num_slots += 1
            slot = self._free.pop()
        try:
            self._write(slot, _record_of(batch, salt))
        except (OSError, MemoryError):  # no memory for the record: others would wait for this step for ever
            self.end(slot, alone=alone)
            raise
        return slot

    def end(self, slot: int, *, alone: bool = False) -> None:
        self._clear(slot)
        with self._lock:
            self._num_running -= 1
            if alone:
                self._is_reserved = False
            self._changed.notify_all()

    def _clear(self, slot: int) -> None:
        if slot in self._mapped:  # else there was no memory for it
            _SIZE.pack_into(self._mapped[slot], 0, 0)
        self._free.append(slot)

    # Suspects.

    @property
    def has_suspects(self) -> bool:
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

    def _write_suspects(self) -> None:
        for digest in [*self._suspects][:-_MOST_SUSPECTS]:  # the oldest
            del self._suspects[digest]
        self._write(0, self._suspects)

    def _write(self, slot: int, value: object) -> None:
        data = msgspec.msgpack.encode(value)
        end = _SIZE.size + len(data)
        memory = self._mapped.get(slot)
        if memory is None or len(memory) < end:
            memory = self._map(slot, end)
        memory[_SIZE.size : end] = data
        _SIZE.pack_into(memory, 0, len(data))

    def _map(self, slot: int, num_bytes: int) -> mmap.mmap:
        """Memory of a slot. It is allocated before it is written to: a write to memory that is not there ends the
        process (SIGBUS). A step is written without calls of the system: these let go of the interpreter's lock, and
        under load the step would wait to get it back."""
        size = max(mmap.PAGESIZE, 1 << (num_bytes - 1).bit_length())
        os.posix_fallocate(self._descriptor, slot, size)
        memory = self._mapped[slot] = mmap.mmap(self._descriptor, size, offset=slot)
        return memory

    def _read(self, slot: int, kind: Any) -> Any:
        """None if there is nothing, or it was half written when the process before ended."""
        size = os.pread(self._descriptor, _SIZE.size, slot) or _SIZE.pack(0)
        data = os.pread(self._descriptor, _SIZE.unpack(size)[0], slot + _SIZE.size)
        try:
            return msgspec.msgpack.decode(data, type=kind) if data else None
        except msgspec.DecodeError:
            return None


def _record_of(batch: PackedBatch, salt: bytes) -> _Record:
    """Images have their digests in the place of their token ids, which are all 0."""
    if batch.digests is None:
        return salt, (batch.cu_seqlens * batch.input_ids.itemsize).tobytes(), batch.input_ids.tobytes()
    bounds = np.cumsum([0, *map(len, batch.digests)], dtype=np.int32)
    return salt, bounds.tobytes(), b"".join(batch.digests)


def _digests_of(record: _Record | None) -> list[bytes]:
    """Of the sequences that ran when their process ended."""
    if record is None:
        return []
    salt, bounds, content = record
    return [
        hashlib.blake2b(content[first:last], digest_size=16, salt=salt).digest()
        for first, last in pairwise(np.frombuffer(bounds, np.int32).tolist())
    ]


def digests_of(batch: PackedBatch, salt: bytes = b"") -> list[bytes]:
    """One of each sequence. ``salt``: see ``salt_of``."""
    return _digests_of(_record_of(batch, salt))


def salt_of(model: str) -> bytes:
    """Other models have other token ids."""
    return hashlib.blake2b(model.encode(), digest_size=16).digest()


def end_process() -> None:
    """At once: threads may be inside an engine that does not return."""
    os._exit(EXIT_ENGINE_DEAD)


class RecordedEngine:
    """``engine``, of the model ``name``, with its running steps in ``records``.

    A step with a suspected input raises EngineDiedError, as ``RemoteEngines`` does when a process ends: so the batch
    manager runs each of the sequences alone. Alone, such an input is run once more, with nothing beside it in the
    process, and raises EngineDiedError if that has ended a process too. ``on_dead`` is called when the engine says that
    it is dead, or its library ends a thread; by default the process ends, to be replaced.
    """

    def __init__(
        self, engine: Engine, name: str, records: StepRecords, on_dead: Callable[[], None] = end_process
    ) -> None:
        self._engine = engine
        self._salt = salt_of(name)
        self._records = records
        self._on_dead = on_dead

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """As engines do. Raises EngineDiedError too."""
        suspect = self._suspect(batch) if self._records.has_suspects else None
        alone = suspect is not None  # else a step of another model might end the process beside it, and do it twice
        slot = self._records.begin(batch, self._salt, alone=alone)
        try:
            return self._engine.run(batch, outputs)
        except BaseException as error:  # raised again; but a library that ends threads is as good as dead
            if isinstance(error, EngineDeadError) or not isinstance(error, Exception):
                log.exception("the engine is dead")
                self._on_dead()
            raise
        finally:
            self._records.end(slot, alone=alone)
            if suspect is not None:
                self._records.acquit(suspect)

    def warmup(self) -> None:
        self._engine.warmup()

    def close(self) -> None:
        self._engine.close()

    def _suspect(self, batch: PackedBatch) -> bytes | None:
        """The digest of a suspected input that is alone in ``batch``, and may be run. Raises EngineDiedError."""
        digests = digests_of(batch, self._salt)
        num_ended = max(map(self._records.num_ended, digests))
        if not num_ended:
            return None
        if len(digests) > 1 or num_ended >= GUILTY:
            raise EngineDiedError("The engine's process ended while it ran this input.")
        return digests[0]
