"""Fake engines under a test's control: one waits at a gate, one fails on chosen inputs. No test sleeps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Set
from dataclasses import replace

import numpy as np

from bei.core import Float32Array, Int32Array, Limits, Outputs, PackedBatch
from bei.engine.fake import FakeEngine

# A test that waits longer than this has failed; it is no part of any passing test's time.
DEADLINE_S = 60.0


def sequences_of(batch: PackedBatch) -> list[list[int]]:
    """The token ids of each sequence of ``batch``."""
    bounds = zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
    return [batch.input_ids[start:end].tolist() for start, end in bounds]


class GatedEngine(FakeEngine):
    """Every ``run`` waits until the test lets it through. ``batches`` holds what has been taken."""

    def __init__(self, limits: Limits, num_streams: int = 1) -> None:
        super().__init__(limits, num_streams)
        self._entered = threading.Semaphore(0)
        self._passes = threading.Semaphore(0)
        self._is_open = threading.Event()

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """Say that a batch was taken, then wait."""
        answers = super().run(batch)
        self._entered.release()
        if not self._is_open.is_set():
            assert self._passes.acquire(timeout=DEADLINE_S), "nobody opened the gate"
        return answers

    def wait_entered(self) -> None:
        """Return once another batch has arrived at the gate."""
        assert self._entered.acquire(timeout=DEADLINE_S), "no batch arrived at the engine"

    def let_one_through(self) -> None:
        """One batch that waits (or comes next) may finish."""
        self._passes.release()

    def open(self, num_waiting: int = 1) -> None:
        """Nothing waits any more."""
        self._is_open.set()
        for _ in range(num_waiting):
            self._passes.release()


class PickyEngine(FakeEngine):
    """Raises ``error`` for a batch in which any sequence ``is_poison``."""

    def __init__(
        self, limits: Limits, is_poison: Callable[[Sequence[int]], bool], error: type[Exception] = RuntimeError
    ) -> None:
        super().__init__(limits)
        self._is_poison = is_poison
        self._error = error

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """Fail or answer."""
        answers = super().run(batch)
        if any(self._is_poison(sequence) for sequence in sequences_of(batch)):
            raise self._error("poison")
        return answers


class NaNEngine(FakeEngine):
    """Answers NaN for sequences that contain ``poison_id``, and finite vectors for their neighbours."""

    def __init__(self, limits: Limits, poison_id: int) -> None:
        super().__init__(limits)
        self._poison_id = poison_id

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """Spoil one component of the row."""
        rows = super().run(batch)["embedding"]
        for row, sequence in zip(rows, sequences_of(batch), strict=True):
            if self._poison_id in sequence:
                row[3] = np.nan
        return {"embedding": rows}


class TokenEngine(FakeEngine):
    """Also answers "token_ids", a row a token: its id, its place in the sequence, and NaN for ``poison_id``."""

    def __init__(self, limits: Limits, num_streams: int = 1, poison_id: int | None = None) -> None:
        super().__init__(limits, num_streams)
        outputs = {**self.info.outputs, "token_ids": 2}
        self.info = replace(self.info, outputs=outputs, per_token=frozenset({"token_ids"}))
        self._poison_id = poison_id

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """Two outputs."""
        tokens = np.concatenate([token_rows(np.array(sequence, np.int32)) for sequence in sequences_of(batch)])
        tokens[batch.input_ids == self._poison_id, 1] = np.nan
        return {**super().run(batch), "token_ids": tokens}


def token_rows(input_ids: Int32Array) -> Float32Array:
    """What the token engine answers for the tokens of one sequence, float32 [tokens, 2]."""
    return np.stack([input_ids, np.arange(len(input_ids))], axis=1).astype(np.float32)


def ids(*values: int) -> Int32Array:
    """Token ids as the engine takes them."""
    return np.array(values, np.int32)
