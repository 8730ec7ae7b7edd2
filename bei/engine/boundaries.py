"""Boundaries between words, as inputs of graphs that score pairs of them for labels (GLiNER2.5), and what these give.

A text of n words has n + 1 boundaries; a span is a pair of them. Words and labels are those of ``bei.engine.words``,
but a word without tokens has the state of the next token, and is a word like others.

A graph chooses up to ``most`` boundaries at which spans begin and as many at which they end, each in ascending order.
Row i of a sequence is of the i-th start, in the row of its i-th token. It has blocks of ``most`` columns, one for each
chosen end, and EXTRAS more: the first block has the pairs' compatibility, then the numbers of the i-th start and the
i-th end in two digits each, as 16 bits hold no larger numbers; those behind it have the scores of a label, then its
score of the i-th start, that of the i-th end, its score of being absent, and a 0. Places behind the last start or end
are NOWHERE.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bei.core import EXTRAS, Float32Array, Int32Array, PackedBatch
from bei.engine.words import WORD, Bucket, absent_behind, kinds_of, num_words

NAMES = frozenset(
    {
        *("boundary_left", "boundary_right", "boundary_counts", "boundary_ids", "boundary_rows"),
        *("boundary_tokens", "boundary_words"),
    }
)
DIGIT = 128
NOWHERE = 1 << 20  # behind every boundary
_COLUMNS = "boundary_columns_"


def boundary_columns(most: int) -> str:
    """The name in ``graph_inputs`` of the columns of ``most`` ends; a part of the name, so that the graph carries
    it."""
    return f"{_COLUMNS}{most}"


def boundary_inputs(
    batch: PackedBatch, names: Collection[str], num_tokens: int, num_rows: int, bucket: Bucket
) -> dict[str, Int32Array]:
    """With N' the bucketed most boundaries of a sequence, int32:

    - ``boundary_left``, ``boundary_right`` [B', N']: the packed position of the token of the word in front of each
      boundary, and of the word behind it; T' in front of the first one, T' + 1 behind the last one and further on.
    - ``boundary_counts`` [B']: boundaries of each sequence. ``boundary_ids`` [N']: 0, 1, 2, ... ``boundary_rows`` [B']:
      the place in a flat [B' * N'] of each sequence's first one.
    - ``boundary_columns_N`` [N]: 0, 1, ... up to R' - 1, repeated; R' is N, or N' if that is less.
    - ``boundary_tokens`` [T']: the place in a flat [B' * R'] of the row that stands in a token's; ``boundary_words``
      [T']: that in a flat [B' * N'] of the boundary with the token's number in its sequence, or of its last one.

    A sequence without words has its first token as the only one.
    """
    words, counts = words_of(batch, num_rows)
    width = bucket(int(counts.max()) + 1)
    right = np.full((num_rows, width), num_tokens + 1, np.int32)
    ranks = np.arange(len(words)) - np.repeat(np.cumsum(counts) - counts, counts)
    right[np.repeat(np.arange(num_rows), counts), ranks] = words
    left = np.concatenate([np.full((num_rows, 1), num_tokens, np.int32), right[:, :-1]], axis=1)
    name = next(name for name in names if name.startswith(_COLUMNS))
    most = int(name.removeprefix(_COLUMNS))
    last = min(most, width) - 1
    lengths = np.diff(batch.cu_seqlens)
    places = np.arange(batch.num_tokens) - np.repeat(batch.cu_seqlens[:-1], lengths)
    sequences = np.repeat(np.arange(batch.batch_size), lengths)
    of_tokens = {}
    for kind, most_places, lasts in (("tokens", last + 1, last), ("words", width, counts[sequences])):
        of_tokens[f"boundary_{kind}"] = np.zeros(num_tokens, np.int32)
        of_tokens[f"boundary_{kind}"][: len(places)] = sequences * most_places + np.minimum(places, lasts)
    return {
        "boundary_left": left,
        "boundary_right": right,
        "boundary_counts": (counts + 1).astype(np.int32),
        "boundary_ids": np.arange(width, dtype=np.int32),
        "boundary_rows": np.arange(num_rows, dtype=np.int32) * width,
        **of_tokens,
        name: np.minimum(np.arange(most, dtype=np.int32), last),
    }


def words_of(batch: PackedBatch, num_rows: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The packed positions of the tokens of all words, and how many words each of ``num_rows`` sequences has."""
    starts, ends = batch.cu_seqlens[:-1].astype(np.int64), batch.cu_seqlens[1:].astype(np.int64)
    fillers = np.zeros(num_rows - batch.batch_size, np.int64)
    if batch.token_type_ids is None:
        counts = np.concatenate([ends - starts, fillers + 1])
        return np.concatenate([np.arange(batch.num_tokens), fillers]), counts
    tokens = np.arange(batch.num_tokens)
    is_word = kinds_of(batch.token_type_ids) == WORD
    absent = absent_behind(batch.token_type_ids)
    each = is_word + absent
    sequences = np.repeat(np.arange(batch.batch_size), ends - starts)
    counts = np.bincount(sequences, each, batch.batch_size).astype(np.int64)
    bare = starts[counts == 0]
    # Of a token the word that it starts, then those without tokens behind it, which have the next token's state.
    following = np.minimum(tokens + 1, ends[sequences] - 1)
    of_tokens = np.repeat(following, each)
    of_tokens[(np.cumsum(each) - each)[is_word]] = tokens[is_word]
    order = np.argsort(np.concatenate([np.repeat(tokens, each), bare]), kind="stable")
    words = np.concatenate([of_tokens, bare])[order]
    return np.concatenate([words, fillers]), np.concatenate([np.maximum(counts, 1), fillers + 1])


class Pairs(NamedTuple):
    """The pairs of a sequence: ``starts`` [S] and ``ends`` [E], of which some form no span; ``compat`` [S, E];
    ``scores`` [labels, S, E]; of each label its scores of starts [labels, S] and ends [labels, E], and of being absent
    [labels]."""

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    compat: Float32Array
    scores: Float32Array
    start_scores: Float32Array
    end_scores: Float32Array
    absent: Float32Array

    @property
    def is_span(self) -> npt.NDArray[np.bool_]:
        """True where a pair is a span, [S, E]."""
        found: npt.NDArray[np.bool_] = (self.ends < NOWHERE) & (self.ends > self.starts[:, None])
        return found


def word_scores(rows: Float32Array, most: int, label: int) -> Float32Array:
    """The scores of the first single words for a label, of a sequence's first ``rows`` [words, columns]."""
    return rows.reshape(len(rows), -1, most + EXTRAS)[:, label + 1, most + 3]


def pairs_of(rows: Float32Array, token_types: Int32Array | None, most: int, num_labels: int) -> Pairs:
    """The pairs of a sequence, of its ``rows`` [tokens, columns] and its tokens' types; labels behind the first
    ``num_labels`` are other sequences'."""
    count = len(rows) if token_types is None else max(1, num_words(token_types))
    kept = min(most, count, len(rows))
    blocks = rows[:kept].reshape(kept, -1, most + EXTRAS)[:, : num_labels + 1]
    places = blocks[:, 0, most:].astype(np.int64)
    labels = blocks[:, 1:]
    return Pairs(
        places[:, 0] * DIGIT + places[:, 1],
        places[:, 2] * DIGIT + places[:, 3],
        blocks[:, 0, :kept],
        labels[:, :, :kept].transpose(1, 0, 2),
        labels[:, :, most].T,
        labels[:, :, most + 1].T,
        labels[0, :, most + 2],
    )
