"""Words and labels of a batch, as inputs of graphs that score spans of words for labels.

A sequence's token types mark them: its labels' tokens have the type ``LABEL`` (in front of them those of parts of a
schema ``PART``, with a number of instances, see ``bei.engine.schema_columns``), the first token of each of its words
``WORD``. Words that have no tokens are counted in the type of the token in front
of them: their states are zeros, as in GLiNER's code, and no span begins with them. In a batch without types
(measurements, canaries) every token is a word, and a sequence's first token its only label.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bei.core import Float32Array, Int32Array, PackedBatch

# Rounds a size up to one of few.
Bucket: TypeAlias = Callable[[int], int]

OTHER, WORD, LABEL, PART = range(4)
_KINDS = 4

NAMES = frozenset({"word_slots", "word_reversal", "word_ends", "label_slots", "token_words"})


def with_absent(kinds: npt.NDArray[np.integer[Any]], absent: npt.NDArray[np.integer[Any]]) -> Int32Array:
    """Token types of tokens of ``kinds``, behind each of which so many words are ``absent``."""
    return (kinds + _KINDS * absent).astype(np.int32)


def kinds_of(token_types: Int32Array) -> Int32Array:
    """What each token is."""
    kinds: Int32Array = token_types % _KINDS
    return kinds


def part_type(instances: int) -> int:
    """The token type of a part's own token."""
    return PART + _KINDS * instances


def instances_of(token_types: Int32Array) -> Int32Array:
    """The instances of parts whose own tokens have these types."""
    instances: Int32Array = token_types // _KINDS
    return instances


def absent_behind(token_types: Int32Array) -> Int32Array:
    """How many words without tokens stand behind each token."""
    return np.where(kinds_of(token_types) == PART, 0, token_types // _KINDS).astype(np.int32)


def word_numbers(token_types: Int32Array) -> Int32Array:
    """The number of each word that has a token, among all words of its sequence, ascending."""
    is_word = kinds_of(token_types) == WORD
    absent = absent_behind(token_types)
    numbers: Int32Array = (np.cumsum(is_word) + np.cumsum(absent) - absent - 1)[is_word].astype(np.int32)
    return numbers


def num_words(token_types: Int32Array) -> int:
    """Words of a sequence, with those that have no tokens."""
    return int((kinds_of(token_types) == WORD).sum() + absent_behind(token_types).sum())


def word_inputs(batch: PackedBatch, num_tokens: int, num_rows: int, bucket: Bucket) -> dict[str, Int32Array]:
    """With W' and C' the bucketed most words and labels of a sequence, int32:

    - ``word_slots`` [B', W']: the packed position of each word's first token, T' for a word without tokens; behind a
      sequence's last word, repeated.
    - ``word_reversal`` [B', W']: the place in a flat [B' * W'] of the same sequence's word as far from its end.
    - ``word_ends`` [B', W']: the place in a flat [B' * W'] of each word; behind the last one, its place again.
    - ``label_slots`` [B', C']: the packed position of each label's token; behind the last one, repeated. Of graphs
      that read labels as vectors see ``given_labels``.
    - ``token_words`` [T']: the place in a flat [B' * W'] of the word that starts at a token; 0 for other tokens.

    A sequence without words or labels has its first token as the only one.
    """
    starts, lengths = batch.cu_seqlens[:-1], np.diff(batch.cu_seqlens)
    sequences = np.repeat(np.arange(batch.batch_size, dtype=np.int32), lengths)
    tokens = np.arange(batch.num_tokens, dtype=np.int32)
    if batch.token_type_ids is None:
        words, labels = tokens, starts.astype(np.int32)
    else:
        kinds, absent = kinds_of(batch.token_type_ids), absent_behind(batch.token_type_ids)
        words, labels = tokens[kinds == WORD], tokens[kinds == LABEL]
        if absent.any():  # rare
            places = np.repeat(tokens, absent)
            order = np.argsort(np.concatenate([2 * words, 2 * places + 1]), kind="stable")
            sequences = np.append(sequences, -1)
            words = np.concatenate([words, np.full(len(places), num_tokens, np.int32)])[order]
            of_words = np.concatenate([sequences[tokens[kinds == WORD]], sequences[places]])[order]
            return _inputs(words, of_words, labels, sequences, starts, num_tokens, num_rows, bucket)
    return _inputs(words, sequences[words], labels, sequences, starts, num_tokens, num_rows, bucket)


def given_labels(batch: PackedBatch, width: int, num_rows: int, bucket: Bucket) -> tuple[Float32Array, Int32Array]:
    """For graphs that read labels as vectors of ``width`` numbers: the vectors, float32 [R', width], and
    ``label_slots`` [B', C'], the row of each label of each sequence; behind the last one, repeated. A batch without
    labels has one of zeros."""
    table = batch.labels
    if table is None:
        return np.zeros((1, width), np.float32), np.zeros((num_rows, 1), np.int32)
    rows = np.zeros((bucket(len(table.rows)), width), np.float32)
    rows[: len(table.rows)] = table.rows
    starts, last = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
    starts[: batch.batch_size], last[: batch.batch_size] = table.starts, table.counts - 1
    places = np.arange(bucket(int(table.counts.max())), dtype=np.int32)
    return rows, starts[:, None] + np.minimum(places, last[:, None])


def _inputs(
    words: Int32Array,
    of_words: Int32Array,
    labels: Int32Array,
    sequences: Int32Array,
    starts: Int32Array,
    num_tokens: int,
    num_rows: int,
    bucket: Bucket,
) -> dict[str, Int32Array]:
    """``of_words``: the sequence of each word."""
    word_slots, counts, ranks = _slots(words, of_words, starts, num_rows, bucket)
    width = word_slots.shape[1]
    places, last = np.arange(width, dtype=np.int32), np.maximum(counts - 1, 0)[:, None]
    rows = np.arange(num_rows, dtype=np.int32)[:, None] * width
    token_words = np.zeros(num_tokens + 1, np.int32)
    token_words[words] = of_words * width + ranks
    return {
        "word_slots": word_slots,
        "word_reversal": (rows + np.maximum(last - places, 0)).astype(np.int32),
        "word_ends": (rows + np.minimum(places, last)).astype(np.int32),
        "label_slots": _slots(labels, sequences[labels], starts, num_rows, bucket)[0],
        "token_words": token_words[:num_tokens],
    }


def _slots(
    tokens: Int32Array, sequences: Int32Array, starts: Int32Array, num_rows: int, bucket: Bucket
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """The packed positions ``tokens`` by their ``sequences``, [B', n]; how many each has, [B']; the rank of each."""
    counts = np.bincount(sequences, minlength=num_rows).astype(np.int32)
    firsts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int32)
    ranks = np.arange(len(tokens), dtype=np.int32) - firsts[sequences]
    places = np.arange(bucket(max(1, int(counts.max()))), dtype=np.int32)
    fallback = np.zeros(num_rows, np.int32)
    fallback[: len(starts)] = starts
    found = firsts[:, None] + np.minimum(places, np.maximum(counts - 1, 0)[:, None])
    known = np.append(tokens, 0)[np.minimum(found, len(tokens))]
    return np.where(counts[:, None] > 0, known, fallback[:, None]).astype(np.int32), counts, ranks
