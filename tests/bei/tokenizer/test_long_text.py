"""Long texts have, piece by piece, the tokens that the library gives them at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from bei.errors import InvalidRequestError
from bei.tokenizer import encoder as tokenization
from bei.tokenizer import long_text
from bei.tokenizer.common_text import CommonText
from bei.tokenizer.encoder import EncodingOptions, Input, TextEncoder
from bei.tokenizer.long_text import UncuttableTextError, tokens_in_pieces
from bei.tokenizer.pieces import PieceEncoder
from bei.tokenizer.pool import TokenizerPool
from tests.bei.tokenizer.test_encoding_options import TOKENIZERS, library
from tests.support.artifacts import tiny_tokenizer

PROSE = "The cats sat on the mat. It was hello, world: 3.14 cats' mats!\nIsn't it? Größe (naïve) 日本語のテキスト😀 "
WHOLE = EncodingOptions(whole=True, with_spans=True, add_special_tokens=False)


@pytest.fixture(scope="module", autouse=True)
def _small_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_text, "PIECE_CHARS", 120)
        patch.setattr(long_text, "_WINDOW_CHARS", 60)
        patch.setattr(tokenization, "PIECE_CHARS", 120)
        yield


class CountingLibrary:
    """``encode`` that remembers the texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []

    def __call__(self, text: str) -> Any:
        self.texts.append(text)
        return self._tokenizer.encode(text, add_special_tokens=False)


def no_check() -> None:
    """Nothing ends the work early."""


def check_same(found: long_text.Tokens, expected: Any) -> None:
    assert found.offsets is not None
    assert found.words is not None
    assert found.ids.tolist() == expected.ids
    assert found.offsets.tolist() == [list(offsets) for offsets in expected.offsets]
    assert found.words.tolist() == expected.word_ids


pieces = st.one_of(
    st.sampled_from(["the cats ", "a b c", "x" * 90, "é", "e\u0301 ", "日本語", "😀", "[SEP]", "\u3000", "don't "]),
    st.sampled_from([" ", " " * 40, "\n\n", "\u00a0", "\u200b", "1234", ".,;"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)


@pytest.mark.parametrize("kind", list(TOKENIZERS))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.lists(pieces, min_size=10, max_size=120).map("".join))
def test_pieces_have_the_tokens_of_the_whole(kind: str, text: str) -> None:
    encode = CountingLibrary(library(kind))
    for from_end in (False, True):
        found, is_whole = tokens_in_pieces(
            text, encode, with_spans=True, most_chars=100_000, check=no_check, from_end=from_end
        )
        assert is_whole
        check_same(found, encode(text))
    bare = tokens_in_pieces(text, encode, with_spans=False, most_chars=100_000, check=no_check).tokens
    assert bare.ids.tolist() == found.ids.tolist()
    assert bare.offsets is None


@pytest.mark.parametrize("kind", list(TOKENIZERS))
def test_prose_is_cut(kind: str) -> None:
    encode = CountingLibrary(library(kind))
    found = tokens_in_pieces(PROSE * 50, encode, with_spans=True, most_chars=1000, check=no_check).tokens
    assert max(map(len, encode.texts)) <= 121  # a letter stands where the text goes on
    check_same(found, encode(PROSE * 50))


def one_word_tokenizer() -> Tokenizer:
    """BPE that sees the whole text as one word, as tokenizers of SentencePiece's BPE are converted."""
    tokenizer = library("bpe").from_str(library("bpe").to_str())
    tokenizer.pre_tokenizer = None
    return tokenizer


def test_a_tokenizer_that_joins_words_is_not_cut() -> None:
    encode = CountingLibrary(one_word_tokenizer())
    with pytest.raises(UncuttableTextError):
        tokens_in_pieces(PROSE * 50, encode, with_spans=True, most_chars=1000, check=no_check)
    assert max(map(len, encode.texts)) <= 1001
    text = PROSE * 5
    check_same(tokens_in_pieces(text, encode, with_spans=True, most_chars=1000, check=no_check).tokens, encode(text))


def encoder_of(tokenizer: Tokenizer, tmp_path: Path, max_seq_len: int = 32) -> TextEncoder:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return TextEncoder(tmp_path / "tokenizer.json", max_seq_len)


def test_a_text_too_long_to_be_read_at_once_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenization, "_MOST_CHARS_AT_ONCE", 1000)
    encoder = encoder_of(one_word_tokenizer(), tmp_path)
    with pytest.raises(InvalidRequestError, match=r"has \d+ characters, .* at once it takes up to 1000: split it"):
        encoder.encode([PROSE * 50], WHOLE)


