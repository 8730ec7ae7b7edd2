"""Entities of a batch as inputs of graphs: where they stand in words, and whose scores stand in which row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bei.core import Encoding, LabelVectors, PackedBatch
from bei.engine.entity_pairs import NAMES, entity_columns
from bei.engine.packing import graph_inputs
from bei.engine.words import LABEL, OTHER, WORD, with_absent

NAME = entity_columns(4)
ASKED = [*sorted(NAMES), NAME]


def encoding(kinds: list[int], *entities: tuple[int, int], absent: list[int] | None = None) -> Encoding:
    types = with_absent(np.array(kinds), np.array(absent or [0] * len(kinds)))
    rows = np.array(entities, np.float32)
    beside = LabelVectors(rows, rows.tobytes()) if entities else None
    return Encoding(np.zeros(len(kinds), np.int32), types, label_vectors=beside)


def inputs(*encodings: Encoding) -> dict[str, Any]:
    return graph_inputs(PackedBatch.from_encodings(encodings), [*ASKED, "word_slots"])


def spans(found: Mapping[str, Any]) -> list[list[tuple[int, int]]]:
    """First and last word of each entity of each sequence, in numbers of the sequence's words."""
    width = found["word_slots"].shape[1]
    sides = [
        (found[f"entity_{side}"] - width * np.arange(len(found["word_slots"]))[:, None]) for side in ("starts", "ends")
    ]
    return [[*zip(*(side[row].tolist() for side in sides), strict=True)] for row in range(len(sides[0]))]


def test_entities_are_those_that_a_text_names_or_its_first_words() -> None:
    named = encoding([OTHER, LABEL, OTHER, WORD, WORD, WORD], (0, 2), (2, 3), (0, 1))
    unnamed = encoding([LABEL, WORD, OTHER, WORD])
    found = inputs(named, unnamed)
    assert spans(found)[:2] == [[(0, 1), (2, 2), (0, 0)], [(0, 0), (1, 1), (1, 1)]]
    assert found[NAME].tolist() == [0, 1, 2, 2]
    assert found["token_entities"][[3, 4, 5, 7, 9]].tolist() == [0, 1, 2, 3, 4]


def test_words_behind_the_last_entity_have_its_row_and_no_more_than_fit_are_taken() -> None:
    found = inputs(encoding([LABEL, *[WORD] * 6], (5, 6), (1, 4)), encoding([LABEL, *[WORD] * 6]))
    assert spans(found)[:2] == [[(5, 5), (1, 3), (1, 3), (1, 3)], [(0, 0), (1, 1), (2, 2), (3, 3)]]
    assert found["token_entities"][1:7].tolist() == [0, 1, 1, 1, 1, 1]
    assert found["token_entities"][8:14].tolist() == [4, 5, 6, 7, 7, 7]


def test_words_without_tokens_are_counted_and_texts_without_words_have_an_entity() -> None:
    found = inputs(encoding([LABEL, WORD, WORD], absent=[1, 0, 0]), encoding([LABEL, OTHER]))
    assert spans(found)[0] == [(1, 1), (2, 2)]
    assert spans(found)[1] == [(0, 0), (0, 0)]


def test_without_token_types_every_token_is_an_entity() -> None:
    found = graph_inputs(PackedBatch.from_encodings([Encoding(np.zeros(3, np.int32))]), [*ASKED, "word_slots"])
    assert spans(found)[0] == [(0, 0), (1, 1), (2, 2)]
