"""A batch in two, where the device has no memory for the whole."""

from __future__ import annotations

import numpy as np

from bei.core import PackedBatch


def halves(batch: PackedBatch) -> tuple[PackedBatch, PackedBatch]:
    """``batch``, of two sequences or more, cut between the two sequences where it is nearest to half its tokens."""
    inner = batch.cu_seqlens[1:-1]
    cut = 1 + int(np.abs(inner - batch.num_tokens / 2).argmin())
    return _part(batch, 0, cut), _part(batch, cut, batch.batch_size)


def _part(batch: PackedBatch, first: int, end: int) -> PackedBatch:
    """The sequences from ``first`` on, without ``end``."""
    starts = batch.cu_seqlens[first : end + 1]
    tokens = slice(starts[0], starts[-1])
    types, key_lens, unpooled_lens = batch.token_type_ids, batch.key_lens, batch.unpooled_lens
    return PackedBatch(
        batch.input_ids[tokens],
        starts - starts[0],
        None if types is None else types[tokens],
        None if key_lens is None else key_lens[first:end],
        None if unpooled_lens is None else unpooled_lens[first:end],
    )
