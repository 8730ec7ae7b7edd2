"""Splits a batch for which the device has not enough memory."""

from __future__ import annotations

import numpy as np

from bei.core import PackedBatch


def halves(batch: PackedBatch) -> tuple[PackedBatch, PackedBatch]:
    """The halves of ``batch`` (two sequences or more), split between sequences as near to half its tokens as
    possible."""
    inner = batch.cu_seqlens[1:-1]
    cut = 1 + int(np.abs(inner - batch.num_tokens / 2).argmin())
    return _part(batch, 0, cut), _part(batch, cut, batch.batch_size)


def _part(batch: PackedBatch, first: int, end: int) -> PackedBatch:
    """The sequences ``first`` to ``end`` - 1."""
    starts = batch.cu_seqlens[first : end + 1]
    tokens = slice(starts[0], starts[-1])
    types, key_lens, unpooled_lens = batch.token_type_ids, batch.key_lens, batch.unpooled_lens
    return PackedBatch(
        batch.input_ids[tokens],
        starts - starts[0],
        None if types is None else types[tokens],
        None if key_lens is None else key_lens[first:end],
        None if unpooled_lens is None else unpooled_lens[first:end],
        None if batch.adapters is None else batch.adapters[first:end],
        None if batch.levels is None else batch.levels[tokens],
        digests=None if batch.digests is None else batch.digests[first:end],
        grids=None if batch.grids is None else batch.grids[first:end],
        labels=None if batch.labels is None else batch.labels.part(first, end),
        features=None if batch.features is None else batch.features.part(tokens),
    )
