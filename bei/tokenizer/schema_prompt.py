"""A schema in front of a text's words: the name of a task, descriptions, and labels, as GLiNER2 reads them (the gliner2
library's SchemaTransformer)."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple

from tokenizers import Tokenizer

from bei.artifact.label_layouts import Schema
from bei.engine.words import LABEL, OTHER
from bei.errors import InvalidRequestError

# Tokens in the text of a task.
DESCRIPTION, EXAMPLE, OUTPUT = "[DESCRIPTION]", "[EXAMPLE]", "[OUTPUT]"


class SchemaPart(NamedTuple):
    """A task of a schema: its name and its ``labels``. ``field``: of the request that has these, for messages.
    ``descriptions``: labels and what they mean. ``examples``: texts and the label of each."""

    field: str
    name: str
    labels: tuple[str, ...]
    descriptions: tuple[tuple[str, str], ...] = ()
    examples: tuple[tuple[str, str], ...] = ()

    @property
    def text(self) -> str:
        """What is read in front of the labels."""
        described = "".join([f" {DESCRIPTION} {label}: {meaning}" for label, meaning in self.descriptions])
        shown = "".join([f" {EXAMPLE} {text} {OUTPUT} {label}" for text, label in self.examples])
        return f"{self.name}{described}{shown}"

    @property
    def num_chars(self) -> int:
        """Characters of the part."""
        return len(self.text) + sum(map(len, self.labels))

    def given(self) -> Iterator[tuple[str, str]]:
        """Where each text stands that the request has, for messages, and the text."""
        for place, label in enumerate(self.labels):
            yield f"{self.field} {place}", label
        for label, meaning in self.descriptions:
            yield f"The description of {label!r} in {self.field}", meaning
        for place, (text, _) in enumerate(self.examples):
            yield f"examples {place}", text


def check_part(part: SchemaPart, spelled: Seq[str], most_chars: int) -> None:
    """Raise InvalidRequestError for texts that have one of the tokens ``spelled``, or together more than ``most_chars``
    characters."""
    for where, text in part.given():
        if (special := next((token for token in spelled if token in text), None)) is not None:
            raise InvalidRequestError(f"{where} has {special!r}, a token of the model's own: take it out.", part.field)
    if len(part.text) > most_chars:
        raise InvalidRequestError(
            f"The descriptions and examples of {part.field} have {len(part.text)} characters, and with the text the "
            "model reads fewer: shorten them.",
            part.field,
        )


def part_ids(tokenizer: Tokenizer, schema: Schema, part: SchemaPart, marker: int) -> tuple[list[int], list[int]]:
    """The ids of ``part``, whose labels stand behind ``marker``, and what they are (``bei.engine.words``). Raises
    InvalidRequestError for a label without tokens."""
    name = _ids(tokenizer, part.text)
    ids = [*schema.opening, schema.part_id, *name, *schema.opening]
    kinds = [OTHER] * len(ids)
    kinds[len(schema.opening)] = LABEL
    for place, label in enumerate(part.labels):
        found = _ids(tokenizer, label)
        if not found:
            raise InvalidRequestError(f"{part.field} {place} has no tokens: write it in letters.", part.field)
        ids += [marker, *found]
        kinds += [LABEL, *[OTHER] * len(found)]
    behind = [*schema.closing, *schema.closing]
    return [*ids, *behind], [*kinds, *[OTHER] * len(behind)]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode([text], is_pretokenized=True, add_special_tokens=False).ids
    return ids
