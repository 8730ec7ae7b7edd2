"""Texts whose entities a request names, for models that score relations between these (GLiREL)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from bei.core import Int32Array, LabelVectors
from bei.engine.words import WORD, kinds_of
from bei.errors import InputTooLongError, InvalidRequestError


class EntityPlace(NamedTuple):
    """Where an entity stands in its text: its first character, and one past its last."""

    start: int
    end: int


class EntityText(str):
    """Text number ``place`` of a request with its ``entities``."""

    entities: tuple[EntityPlace, ...]
    place: int

    def __new__(cls, text: str, entities: Seq[EntityPlace], place: int = 0) -> EntityText:
        found = super().__new__(cls, text)
        found.entities, found.place = (*entities,), place
        return found


def entity_words(
    text: EntityText, words: Seq[Seq[int]], types: Int32Array, most_words: int, *, is_whole: bool
) -> LabelVectors:
    """The first word of each entity, and one past its last: all that it touches (``bei.engine.entity_pairs``).

    ``words``: first and one past the last character of each; ``types``: of the text's tokens; ``is_whole``: the model
    reads all of them, of ``most_words`` words at most. Raises InvalidRequestError.
    """
    if not is_whole or len(words) > most_words:
        raise InputTooLongError(
            f"input {text.place} has {len(words)} words, and the model reads at most {most_words}, fewer where they "
            "have several tokens, or many relations stand in front: send the part in which the entities stand.",
            "input",
        )
    starts, ends = (np.array(side, np.int64) for side in zip(*words, strict=True)) if words else np.zeros((2, 0))
    firsts = np.searchsorted(ends, [entity.start for entity in text.entities], side="right")
    stops = np.searchsorted(starts, [entity.end for entity in text.entities], side="left")
    for entity, first, stop in zip(text.entities, firsts.tolist(), stops.tolist(), strict=True):
        if first >= stop:
            raise InvalidRequestError(
                f"entities {text.place} has one from {entity.start} to {entity.end}, where no word is: leave it out.",
                "entities",
            )
    if len(text.entities) > (most := int((kinds_of(types) == WORD).sum())):
        raise InvalidRequestError(
            f"entities {text.place} has {len(text.entities)} entities, and the text {most} words that have tokens: "
            "send no more than these.",
            "entities",
        )
    rows = np.stack([firsts, stops], axis=1).astype(np.float32)
    return LabelVectors(rows, rows.tobytes())
