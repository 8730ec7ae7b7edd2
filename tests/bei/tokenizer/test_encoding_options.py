"""EncodingOptions: pairs, sides, limits, frames and spans are as the tokenizers library would have them."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from bei.core import Encoding, Expansion
from bei.errors import InvalidRequestError
from bei.tokenizer.encoder import EncodingOptions, Input, TextEncoder
from bei.tokenizer.special_tokens import TextFrame, kept_lengths
from tests.support.artifacts import tiny_tokenizer
from tests.support.checkpoints import bpe_tokenizer, unigram_tokenizer, wordpiece_tokenizer


def typed_tokenizer() -> Tokenizer:
    """As XLNet's: special tokens behind the text, and a type for each of the three."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<sep>": 1, "<cls>": 2, "a": 3, "b": 4, "c": 5}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A:1 <sep>:1 <cls>:2",
        pair="$B:1 <sep>:1 $A:0 <sep>:0 <cls>:2",
        special_tokens=[("<sep>", 1), ("<cls>", 2)],
    )
    return tokenizer


def bare_tokenizer() -> Tokenizer:
    """As Qwen's: byte-level BPE without special tokens around a text, blanks part of the offsets."""
    tokenizer = bpe_tokenizer()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "tiny": tiny_tokenizer,
    "wordpiece": wordpiece_tokenizer,
    "bpe": bpe_tokenizer,
    "unigram": unigram_tokenizer,
    "typed": typed_tokenizer,
    "bare": bare_tokenizer,
}


@functools.cache
def library(kind: str) -> Tokenizer:
    return TOKENIZERS[kind]()


@functools.cache
def encoder(kind: str, max_seq_len: int = 32, **settings: Any) -> TextEncoder:
    with tempfile.TemporaryDirectory() as folder:
        library(kind).save(f"{folder}/tokenizer.json")
        return TextEncoder(Path(folder) / "tokenizer.json", max_seq_len, **settings)


def plain(kind: str, text: Input, options: EncodingOptions, max_seq_len: int = 32) -> Any:
    """The library's encoding of the whole text, with its own truncation."""
    tokenizer = Tokenizer.from_str(library(kind).to_str())
    tokenizer.enable_truncation(options.max_tokens or max_seq_len, direction=options.direction or "right")
    first, second = (text, None) if isinstance(text, str) else text
    return tokenizer.encode(first, second, add_special_tokens=options.add_special_tokens)


