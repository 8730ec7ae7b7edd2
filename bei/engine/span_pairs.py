"""Pairs of spans of texts, as inputs of graphs that score them for relations (GLiNER2.5).

A sequence's pairs are rows of its labels' table (``PackedBatch.labels``): the number of the label of the head, behind
which that of the tail stands, the numbers of the head's first word and of the word behind its last one, and these of
the tail. A row of zeros stands for none: then the sequence's first word and its last one are a pair, for its first two
labels (held-out texts, measurements, canaries, and requests without relations). Words are those of
``bei.engine.boundaries``.

The scores of a sequence's pairs fill the rows of its tokens one after the other; behind the last one it is repeated.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from bei.core import Float32Array, Int32Array, LabelVectors, PackedBatch
from bei.engine.boundaries import words_of
from bei.engine.words import LABEL, Bucket, kinds_of

NAMES = frozenset({"pair_words", "pair_word_ids", "pair_firsts", "pair_stops", "pair_labels", "pair_features"})
_SLOTS = "pair_slots_"

_Numbers: TypeAlias = npt.NDArray[np.int64]


def pair_slots(most: int) -> str:
    """The name in ``graph_inputs`` of the slots of ``most`` pairs in a row; a part of the name, so that the graph
    carries it."""
    return f"{_SLOTS}{most}"


def pair_rows(labels: _Numbers, spans: _Numbers) -> LabelVectors:
    """The table of a text's pairs, of the labels of their heads [P], and of the first word of the head, the one behind
    it, and these of the tail [P, 4]."""
    rows = np.concatenate([labels[:, None], spans], axis=1).astype(np.float32)
    return LabelVectors(rows, rows.tobytes())


class _Pairs(NamedTuple):
    """Of each pair its sequence [P], and of its head, then of its tail, the place of the label in its sequence, the
    first word, and the one behind the last [2, P]."""

    sequences: _Numbers
    labels: _Numbers
    firsts: _Numbers
    stops: _Numbers


def pair_inputs(
    batch: PackedBatch, names: Collection[str], num_tokens: int, num_rows: int, bucket: Bucket
) -> dict[str, Int32Array | Float32Array]:
    """With P' and W', the bucketed numbers of pairs and of words of all sequences, int32 but for the features:

    - ``pair_words`` [W']: the packed position of each word's token. ``pair_word_ids`` [W']: 0, 1, 2, ...
    - ``pair_firsts``, ``pair_stops`` [2, P']: the places among W' of the first word of each head, then of each tail,
      and of the word behind its last one.
    - ``pair_labels`` [2, P']: the packed position of the label of each head, then of each tail.
    - ``pair_features`` float32 [P', 2]: the sign of the distance from the head's first word to the tail's, and the
      distance as a share of the sequence's words.
    - ``pair_slots_N`` [T', N]: the places among P' of the pairs whose scores stand in a token's row.
    """
    words, counts = words_of(batch, num_rows)
    pairs = _pairs(batch, counts)
    num_words, num_pairs = bucket(len(words)), bucket(len(pairs.sequences))
    first_words = (np.cumsum(counts) - counts)[pairs.sequences]
    distances = pairs.firsts[1] - pairs.firsts[0]
    features = np.zeros((num_pairs, 2), np.float32)
    features[: len(distances)] = np.stack([np.sign(distances), np.abs(distances) / counts[pairs.sequences]], axis=1)
    name = next(name for name in names if name.startswith(_SLOTS))
    return {
        "pair_words": _filled(words, num_words, 0),
        "pair_word_ids": np.arange(num_words, dtype=np.int32),
        "pair_firsts": _filled(first_words + pairs.firsts, num_pairs, 0),
        "pair_stops": _filled(first_words + pairs.stops, num_pairs, 1),
        "pair_labels": _filled(_label_tokens(batch, pairs), num_pairs, 0),
        "pair_features": features,
        name: _slots(batch, pairs.sequences, int(name.removeprefix(_SLOTS)), num_tokens),
    }


def _pairs(batch: PackedBatch, counts: _Numbers) -> _Pairs:
    """``counts``: words of each sequence."""
    sequences = np.arange(batch.batch_size)
    given = np.zeros((batch.batch_size, 5), np.int64)
    if (table := batch.labels) is not None:
        sequences = np.repeat(sequences, table.counts)
        ranks = np.arange(len(sequences)) - np.repeat(np.cumsum(table.counts) - table.counts, table.counts)
        given = table.rows[np.repeat(table.starts, table.counts) + ranks].astype(np.int64)
    label, head, behind_head, tail, behind_tail = given.T
    count = counts[sequences]
    is_given = behind_head > 0
    return _Pairs(
        sequences,
        np.stack([label, label + 1]),
        np.minimum(np.stack([head, np.where(is_given, tail, count - 1)]), count - 1),
        np.minimum(np.stack([np.where(is_given, behind_head, 1), np.where(is_given, behind_tail, count)]), count),
    )


def _label_tokens(batch: PackedBatch, pairs: _Pairs) -> _Numbers:
    """The packed positions of the labels of ``pairs`` [2, P]: of a label that a sequence lacks, of its last one, or of
    its first token."""
    starts = batch.cu_seqlens[:-1].astype(np.int64)
    if batch.token_type_ids is None:
        return np.tile(starts[pairs.sequences], (2, 1))
    tokens = np.flatnonzero(kinds_of(batch.token_type_ids) == LABEL)
    firsts = np.searchsorted(tokens, batch.cu_seqlens)
    counts = np.diff(firsts)[pairs.sequences]
    places = firsts[:-1][pairs.sequences] + np.minimum(pairs.labels, np.maximum(counts - 1, 0))
    known = np.append(tokens, 0)[np.minimum(places, len(tokens))]
    return np.where(counts > 0, known, starts[pairs.sequences])


def _slots(batch: PackedBatch, sequences: _Numbers, most: int, num_tokens: int) -> Int32Array:
    counts = np.bincount(sequences, minlength=batch.batch_size)
    firsts = np.cumsum(counts) - counts
    lengths = np.diff(batch.cu_seqlens)
    of_tokens = np.repeat(np.arange(batch.batch_size), lengths)
    places = np.arange(batch.num_tokens) - np.repeat(batch.cu_seqlens[:-1], lengths)
    found = np.zeros((num_tokens, most), np.int32)
    ranks = places[:, None] * most + np.arange(most)
    found[: len(places)] = firsts[of_tokens][:, None] + np.minimum(ranks, counts[of_tokens][:, None] - 1)
    return found


def _filled(values: _Numbers, size: int, filler: int) -> Int32Array:
    """``values`` [..., n] as int32 [..., size]."""
    found = np.full((*values.shape[:-1], size), filler, np.int32)
    found[..., : values.shape[-1]] = values
    return found
