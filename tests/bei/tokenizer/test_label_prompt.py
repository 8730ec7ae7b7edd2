"""Words behind labels: those that fit, whatever follows them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase, Replace, Sequence

from bei.artifact.label_layouts import Extraction, Schema
from bei.core import Encoding
from bei.engine.words import num_words
from bei.errors import InvalidRequestError
from bei.tokenizer import label_prompt
from bei.tokenizer.label_prompt import LabelPrompt, encode_words
from bei.tokenizer.schema_prompt import SchemaPart
from bei.tokenizer.special_tokens import layout_of
from tests.support.artifacts import tiny_tokenizer

LAYOUT = Extraction(label_id=5, separator_id=6, reads_marker=True, max_width=3, max_words=40)
SCHEMA = Schema(
    task="a",
    opening=[],
    closing=[],
    part_id=1,
    field_id=2,
    relation_id=3,
    between_id=4,
    separator_id=6,
    num_counts=4,
)
MOST = 14


def tokenizer_without(character: str) -> Tokenizer:
    """The words of this character alone have no tokens."""
    tokenizer = tiny_tokenizer()
    normalizers = [Replace(character, "")] + ([tokenizer.normalizer] if tokenizer.normalizer else [])
    tokenizer.normalizer = Sequence(normalizers)
    return tokenizer


TOKENIZER = tokenizer_without("\u0007")


def encoded(text: str, *labels: str) -> Encoding:
    around = layout_of(TOKENIZER, 1, with_special=True)
    (found,) = encode_words(TOKENIZER, [text], LabelPrompt(labels, LAYOUT), around, MOST, lambda: None)
    return found


def all_tokens(tokenizer: Tokenizer, words: list[str], *_: object) -> tuple[list[int], list[int | None]]:
    found = tokenizer.encode(words, is_pretokenized=True, add_special_tokens=False)
    return found.ids, found.word_ids


@given(words=st.lists(st.sampled_from(["hello", "world", "\u0007", "unseen", "hellohellohello" * 3]), max_size=80))
def test_what_fits_is_the_same_whether_all_that_follows_is_tokenized_or_not(words: list[str]) -> None:
    found = encoded(" ".join(words), "person")
    with mock.patch.object(label_prompt, "_first_tokens", all_tokens):
        whole = encoded(" ".join(words), "person")
    np.testing.assert_array_equal(found.input_ids, whole.input_ids)
    np.testing.assert_array_equal(found.token_type_ids, whole.token_type_ids)
    assert found.truncated == whole.truncated


def test_of_a_book_no_more_is_tokenized_than_may_fit() -> None:
    asked: list[int] = []

    class Counting:
        def encode(self, words: list[str], **options: Any) -> object:
            asked.append(len(words))
            return TOKENIZER.encode(words, **options)

        def __getattr__(self, name: str) -> object:
            return getattr(TOKENIZER, name)

    around = layout_of(TOKENIZER, 1, with_special=True)
    counting: Any = Counting()
    encode_words(counting, ["hello " * 10_000], LabelPrompt(("a",), LAYOUT), around, MOST, lambda: None)
    assert max(asked) <= MOST


def test_a_label_that_no_model_reads_is_refused_before_it_is_tokenized() -> None:
    with pytest.raises(InvalidRequestError, match="labels 1 has 1000 characters"):
        encoded("hello", "person", "a" * 1000)


def test_of_a_text_behind_choices_at_least_the_beginning_is_read() -> None:
    layout = msgspec.structs.replace(LAYOUT, schema=SCHEMA)
    part = SchemaPart("structures 'a'", "a", ("b",), marker="field")
    around = layout_of(TOKENIZER, 1, with_special=False)

    def read(text: str, words: tuple[str, ...]) -> Encoding:
        prompt = LabelPrompt((), layout, parts=(part,), words=words)
        (found,) = encode_words(TOKENIZER, [text], prompt, around, MOST, lambda: None)
        return found

    for text in ("s" * 20, "s" * 20 + " world cat"):
        found = read(text, ("cat", "the"))
        assert found.token_type_ids is not None
        assert found.truncated
        assert found.num_tokens == MOST
        assert num_words(found.token_type_ids) == 3
    whole = read("hello cat.", ("cat", "the"))
    assert whole.token_type_ids is not None
    assert (whole.truncated, num_words(whole.token_type_ids)) == (False, 5)
    for words in (("cat",) * MOST, ("cat",) * (MOST - whole.num_tokens + 5)):
        with pytest.raises(InvalidRequestError, match="The choices leave no room"):
            read("hello", words)


@pytest.mark.parametrize(("count", "expected"), [(3, 4), (4, 4)])
def test_a_full_window_gets_no_full_stop_as_in_the_gliner2_library(count: int, expected: int) -> None:
    layout = msgspec.structs.replace(LAYOUT, schema=SCHEMA, max_words=4)
    around = layout_of(TOKENIZER, 1, with_special=False)
    (found,) = encode_words(TOKENIZER, ["hello " * count], LabelPrompt(("a",), layout), around, 60, lambda: None)
    assert found.token_type_ids is not None
    assert num_words(found.token_type_ids) == expected
    assert not found.truncated


@pytest.mark.parametrize("other", ["CAT", " cat", "cat\u0007"])
@pytest.mark.parametrize("schema", [False, True])
def test_labels_with_the_same_tokens_are_refused_by_name(other: str, schema: bool) -> None:
    """They had the same scores."""
    tokenizer = tokenizer_without("\u0007")
    tokenizer.normalizer = Sequence([tokenizer.normalizer, Lowercase()])
    layout = msgspec.structs.replace(LAYOUT, schema=SCHEMA) if schema else LAYOUT

    def encode(*labels: str) -> None:
        parts = (SchemaPart("labels", "a", labels),) if schema else ()
        prompt = LabelPrompt(labels, layout, parts=parts)
        encode_words(tokenizer, ["the"], prompt, layout_of(tokenizer, 1, with_special=True), 30, lambda: None)

    encode("cat", "hello")
    with pytest.raises(InvalidRequestError, match=r"labels 0 and 2, 'cat' and .*have the same tokens") as caught:
        encode("cat", "hello", other)
    assert caught.value.param == "labels"


@pytest.mark.parametrize("other", ["CAT", " cat", "cat\u0007"])
@pytest.mark.parametrize("param", ["structures", "relations", "classifications"])
def test_parts_of_a_schema_with_the_same_tokens_are_refused_by_name(other: str, param: str) -> None:
    """Their labels were."""
    tokenizer = tokenizer_without("\u0007")
    tokenizer.normalizer = Sequence([tokenizer.normalizer, Lowercase()])
    layout = msgspec.structs.replace(LAYOUT, schema=SCHEMA)

    def encode(*names: str) -> None:
        parts = tuple(SchemaPart(f"{param} {name!r}", name, ("hello",)) for name in names)
        parts = (SchemaPart("labels", "cat", ("cat",)), *parts)  # of another kind
        prompt = LabelPrompt((), layout, parts=parts)
        encode_words(tokenizer, ["the"], prompt, layout_of(tokenizer, 1, with_special=True), 60, lambda: None)

    encode("cat", "hello")
    with pytest.raises(InvalidRequestError, match=rf"{param} 0 and 2, 'cat' and .*have the same tokens") as caught:
        encode("cat", "hello", other)
    assert caught.value.param == param
