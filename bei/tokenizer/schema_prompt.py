"""A schema in front of a text's words: the name of a task, descriptions, and labels, as GLiNER2 reads them (the gliner2
library's SchemaTransformer)."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Literal, NamedTuple

from tokenizers import Tokenizer

from bei.artifact.label_layouts import Schema
from bei.engine.words import LABEL, OTHER, part_type
from bei.errors import InvalidRequestError
from bei.tokenizer.alike import check_told_apart

# Tokens in the text of a task.
DESCRIPTION, EXAMPLE, OUTPUT = "[DESCRIPTION]", "[EXAMPLE]", "[OUTPUT]"


class SchemaPart(NamedTuple):
    """A task of a schema: its name and its ``labels``, behind markers of the kind ``marker``, or behind a token with
    that id: then no spans are scored for them. ``field``: what the request calls it, for messages. ``descriptions``:
    labels and what they mean. ``examples``: texts and the label of each. ``about``: what the task means. ``instances``:
    how many of the task are scored."""

    field: str
    name: str
    labels: tuple[str, ...]
    descriptions: tuple[tuple[str, str], ...] = ()
    examples: tuple[tuple[str, str], ...] = ()
    marker: Literal["label", "field", "relation"] | int = "label"
    about: str = ""
    instances: int = 1

    @property
    def param(self) -> str:
        """The field of the request."""
        return self.field.split()[0]

    @property
    def text(self) -> str:
        """What is read in front of the labels."""
        about = f": {self.about}" if self.about else ""
        described = "".join([f" {DESCRIPTION} {label}: {meaning}" for label, meaning in self.descriptions])
        shown = "".join([f" {EXAMPLE} {text} {OUTPUT} {label}" for text, label in self.examples])
        return f"{self.name}{about}{described}{shown}"

    @property
    def num_chars(self) -> int:
        """Characters of the part."""
        return len(self.text) + sum(map(len, self.labels))

    def given(self) -> Iterator[tuple[str, str]]:
        """Where each text stands that the request has, for messages, and the text."""
        yield f"The name of {self.field}", self.name
        for place, label in enumerate(self.labels):
            yield f"{self.field} {place}", label
        if self.about:
            yield f"The description of {self.field}", self.about
        for label, meaning in self.descriptions:
            yield f"The description of {label!r} in {self.field}", meaning
        for place, (text, _) in enumerate(self.examples):
            yield f"{'examples' if self.param == 'labels' else f'{self.field} examples'} {place}", text


def check_part(part: SchemaPart, spelled: Seq[str]) -> None:
    """Raise InvalidRequestError for texts that have one of the tokens ``spelled``."""
    for where, text in part.given():
        _check_spelling(where, text, spelled, part.param)


def check_words(tokenizer: Tokenizer, words: Seq[str], spelled: Seq[str]) -> None:
    """Raise InvalidRequestError for ``words`` in front of a text that have one of the tokens ``spelled``, or none."""
    for word in dict.fromkeys(words):
        _check_spelling(f"The choice {word!r} in structures", word, spelled, "structures")
        if not _ids(tokenizer, word):
            raise InvalidRequestError(f"The choice {word!r} has no tokens: write it in letters.", "structures")


def _check_spelling(where: str, text: str, spelled: Seq[str], param: str) -> None:
    if (special := next((token for token in spelled if token in text), None)) is not None:
        raise InvalidRequestError(f"{where} has {special!r}, a token of the model's own: take it out.", param)


def schema_ids(
    tokenizer: Tokenizer, schema: Schema, parts: Seq[SchemaPart], label_id: int
) -> tuple[list[int], list[int]]:
    """The ids of ``parts``, and what they are (``bei.engine.words``). Raises InvalidRequestError for a label without
    tokens, and for labels, or names of a kind of parts, with the same."""
    for param in dict.fromkeys(part.param for part in parts):
        names = [part.name for part in parts if part.param == param]
        check_told_apart(param, names, (tuple(_ids(tokenizer, name)) for name in names), param)
    markers = {"label": label_id, "field": schema.field_id, "relation": schema.relation_id}
    ids: list[int] = []
    kinds: list[int] = []
    for part in parts:
        marker = part.marker if isinstance(part.marker, int) else markers[part.marker]
        of_part, types = part_ids(tokenizer, schema, part, marker)
        ids += [*of_part, schema.between_id]
        kinds += [*types, OTHER]
    return [*ids[:-1], schema.separator_id], kinds


def part_ids(tokenizer: Tokenizer, schema: Schema, part: SchemaPart, marker: int) -> tuple[list[int], list[int]]:
    """The ids of ``part``, whose labels stand behind ``marker``, and what they are (``bei.engine.words``). Raises
    InvalidRequestError for a label without tokens."""
    name = _ids(tokenizer, part.text)
    ids = [*schema.opening, schema.part_id, *name, *schema.opening]
    kinds = [OTHER] * len(ids)
    has_spans = not isinstance(part.marker, int)
    if has_spans:
        kinds[len(schema.opening)] = part_type(part.instances)
    of_labels = [_ids(tokenizer, label) for label in part.labels]
    for place, found in enumerate(of_labels):
        if not found:
            raise InvalidRequestError(f"{part.field} {place} has no tokens: write it in letters.", part.param)
        ids += [marker, *found]
        kinds += [LABEL if has_spans else OTHER, *[OTHER] * len(found)]
    check_told_apart(part.field, part.labels, map(tuple, of_labels), part.param)
    behind = [*schema.closing, *schema.closing]
    return [*ids, *behind], [*kinds, *[OTHER] * len(behind)]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode([text], is_pretokenized=True, add_special_tokens=False).ids
    return ids
