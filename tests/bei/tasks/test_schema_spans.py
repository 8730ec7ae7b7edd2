"""From the columns of a schema to instances: which are kept, which are read again, and how many a text may have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bei.artifact.label_layouts import Extraction, Schema
from bei.core import Encoding
from bei.engine.schema_columns import count_columns
from bei.engine.words import LABEL, OTHER, WORD, part_type, with_absent
from bei.errors import InvalidRequestError
from bei.tasks import span_choice
from bei.tasks.extract_labels import CheckedLabels
from bei.tasks.schema_forms import AskedField, AskedPart, AskedSchema, FieldForm, _fields
from bei.tasks.schema_spans import Found, SchemaReader, Value, instances_of_text, values_of
from bei.tokenizer.schema_prompt import SchemaPart

SCHEMA = Schema(
    task="entities",
    opening=[1],
    closing=[3],
    part_id=7,
    field_id=4,
    relation_id=5,
    between_id=6,
    separator_id=9,
    num_counts=5,
)
LAYOUT = Extraction(label_id=8, separator_id=9, reads_marker=True, max_width=2, max_words=40, schema=SCHEMA)
PER_COUNT = count_columns(SCHEMA.num_counts, LAYOUT.max_width)
TEXT = "the cat sat"
WORDS = np.array([(0, 3), (4, 7), (8, 11)], np.int32)
SIGMOID_OF_2 = float(np.float32(1 / (1 + np.exp(-2.0))))


def texts(value: Value | list[Value] | None) -> list[str]:
    return [one.text for one in values_of(value)]


def part(*fields: AskedField, is_relation: bool = False) -> AskedPart:
    names = tuple(one.name for one in fields)
    return AskedPart("a", fields, SchemaPart("structures 'a'", "a", names), is_relation)


def columns(count: int, *labels: list[float]) -> np.ndarray[Any, Any]:
    """Of one part, for words: the scores of ``count``, and of each label those of spans of one word."""
    own = np.tile(np.eye(PER_COUNT * LAYOUT.max_width, dtype=np.float32)[count], (len(labels[0]), 1))
    spans = [np.stack([np.array(label, np.float32), np.full(len(label), -9.0, np.float32)], axis=1) for label in labels]
    return np.concatenate([own, *spans], axis=1)


def read(asked: AskedSchema, logits: Any, instances: list[int], found: Found, window: range = range(3)) -> Any:
    """Of the words in front of the text, then of the text's."""
    types = np.array([OTHER, part_type(1), OTHER, LABEL, OTHER, *[WORD] * len(logits)], np.int32)
    rows = np.concatenate([np.zeros((5, logits.shape[1]), np.float32), logits])
    reader = SchemaReader(None, asked, LAYOUT, flat=True)
    return reader.read(found, rows, Encoding(np.zeros(len(types), np.int32), types), window, instances)


def test_an_instance_has_what_its_own_columns_say() -> None:
    asked = part(AskedField("name", 0.5, is_single=True), AskedField("all", 0.5))
    found = Found()
    first, second = [[1.0, 2.0, -1.0], [1.0, -1.0, 0.0]], [[-1.0] * 3, [-1.0, -1.0, 3.0]]
    assert read(AskedSchema((asked,)), columns(2, *first, *second), [2], found) is None
    one, other = instances_of_text(found.records[0], asked, TEXT, WORDS)
    assert one["name"] == Value("cat", SIGMOID_OF_2, 4, 7)
    assert texts(one["all"]) == ["the", "sat"]  # a score at the threshold counts
    assert other["name"] is None
    assert texts(other["all"]) == ["sat"]


def test_instances_without_a_value_are_left_out_and_relations_without_both_ends() -> None:
    structure = part(AskedField("name", 0.5), AskedField("all", 0.5))
    relation = part(AskedField("head", 0.5, True), AskedField("tail", 0.5, True), is_relation=True)
    for asked, kept in ((AskedSchema((structure,)), 1), (AskedSchema((), (relation,)), 0)):
        found = Found()
        read(asked, columns(2, [1.0] * 3, [-1.0] * 3, [-1.0] * 3, [-1.0] * 3), [2], found)
        assert len(found.records[0]) == kept


