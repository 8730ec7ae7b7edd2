"""A deterministic engine without a model, whose output identifies its input, for tests and front end measurements."""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from bei.core import EngineInfo, Float32Array, Int32Array, Limits, Outputs, PackedBatch

DIMENSION = 8


class FakeEngine:
    """Row i is [number of tokens, first id, last id, sum of ids, sum of token types, adapter, 0, 1] of sequence i."""

    def __init__(self, limits: Limits, num_streams: int = 1) -> None:
        self.info = EngineInfo("fake", "fp32", "none", limits, {"embedding": DIMENSION}, num_streams=num_streams)
        self.batches: list[PackedBatch] = []

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        """Answer at once, and store the batch."""
        self.batches.append(batch)
        starts, ends = batch.cu_seqlens[:-1], batch.cu_seqlens[1:]
        types = batch.token_type_ids
        adapters = [0] * batch.batch_size if batch.adapters is None else batch.adapters.tolist()
        rows = [
            fake_row(batch.input_ids[start:end], None if types is None else types[start:end], adapter)
            for start, end, adapter in zip(starts, ends, adapters, strict=True)
        ]
        return {"embedding": np.stack(rows)}

    def warmup(self) -> None:
        """A no-op."""

    def close(self) -> None:
        """A no-op."""


def fake_row(input_ids: Int32Array, token_type_ids: Int32Array | None = None, adapter: int = 0) -> Float32Array:
    """The fake engine's row for a sequence, float32 [8]."""
    types = 0 if token_type_ids is None else int(token_type_ids.sum())
    values = [len(input_ids), int(input_ids[0]), int(input_ids[-1]), int(input_ids.sum()), types, adapter, 0, 1]
    return np.array(values, np.float32)
