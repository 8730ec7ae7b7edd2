"""Engines and references with vectors that follow from token ids, exact or broken at will, slow on a clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import numpy as np

from bei.core import Encoding, EngineInfo, Float32Array, Int32Array, Limits, Outputs, PackedBatch

Fault = Callable[[Float32Array], Float32Array]

LIMITS = Limits(max_num_tokens=128, max_batch_size=8, max_seq_len=32)


DIMENSION = 16


def vector_of(ids: Int32Array) -> Float32Array:
    """A random direction that depends on every id and its position."""
    seed = [position * 1000 + int(token) for position, token in enumerate(ids)]
    return np.random.default_rng(seed).standard_normal(DIMENSION, np.float32)


def token_vectors_of(ids: Int32Array) -> Float32Array:
    """``vector_of`` for each token and those before it, [tokens, DIMENSION]."""
    return np.stack([vector_of(ids[: end + 1]) for end in range(len(ids))])


class StubEngine:
    """Answers with ``vector_of`` each sequence, changed by ``fault`` per batch, and records its batches.

    ``per_token``: instead, for each token and those before it.
    """

    def __init__(self, fault: Fault = lambda rows: rows, output: str = "embedding", *, per_token: bool = False) -> None:
        names = frozenset({output} if per_token else ())
        self.info = EngineInfo("stub", "fp32", "none", LIMITS, {output: DIMENSION}, names)
        self.batches: list[PackedBatch] = []
        self._fault = fault
        self._output = output

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        self.batches.append(batch)
        sequences = np.split(batch.input_ids, batch.cu_seqlens[1:-1])
        if self.info.per_token:
            rows = np.concatenate([token_vectors_of(ids) for ids in sequences])
        else:
            rows = np.stack([vector_of(ids) for ids in sequences])
        return {self._output: self._fault(rows)}

    def warmup(self) -> None:
        """Nothing to allocate."""

    def close(self) -> None:
        """Nothing to free."""


class StubReference:
    name = "stub"
    is_own = False

    def __init__(self, fault: Fault = lambda rows: rows, output: str = "embedding", *, per_token: bool = False) -> None:
        self._fault = fault
        self._output = output
        self._per_token = per_token

    def run(self, encodings: Sequence[Encoding], outputs: Sequence[str]) -> dict[str, list[Float32Array]]:
        assert list(outputs) == [self._output]
        if self._per_token:
            return {self._output: [self._fault(token_vectors_of(encoding.input_ids)) for encoding in encodings]}
        return {self._output: list(self._fault(np.stack([vector_of(encoding.input_ids) for encoding in encodings])))}


class Clock:
    """Time advances only when a stub computes a text."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class SlowEngine(StubEngine):
    def __init__(self, clock: Clock, text_s: float) -> None:
        super().__init__()
        self._clock = clock
        self._text_s = text_s

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        self._clock.now_s += self._text_s * batch.batch_size
        return super().run(batch, outputs)


class SlowReference(StubReference):
    def __init__(self, clock: Clock, text_s: float) -> None:
        super().__init__()
        self._clock = clock
        self._text_s = text_s

    def run(self, encodings: Sequence[Encoding], outputs: Sequence[str]) -> dict[str, list[Float32Array]]:
        self._clock.now_s += self._text_s * len(encodings)
        return super().run(encodings, outputs)
