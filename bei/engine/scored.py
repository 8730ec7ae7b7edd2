"""Which tokens of a batch have their likelihoods computed, as inputs of graphs that score a language model's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from bei.core import Int32Array, PackedBatch

NAMES = frozenset({"scored_tokens", "scored_before", "token_scores"})


def scored_inputs(batch: PackedBatch, num_tokens: int, bucket: Callable[[int], int] | None) -> dict[str, Int32Array]:
    """A token is scored unless it is its sequence's first, or left out of means (``PackedBatch.unpooled_lens``); where
    sequences share it, if any of them scores it. With K' scored tokens, bucketed (None: the ``num_tokens`` of the
    step), int32:

    - ``scored_tokens`` [K']: the packed position of each. ``scored_before`` [K']: that of the token in front of it.
    - ``token_scores`` [T']: per packed token, its place among them; K' if it has none.
    """
    lengths = np.diff(batch.cu_seqlens)
    positions = np.arange(batch.num_tokens, dtype=np.int32) - np.repeat(batch.cu_seqlens[:-1], lengths)
    first = np.ones(batch.batch_size, np.int32) if batch.unpooled_lens is None else np.maximum(batch.unpooled_lens, 1)
    is_scored = positions >= np.repeat(first, lengths)
    if batch.shared is None:
        tokens: npt.NDArray[np.integer[Any]] = np.flatnonzero(is_scored)
        before: npt.NDArray[np.integer[Any]] = tokens - 1
    else:
        kept, places = batch.shared
        tokens = np.unique(places[is_scored])
        before = places[kept[tokens] - 1]
    size = num_tokens if bucket is None else bucket(max(1, len(tokens)))
    found = {name: np.zeros(size, np.int32) for name in ("scored_tokens", "scored_before")}
    found["scored_tokens"][: len(tokens)], found["scored_before"][: len(tokens)] = tokens, before
    found["token_scores"] = np.full(num_tokens, size, np.int32)
    found["token_scores"][tokens] = np.arange(len(tokens), dtype=np.int32)
    return found