_pieces = st.one_of(
    st.sampled_from(["hello", "the", "cats", "a b c", "x" * 90, "é", "e\u0301", "☃", "日本", "😀", "<s>", "[SEP]"]),
    st.sampled_from([" ", " " * 40, "\n", "\u00a0", "\u200b"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
texts = st.lists(_pieces, max_size=30).map("".join)
inputs = st.one_of(texts, st.tuples(texts, texts))
options = st.builds(
    EncodingOptions,
    truncate=st.just(True),
    direction=st.sampled_from(["left", "right"]),
    max_tokens=st.one_of(st.none(), st.integers(6, 40)),
    with_spans=st.booleans(),
)


def check_same(found: Encoding, expected: Any) -> None:
    assert found.input_ids.dtype == np.int32
    assert found.input_ids.tolist() == expected.ids
    types = [0] * len(expected.ids) if found.token_type_ids is None else found.token_type_ids.tolist()
    assert types == expected.type_ids
    assert found.truncated == bool(expected.overflowing)
    if found.spans is not None:
        assert found.spans.offsets.tolist() == [list(offsets) for offsets in expected.offsets]
        assert found.spans.special.tolist() == [text is None for text in expected.sequence_ids]
        assert (found.spans.words == -1).tolist() == found.spans.special.tolist()


@pytest.mark.parametrize("kind", list(TOKENIZERS))
@settings(max_examples=60, deadline=None)
@given(text=inputs, options=options)
@example(text=("a " * 15, "b " * 16), options=EncodingOptions())  # an odd room, and both sides too long for half
@example(text=("a " * 16, "b " * 15), options=EncodingOptions())
@example(text=("a " * 16, "b " * 16), options=EncodingOptions())
@example(text=("", ""), options=EncodingOptions())
@example(text=("a " * 40, ""), options=EncodingOptions(direction="left"))
def test_texts_and_pairs_are_encoded_and_cut_as_the_library_does(
    kind: str, text: Input, options: EncodingOptions
) -> None:
    limit = min(options.max_tokens or 32, 32)
    expected = plain(kind, text, EncodingOptions(direction=options.direction, max_tokens=limit))
    if expected.ids:  # to have none is an error of its own
        check_same(encoder(kind).encode([text], options)[0], expected)


@pytest.mark.parametrize("kind", list(TOKENIZERS))
@settings(max_examples=30, deadline=None)
@given(text=inputs)
def test_special_tokens_may_be_left_out(kind: str, text: Input) -> None:
    bare = EncodingOptions(truncate=True, add_special_tokens=False)
    expected = plain(kind, text, bare)
    if expected.ids:
        check_same(encoder(kind).encode([text], bare)[0], expected)


@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=2), room=st.integers(1, 40))
def test_what_is_kept_fills_the_room_and_comes_from_the_longer_side_last(lengths: list[int], room: int) -> None:
    kept = kept_lengths(lengths, room)
    assert sum(kept) == min(sum(lengths), room)
    assert all(0 <= num_kept <= length for num_kept, length in zip(kept, lengths, strict=True))
    if len(lengths) == 2 and kept != lengths:
        cut = [num_kept < length for num_kept, length in zip(kept, lengths, strict=True)]
        assert all(num_kept >= room // 2 for num_kept, is_cut in zip(kept, cut, strict=True) if is_cut)


expansions = st.builds(Expansion, token_id=st.integers(0, 5), num_tokens=st.integers(1, 40), attended=st.booleans())


@pytest.mark.parametrize("kind", list(TOKENIZERS))
@settings(max_examples=60, deadline=None)
@given(text=texts, options=options, expansion=expansions)
def test_an_expansion_fills_up_what_is_short_and_changes_nothing_else(
    kind: str, text: str, options: EncodingOptions, expansion: Expansion
) -> None:
    if not plain(kind, text, EncodingOptions()).ids:
        return
    (before,) = encoder(kind).encode([text], options)
    (after,) = encoder(kind).encode([text], replace(options, expansion=expansion))
    missing = max(0, expansion.num_tokens - before.num_tokens)
    assert after.input_ids.tolist() == before.input_ids.tolist() + [expansion.token_id] * missing
    assert after.truncated == before.truncated
    assert after.num_keys == (before.num_tokens if missing and not expansion.attended else None)
    if before.token_type_ids is not None:
        assert after.token_type_ids is not None
        assert after.token_type_ids.tolist() == before.token_type_ids.tolist() + [0] * missing
    if before.spans is not None:
        assert after.spans is not None
        assert len(after.spans.offsets) == after.num_tokens
        assert after.spans.special[before.num_tokens :].all()


def test_a_hypothesis_that_leaves_room_for_a_text_is_not_cut(tmp_path: Path) -> None:
    """``only_first`` of the library, as transformers' zero-shot pipeline asks."""
    tokenizer = tiny_tokenizer()
    tokenizer.enable_truncation(12, strategy="only_first")
    path = tmp_path / "tokenizer.json"
    tiny_tokenizer().save(str(path))
    encoder, options = TextEncoder(path, 12), EncodingOptions(whole_second=True)
    for first in ("hello " * 30, "hello"):
        for second in ("world " * 7, "world"):
            (found,) = encoder.encode([(first, second)], options)
            assert found.input_ids.tolist() == tokenizer.encode(first, second).ids
    assert found.truncated is False
    (found,) = encoder.encode([("hello " * 30, "world " * 40)], options)
    assert (found.num_tokens, found.truncated) == (12, True)


def test_token_types_of_a_pair_are_the_checkpoint_s() -> None:
    pair, text = encoder("tiny").encode([("cat", "the cat"), "cat"])
    assert pair.token_type_ids is not None
    assert pair.token_type_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert text.token_type_ids is None
    assert encoder("bpe").encode([("cat", "the cat")])[0].token_type_ids is None  # RoBERTa has one type


def test_left_truncation_keeps_the_end_and_the_special_tokens() -> None:
    left = encoder("tiny").encode(["a b c d"], EncodingOptions(direction="left", max_tokens=4))[0]
    assert left.input_ids.tolist() == library("tiny").encode("c d").ids
    assert left.truncated


def test_max_tokens_never_raises_the_model_s_limit() -> None:
    encoded = encoder("tiny", 8).encode(["a " * 50], EncodingOptions(max_tokens=1000))[0]
    assert encoded.num_tokens == 8


@pytest.mark.parametrize(("text", "most"), [("a", 2), (("a", "b"), 3)])
def test_a_limit_without_room_for_text_says_so(text: Input, most: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"{most} tokens leave no room beside the {most} .* allow more"):
        encoder("tiny").encode([text], EncodingOptions(max_tokens=most))
    assert encoder("tiny").encode([text], EncodingOptions(max_tokens=most + 1))[0].num_tokens == most + 1


# Parts that must not be cut.


@pytest.mark.parametrize("text", ["a " * 100, ("a", "b " * 100), ("a " * 100, "b"), "hello " * 500_000])
@pytest.mark.parametrize("direction", ["left", "right"])
def test_without_truncation_a_long_input_is_an_error_with_its_remedy(
    text: Input, direction: Literal["left", "right"]
) -> None:
    uncut = EncodingOptions(truncate=False, direction=direction)
    with pytest.raises(InvalidRequestError, match=r"the model's 32 tokens: shorten it, or allow truncation") as caught:
        encoder("tiny").encode(["a", text], uncut)
    assert caught.value.param == "input"


@pytest.mark.parametrize("attended", [True, False])
def test_what_has_no_tokens_is_refused_and_not_filled_up(attended: bool) -> None:
    expansion = Expansion(5, 8, attended)
    with pytest.raises(InvalidRequestError, match="no tokens"):
        encoder("tiny").encode([" "], EncodingOptions(add_special_tokens=False, expansion=expansion))


def test_a_lower_limit_is_not_called_the_model_s() -> None:
    with pytest.raises(InvalidRequestError, match=r"than the 5 tokens it may have: shorten it, or allow truncation"):
        encoder("tiny").encode(["a b c d"], EncodingOptions(truncate=False, max_tokens=5))


def test_where_the_server_forbids_truncation_a_request_may_still_ask_for_it() -> None:
    strict = encoder("tiny", auto_truncate=False)
    with pytest.raises(InvalidRequestError, match="start the server with --auto-truncate"):
        strict.encode(["a " * 100], EncodingOptions(max_tokens=5))
    assert strict.encode(["a " * 100], EncodingOptions(truncate=True))[0].num_tokens == 32


def test_an_input_that_has_no_tokens_without_special_ones_is_an_error() -> None:
    with pytest.raises(InvalidRequestError, match="no tokens"):
        encoder("tiny").encode([" "], EncodingOptions(add_special_tokens=False))


# Frames

FRAME = TextFrame("the cat:", "!hello")
FRAMED = EncodingOptions(framed=True)


def body_of(text: str, num_tokens: int | None = None) -> list[int]:
    ids: list[int] = library("tiny").encode(text, add_special_tokens=False).ids
    return ids[:num_tokens]


@given(text=st.lists(_pieces, max_size=8).map("".join))
@example(text="a " * 60)
def test_a_framed_input_stands_between_the_frame_s_tokens_and_alone_is_cut(text: str) -> None:
    encoded = encoder("tiny", frame=FRAME).encode([text], FRAMED)[0]
    prefix, suffix = map(body_of, FRAME[:2])
    room = 32 - len(prefix) - len(suffix)
    assert encoded.input_ids.tolist() == [*prefix, *body_of(text, room), *suffix]
    assert encoded.truncated == (len(body_of(text)) > room)
    assert encoded.token_type_ids is None


def test_a_frame_obeys_limit_direction_and_spans() -> None:
    options = EncodingOptions(framed=True, max_tokens=8, direction="left", with_spans=True)
    encoded = encoder("tiny", frame=FRAME).encode(["a b c d"], options)[0]
    prefix, suffix = map(body_of, FRAME[:2])
    assert encoded.input_ids.tolist() == [*prefix, *body_of("b c d"), *suffix]
    assert encoded.spans is not None
    assert encoded.spans.offsets[len(prefix) : -len(suffix)].tolist() == [[2, 3], [4, 5], [6, 7]]
    assert encoded.spans.special.tolist() == [True] * 3 + [False] * 3 + [True] * 2


def test_a_frame_without_room_says_so() -> None:
    with pytest.raises(InvalidRequestError, match=r"5 tokens leave no room beside the 5 .* allow more"):
        encoder("tiny", frame=FRAME).encode(["a"], EncodingOptions(framed=True, max_tokens=5))


def test_a_framed_input_may_be_refused_instead_of_cut() -> None:
    with pytest.raises(InvalidRequestError, match="allow truncation"):
        encoder("tiny", frame=FRAME).encode(["a " * 60], EncodingOptions(framed=True, truncate=False))


# Spans


@pytest.mark.parametrize("kind", list(TOKENIZERS))
@settings(max_examples=30, deadline=None)
@given(text=texts.filter(str.strip), direction=st.sampled_from(["left", "right"]))
@example(text="hello cats " * 1000, direction="left")  # longer than what is shown to the library at first
def test_spans_name_the_characters_of_the_text(kind: str, text: str, direction: Literal["left", "right"]) -> None:
    expected = plain(kind, text, EncodingOptions(direction=direction))
    spans = encoder(kind).encode([text], EncodingOptions(direction=direction, with_spans=True))[0].spans
    assert spans is not None
    assert spans.offsets.tolist() == [list(offsets) for offsets in expected.offsets]


def test_words_are_numbered_and_special_tokens_have_none() -> None:
    spans = encoder("tiny").encode(["embedding the"], EncodingOptions(with_spans=True))[0].spans
    assert spans is not None
    assert spans.words.tolist() == [-1, 0, 0, 1, -1]
    assert spans.offsets.tolist() == [[0, 0], [0, 5], [5, 9], [10, 13], [0, 0]]
    assert spans.special.tolist() == [True, False, False, False, True]


# Long texts


def words_of(seed: int, count: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(["hello", "cat", "the", "embedding", "a"], count))


# Longer than what is shown to the library at first; the library itself needs a minute for a pair of ten times as much.
FIRST, SECOND = words_of(0, 400), words_of(1, 401)


@pytest.mark.parametrize("kind", ["tiny", "bpe", "unigram"])
@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("pair", [("cat", FIRST), (FIRST, "cat"), (FIRST, SECOND), (SECOND, FIRST), (FIRST, FIRST)])
def test_long_pairs_are_cut_as_the_library_cuts_them(
    kind: str, direction: Literal["left", "right"], pair: tuple[str, str]
) -> None:
    options = EncodingOptions(truncate=True, direction=direction)
    check_same(encoder(kind).encode([pair], options)[0], plain(kind, pair, options))


@pytest.mark.parametrize("kind", ["tiny", "bpe", "unigram"])
@pytest.mark.parametrize("options", [EncodingOptions(), EncodingOptions(direction="left", with_spans=True)])
def test_megabytes_cost_no_more_than_a_page(kind: str, options: EncodingOptions) -> None:
    book = words_of(2, 1_000_000)
    blanks = " " * 4_000_000
    for text in (book, (book, book), ("a", book), (book + "a", book), blanks + "a", ("a", blanks)):
        started = time.process_time()
        encoded = encoder(kind).encode([text], options)[0]
        assert time.process_time() - started < 2  # a page takes 0.05 s; whole, the first takes 5 s, the second minutes
        assert encoded.truncated or (kind == "tiny" and blanks in text)
        assert encoded.num_tokens <= 32


def test_a_left_cut_through_a_word_leaves_no_trace() -> None:
    options = EncodingOptions(direction="left")
    for length in range(9_000, 9_100):
        text = "embedding " * (length // 10) + "x" * (length % 10)
        check_same(encoder("tiny").encode([text], options)[0], plain("tiny", text, options))


# Threads


def test_options_used_side_by_side_give_what_each_gives_alone() -> None:
    shared = encoder("tiny", frame=FRAME)
    work: list[tuple[Input, EncodingOptions]] = [
        (text, EncodingOptions(direction=direction, max_tokens=most, with_spans=most % 2 == 0, framed=framed))
        for most in range(7, 20)
        for direction in ("left", "right")
        for framed, text in ((False, "a b c d " * 9), (False, ("the cat " * 9, "hello " * 7)), (True, "a the cat " * 9))
    ] * 10
    alone = [shared.encode([text], options)[0].input_ids.tolist() for text, options in work]
    with ThreadPoolExecutor(8) as threads:
        together = threads.map(lambda item: shared.encode([item[0]], item[1])[0].input_ids.tolist(), work)
        assert list(together) == alone


def test_inputs_are_encoded_the_same_in_any_company() -> None:
    company: list[Input] = ["a", ("a", "b"), "a", ("b", "a"), ("a", "hello " * 50), "hello " * 50, ("a", "b")]
    together = encoder("tiny").encode(company)
    for text, encoding in zip(company, together, strict=True):
        assert encoding.input_ids.tolist() == encoder("tiny").encode([text])[0].input_ids.tolist()


# Ids and tokens


def test_special_ids_are_those_so_called_and_those_around_every_text() -> None:
    assert encoder("tiny").special_ids == {2, 3}
    assert encoder("unigram").special_ids == {0, 1, 2, 3, 4}


def test_ids_go_back_to_tokens_and_texts() -> None:
    ids = encoder("wordpiece").encode(["the cat"])[0].input_ids.tolist()
    assert encoder("wordpiece").token(ids[0]) == "[CLS]"
    assert encoder("wordpiece").token(10**6) == ""
    assert encoder("wordpiece").decode(ids) == "the cat"
    assert encoder("wordpiece").decode(ids, skip_special_tokens=False) == "[CLS] the cat [SEP]"


@pytest.mark.parametrize("kind", list(TOKENIZERS))
@settings(max_examples=40, deadline=None)
@given(
    text=texts,
    kept=st.sampled_from([("the cats ", ""), ("", " hello"), ("a b c ", " the")]),
    direction=st.sampled_from(["left", "right"]),
)
def test_what_is_kept_around_a_text_is_whole_however_much_of_it_is_cut(
    kind: str, text: str, kept: tuple[str, str], direction: Literal["left", "right"]
) -> None:
    asked = EncodingOptions(truncate=True, direction=direction)
    prompted = kept[0] + text + kept[1]
    (found,) = encoder(kind).encode([prompted], replace(asked, kept=kept))
    whole = plain(kind, prompted, asked, 10_000)
    if len(whole.ids) <= 32:
        assert found.input_ids.tolist() == whole.ids
        return
    before, inner, behind = (
        library(kind).encode(part, add_special_tokens=False).ids for part in (kept[0], text, kept[1])
    )
    num_special = len(whole.ids) - len(library(kind).encode(prompted, add_special_tokens=False).ids)
    count = 32 - num_special - len(before) - len(behind)
    cut = inner[:count] if direction == "right" else inner[max(0, len(inner) - count) :]
    expected = [*before, *cut, *behind]
    assert found.truncated
    ids = found.input_ids.tolist()
    assert any(ids[start : start + len(expected)] == expected for start in range(len(ids) - len(expected) + 1))
    assert len(ids) == num_special + len(expected) <= 32


def test_a_prompt_without_room_for_a_text_is_an_error() -> None:
    asked = EncodingOptions(truncate=True, max_tokens=6, direction="left", kept=("a b c d e ", ""))
    with pytest.raises(InvalidRequestError, match="no room for a text beside its prompt"):
        encoder("wordpiece").encode(["a b c d e the cats"], asked)


def test_a_model_that_is_cut_on_the_left_is_so_unless_a_request_says_otherwise() -> None:
    left = encoder("wordpiece", 6, truncation_side="left")
    text = "hello the cats a b c"
    for options, direction in ((EncodingOptions(), "left"), (EncodingOptions(direction="right"), "right")):
        (encoding,) = left.encode([text], options)
        asked = EncodingOptions(direction=direction)  # type: ignore[arg-type]
        assert encoding.input_ids.tolist() == plain("wordpiece", text, asked, 6).ids


def test_special_tokens_of_a_text_are_split_where_the_model_does_so() -> None:
    whole, split = encoder("wordpiece"), encoder("wordpiece", split_special_tokens=True)
    ids = [one.encode(["the [SEP] cats"])[0].input_ids.tolist() for one in (whole, split)]
    library_ = Tokenizer.from_str(library("wordpiece").to_str())
    library_.encode_special_tokens = True
    assert ids == [plain("wordpiece", "the [SEP] cats", EncodingOptions()).ids, library_.encode("the [SEP] cats").ids]
    assert ids[0] != ids[1]