def test_more_instances_than_were_scored_are_read_again_and_fewer_are_not() -> None:
    asked = AskedSchema((part(AskedField("name", 0.5)),))
    found = Found()
    assert read(asked, columns(3, [1.0] * 3, [1.0] * 3), [2], found) == [3]
    assert not found.records
    assert read(asked, columns(0, [1.0] * 3, [1.0] * 3), [2], found) is None
    assert found.records == {0: []}


def test_choices_are_words_in_front_of_the_text() -> None:
    several = AskedField("state", 0.5, choices=(("new", 0), ("old", 1)))
    best = AskedField("state", 0.5, is_single=True, choices=(("new", 0), ("old", 1)))
    for field, logits, expected in (
        (several, [1.0, 0.0, 5.0, 5.0, 5.0], ["new", "old"]),
        (best, [1.0, 2.0, 5.0, 5.0, 5.0], ["old"]),
        (best, [-1.0, -2.0, 5.0, 5.0, 5.0], []),
    ):
        asked, found = part(field, AskedField("name", 0.9)), Found()
        read(AskedSchema((asked,), (), ("new", "old")), columns(1, logits, [9.0] * 5), [1], found)
        (instance,) = instances_of_text(found.records[0], asked, TEXT, WORDS)
        assert texts(instance["state"]) == expected
        assert all(value.start is None for value in values_of(instance["state"]))
        assert texts(instance["name"]) == ["the", "cat", "sat"]


def test_of_equal_instances_of_two_windows_the_better_one_is_left() -> None:
    asked = part(AskedField("name", 0.5))
    schema, found = AskedSchema((asked,)), Found()
    read(schema, columns(2, [-1.0, 1.0, -1.0], [-1.0, 1.0, -1.0]), [2], found)
    assert len(instances_of_text(found.records[0], asked, TEXT, WORDS)) == 2  # of one window both
    read(schema, columns(1, [2.0, -1.0]), [1], found, range(1, 3))
    (one,) = instances_of_text(found.records[0], asked, TEXT, WORDS)
    assert one["name"] == [Value("cat", SIGMOID_OF_2, 4, 7)]


def test_instances_stand_in_the_order_of_their_windows_whichever_was_read_first() -> None:
    asked = part(AskedField("name", 0.5))
    schema, found = AskedSchema((asked,)), Found()
    read(schema, columns(1, [-1.0, 1.0]), [1], found, range(1, 3))
    read(schema, columns(1, [1.0, -1.0]), [1], found, range(2))
    assert [texts(one["name"]) for one in instances_of_text(found.records[0], asked, TEXT, WORDS)] == [["the"], ["sat"]]


def test_spans_of_all_instances_and_labels_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_choice, "MOST_CANDIDATES", 5)
    asked = AskedSchema((part(AskedField("name", 0.5)),))
    read(asked, columns(1, [1.0] * 3), [1], Found())
    with pytest.raises(InvalidRequestError, match="More than 5 spans of a text"):
        read(asked, columns(2, [1.0] * 3, [1.0] * 3), [2], Found())


def test_no_span_begins_or_ends_at_a_word_without_tokens() -> None:
    types = with_absent(np.array([OTHER, LABEL, OTHER]), np.array([0, 0, 3]))
    types[0] = part_type(1)
    reader = SchemaReader(CheckedLabels(("cat",), (0.5,)), AskedSchema(), LAYOUT, flat=True)
    found = Found()
    logits = np.full((3, (PER_COUNT + 1) * LAYOUT.max_width), 5.0, np.float32)
    reader.read(found, logits, Encoding(np.zeros(3, np.int32), types), range(3), [])
    assert not found.labels


def test_choices_of_all_instances_are_bounded_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text had as many as its windows have, at any threshold."""
    monkeypatch.setattr(span_choice, "MOST_CANDIDATES", 3)
    field = AskedField("state", 0.5, choices=(("new", 0), ("old", 1)))
    asked, found = AskedSchema((part(field),), (), ("new", "old")), Found()
    read(asked, columns(1, [1.0] * 5), [1], found)
    with pytest.raises(InvalidRequestError, match="More than 3 spans of a text"):
        read(asked, columns(1, [1.0] * 5), [1], found)


@pytest.mark.parametrize("other", ["New", " new"])
def test_choices_that_are_one_word_in_lower_case_are_refused_by_name(other: str) -> None:
    """The first of them had the score of both."""
    with pytest.raises(InvalidRequestError, match=r"choices of 'state' in structures 'order' 0 and 2, 'new' and "):
        _fields("order", [FieldForm("state", choices=["new", "old", other])])
