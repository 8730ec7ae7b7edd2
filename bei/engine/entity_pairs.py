"""Entities of texts, as inputs of graphs that score pairs of them for labels (GLiREL).

A sequence's entities are rows of its labels' table (``PackedBatch.labels``): the number of an entity's first word, and
one more than that of its last. A row of zeros stands for none: then each of the sequence's first words that have tokens
is an entity (held-out texts, measurements, canaries).

The scores of an entity with the others stand in the row of a word's token: of the first entity in that of the first
word that has tokens, and so on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from bei.core import Int32Array, PackedBatch
from bei.engine.words import WORD, Bucket, kinds_of

# Entities of a text. Each pair is a row of some thousand hidden numbers; GLiREL's own code once had a limit of 35.
MOST_ENTITIES = 32

NAMES = frozenset({"entity_starts", "entity_ends", "token_entities"})
_COLUMNS = "entity_columns_"

_Places: TypeAlias = npt.NDArray[np.integer]


def entity_columns(count: int) -> str:
    """The name in ``graph_inputs`` of the columns of ``count`` entities; a part of the name, so that the graph carries
    it."""
    return f"{_COLUMNS}{count}"


def entity_inputs(
    batch: PackedBatch,
    names: Collection[str],
    word_slots: Int32Array,
    token_words: Int32Array,
    num_rows: int,
    bucket: Bucket,
) -> dict[str, Int32Array]:
    """With ``word_slots`` [B', W'] and ``token_words`` [T'] of ``bei.engine.words`` and E', the bucketed most entities
    of a sequence, int32:

    - ``entity_starts``, ``entity_ends`` [B', E']: the places in a flat [B' * W'] of the first and last word of each
      entity; behind a sequence's last one, its places again.
    - ``token_entities`` [T']: the place in a flat [B' * E'] of the entity whose scores stand in the token's row; for
      further words, their sequence's last one.
    - ``entity_columns_N`` [N]: 0, 1, ... up to E' - 1, repeated.
    """
    name = next(name for name in names if name.startswith(_COLUMNS))
    most, words_each = int(name.removeprefix(_COLUMNS)), word_slots.shape[1]
    places = [*_words(batch, token_words)]
    spans = [*_spans(batch, places, words_each, most)]
    width = min(most, bucket(max(len(starts) for starts, _ in spans)))
    tables = np.zeros((2, num_rows, width), np.int32)
    token_entities = np.zeros(len(token_words), np.int32)
    for row, ((tokens, _), own) in enumerate(zip(places, spans, strict=True)):
        last = len(own[0]) - 1
        for table, side in zip(tables, own, strict=True):
            table[row] = side[np.minimum(np.arange(width), last)]
        token_entities[tokens] = row * width + np.minimum(np.arange(len(tokens)), last)
    columns = np.minimum(np.arange(most, dtype=np.int32), width - 1)
    return {"entity_starts": tables[0], "entity_ends": tables[1], "token_entities": token_entities, name: columns}


def _words(batch: PackedBatch, token_words: Int32Array) -> Iterator[tuple[_Places, _Places]]:
    """Of each sequence the tokens that start words, and the places of these words."""
    types = batch.token_type_ids
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        tokens = np.arange(start, end) if types is None else start + np.flatnonzero(kinds_of(types[start:end]) == WORD)
        yield tokens, token_words[tokens]


def _spans(
    batch: PackedBatch, words: list[tuple[_Places, _Places]], words_each: int, most: int
) -> Iterator[tuple[_Places, _Places]]:
    """The places of the first and last words of each sequence's entities."""
    table = batch.labels
    for row, (_, places) in enumerate(words):
        first = row * words_each
        given = np.zeros((0, 2), np.int32)
        if table is not None:
            given = table.rows[table.starts[row] : table.starts[row] + table.counts[row]].astype(np.int32)
        if given.any():
            yield first + given[:, 0], first + given[:, 1] - 1
        else:
            own = places[:most] if len(places) else np.array([first])
            yield own, own
