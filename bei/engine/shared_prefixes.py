"""Prefixes that sequences of a batch have in common: found by their token ids, computed once by causal models.

Sequences in the order of their texts share most with their neighbours, so a prefix within a prefix is found too.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import pairwise

import numpy as np

from bei.core import Int32Array, PackedBatch, SharedTokens

# Fewer equal tokens are a start that all texts of a model have, and not worth the search.
LEAST_SHARED = 16
_ID_BYTES = np.dtype(np.int32).itemsize
HEAD_BYTES = LEAST_SHARED * _ID_BYTES


def common_length(text: bytes, other: bytes) -> int:
    """How many token ids ``text`` and ``other``, INT32 as bytes, begin with in common."""
    length = min(len(text), len(other))
    if text[:length] == other[:length]:
        return length // _ID_BYTES
    differs = np.frombuffer(text, np.int32, length // _ID_BYTES) != np.frombuffer(other, np.int32, length // _ID_BYTES)
    return int(differs.argmax())


def shared_lengths(texts: Seq[bytes]) -> list[tuple[int, int]]:
    """The places of ``texts`` (INT32 ids as bytes) in the order of their bytes, each with the number of leading tokens
    that the one before it there begins with too; 0 for fewer than ``LEAST_SHARED``. Empty if nothing is shared."""
    if len({text[:HEAD_BYTES] for text in texts}) == len(texts):
        return []
    order = sorted(range(len(texts)), key=texts.__getitem__)
    found = [(order[0], 0)]
    for before, place in pairwise(order):
        length = common_length(texts[before], texts[place])
        found.append((place, length if length >= LEAST_SHARED else 0))
    return found if any([length for _, length in found]) else []


def num_shared(texts: Seq[bytes]) -> int:
    """How many tokens of ``texts`` need not be computed in one step."""
    return sum([length for _, length in shared_lengths(texts)])


def sharing(batch: PackedBatch) -> PackedBatch:
    """``batch`` with its ``shared`` tokens; as it is if there are none, or tokens differ in more than their ids."""
    if any(
        part is not None
        for part in (batch.token_type_ids, batch.key_lens, batch.adapters, batch.levels, batch.features)
    ):
        return batch
    bounds = batch.cu_seqlens.tolist()
    ids = np.ascontiguousarray(batch.input_ids).tobytes()
    lengths = shared_lengths([ids[_ID_BYTES * start : _ID_BYTES * end] for start, end in pairwise(bounds)])
    return batch._replace(shared=_shared_tokens(bounds, lengths)) if lengths else batch


def _shared_tokens(bounds: Seq[int], lengths: Seq[tuple[int, int]]) -> SharedTokens:
    places = np.empty(bounds[-1], np.int32)
    tokens = np.arange(bounds[-1], dtype=np.int32)
    kept: list[Int32Array] = []
    count = before = 0
    for sequence, length in lengths:
        start, end = bounds[sequence], bounds[sequence + 1]
        own = start + length
        places[start:own] = places[before : before + length]
        places[own:end] = tokens[count : count + end - own]
        kept.append(tokens[own:end])
        count, before = count + end - own, start
    return SharedTokens(np.concatenate(kept), places)