class LibrarySpy:
    """The library's tokenizer, which notes the longest text that it is given, and the characters of all."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.longest = self.num_chars = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        self.longest = max(self.longest, *map(len, texts), 0)
        self.num_chars += sum(map(len, texts))
        return self._tokenizer.encode_batch(texts, **options)

    encode_batch_fast = encode_batch


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize(
    ("kind", "text", "num_tokens"),
    [("one word", PROSE * 50, 32), ("wordpiece", "x" * 40_000, 3), ("wordpiece", "the cat " + "x" * 40_000, 5)],
)
def test_of_a_text_that_cannot_be_cut_no_more_is_read_than_the_library_is_given_at_once(
    kind: str, text: str, num_tokens: int, direction: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenization, "_MOST_CHARS_AT_ONCE", 1000)
    encoder = encoder_of(one_word_tokenizer() if kind == "one word" else tiny_tokenizer(), tmp_path)
    spy = LibrarySpy(encoder._tokenizer)
    monkeypatch.setattr(encoder, "_tokenizer", spy)
    (cut,) = encoder.encode([text], EncodingOptions(truncate=True, direction=direction))
    assert spy.longest <= 1001
    assert cut.truncated == (kind == "one word")
    assert cut.num_tokens == num_tokens


def test_of_a_long_text_around_an_image_no_more_is_read_than_the_model_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read to its end, and refused then."""
    encoder = encoder_of(tiny_tokenizer(), tmp_path)
    spy = LibrarySpy(encoder._tokenizer)
    monkeypatch.setattr(encoder, "_tokenizer", spy)
    (expected,) = encoder.encode(["the cat " * 20], EncodingOptions(truncate=True, add_special_tokens=False))
    ids = PieceEncoder(encoder, 32).ids_of([("hello ", "world"), ("the cat " * 100_000,)], 32)
    assert ids[-32:] == expected.input_ids.tolist()
    assert len(ids) == 2 + 32
    assert spy.num_chars < 10_000


def test_a_text_that_nobody_waits_for_any_more_is_not_read_to_its_end() -> None:
    encode = CountingLibrary(library("bpe"))
    text = PROSE * 200

    class NobodyWaitsError(Exception):
        pass

    def check() -> None:
        if len(encode.texts) > 20:
            raise NobodyWaitsError

    with pytest.raises(NobodyWaitsError):
        tokens_in_pieces(text, encode, with_spans=True, most_chars=1000, check=check)
    assert sum(map(len, encode.texts)) < len(text) / 2


def test_texts_of_all_lengths_of_one_request_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenization, "_MOST_CHARS_AT_ONCE", 1000)
    encoder = encoder_of(tiny_tokenizer(), tmp_path)
    texts = ["cat", PROSE * 20, "the cats", "hello " * 500, "a"]
    for text, encoding in zip(texts, encoder.encode(texts, WHOLE), strict=True):
        expected = tiny_tokenizer().encode(text, add_special_tokens=False)
        assert encoding.input_ids.tolist() == expected.ids
        assert encoding.spans is not None
        assert encoding.spans.words.tolist() == expected.word_ids
    bare = EncodingOptions(whole=True, add_special_tokens=False)
    for text, encoding in zip(texts, encoder.encode(texts, bare), strict=True):
        assert encoding.input_ids.tolist() == tiny_tokenizer().encode(text, add_special_tokens=False).ids
        assert encoding.spans is None


# A query is tokenized once


class Spy(TextEncoder):
    """Counts how often texts are tokenized."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, 32)
        self.texts: list[str] = []

    def _tokens(self, texts: Any, *options: Any) -> Any:
        self.texts.extend(texts)
        return super()._tokens(texts, *options)


@pytest.mark.parametrize("query", ["the cat", "hello cats " * 1000], ids=["short", "11 kB"])
@pytest.mark.parametrize("direction", ["left", "right"])
def test_the_query_of_many_chunks_is_tokenized_once(tmp_path: Path, query: str, direction: Any) -> None:
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    encoder = Spy(tmp_path / "tokenizer.json")
    pairs: list[Input] = [(query, f"the world {'cat ' * (number % 60)}{number}") for number in range(70)]
    options = EncodingOptions(direction=direction)
    expected = [encoder.encode([pair], options)[0] for pair in pairs]
    encoder.texts.clear()
    found: dict[int, Any] = {}
    pool = TokenizerPool(encoder, 3)
    pool.submit(pairs, lambda start, made: found.update(enumerate(made, start)), _fail, lambda: False, options)
    pool.close()
    assert [found[index].input_ids.tolist() for index in range(70)] == [e.input_ids.tolist() for e in expected]
    assert [found[index].truncated for index in range(70)] == [e.truncated for e in expected]
    shown = [text for text in encoder.texts if text[:5] == query[:5] and "world" not in text[:10]]
    assert len(shown) <= 3  # as much as fills the model, more as it did not, and as much as is ever shown
    assert len(encoder.texts) < 150


def _fail(_: int, error: Exception) -> None:
    raise error


def test_pairs_without_a_common_text_and_texts_keep_their_own(tmp_path: Path) -> None:
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    encoder = TextEncoder(tmp_path / "tokenizer.json", 32)
    common = CommonText()
    first: list[Input] = [("cat", "the"), ("cat", "a")]
    others: list[list[Input]] = [
        [("hello", "the")],
        [("cat", "cat")],
        ["cat", ("cat", "b")],
        [("cat", "b"), ("a", "b")],
    ]
    for inputs in (first, *others):
        found = encoder.encode(inputs, common=common)
        expected = encoder.encode(inputs)
        assert [e.input_ids.tolist() for e in found] == [e.input_ids.tolist() for e in expected]
