"""Entities of a text in its words."""

from __future__ import annotations

import numpy as np
import pytest

from bei.engine.words import WORD
from bei.errors import InputTooLongError, InvalidRequestError
from bei.tokenizer.entity_text import EntityPlace, EntityText, entity_words

WORDS = [(0, 3), (4, 9), (9, 10), (12, 14)]  # "the small, 👍🏽"
TYPES = np.full(5, WORD, np.int32)


def rows(*places: tuple[int, int]) -> list[list[float]]:
    text = EntityText("the small,  👍🏽", [EntityPlace(*one) for one in places])
    found: list[list[float]] = entity_words(text, WORDS, TYPES, 4, is_whole=True).rows.tolist()
    return found


def test_an_entity_has_all_words_that_it_touches() -> None:
    assert rows((0, 3), (1, 2), (0, 14), (8, 10), (10, 13)) == [[0, 1], [0, 1], [0, 4], [1, 3], [3, 4]]


def test_two_texts_with_other_entities_have_other_digests() -> None:
    text = EntityText("the small", [EntityPlace(0, 3)])
    other = EntityText("the small", [EntityPlace(4, 9)])
    assert text == other  # as texts
    digests = {entity_words(one, WORDS[:2], TYPES, 4, is_whole=True).digest for one in (text, other)}
    assert len(digests) == 2


def test_entities_without_words_or_more_than_words_and_long_texts_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="entities 0 has one from 10 to 12, where no word is"):
        rows((10, 12))
    with pytest.raises(InvalidRequestError, match="entities 0 has 6 entities, and the text 5 words that have tokens"):
        rows(*[(0, 3)] * 6)
    text = EntityText("", [EntityPlace(0, 1)], 7)
    with pytest.raises(InvalidRequestError, match="entities 7 has one from 0 to 1, where no word is"):
        entity_words(text, [], TYPES[:0], 4, is_whole=True)
    for most, is_whole in ((3, True), (4, False)):
        with pytest.raises(InputTooLongError, match=r"input 7 has 4 words.*send the part in which the entities stand"):
            entity_words(text, WORDS, TYPES, most, is_whole=is_whole)
