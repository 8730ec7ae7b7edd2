"""Known words give what the tokenizers library gives for the whole text; the cache stays within its bounds."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from bei.tokenizer import word_cache
from bei.tokenizer.encoder import EncodingOptions, TextEncoder
from bei.tokenizer.word_cache import WordCache, treats_words_alone
from tests.support.artifacts import tiny_tokenizer
from tests.support.checkpoints import wordpiece_tokenizer

_pieces = st.one_of(
    st.sampled_from(
        ["hello", "world!", "the-cat's", "[SEP]", "[sep]", "[MASK]", "x" * 120, "e\u0301", "日本語", "ﷺ", "İ"]
    ),
    st.sampled_from([" ", "  ", "\n", "\t ", "\u00a0", "\u2028", "\u200b", "\x00", "\x1c", "\ufffd"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
texts = st.lists(_pieces, max_size=30).map("".join)
_ascii = st.one_of(
    st.sampled_from(["Hello", "THE", "cat's", "cafe", "caf", "[CLS]", "[mask]", "x" * 120, " ", "\t", "\x7f"]),
    st.text(st.characters(max_codepoint=126), max_size=12),
)


def tokenizer_with_special_tokens(*, lowercase: bool = True) -> Tokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", AddedToken("[MASK]", lstrip=True)])
    return tokenizer


def ids_of(cache: WordCache, text: str) -> list[int]:
    ids: list[int] = np.frombuffer(cache.ids(text), np.int32).tolist()
    return ids


@given(first=texts, second=texts)
@example(first="hello [MASK] world", second="hello  [MASK]world")
def test_words_give_the_ids_of_the_whole_text_learned_or_known(first: str, second: str) -> None:
    tokenizer = tokenizer_with_special_tokens()
    assert treats_words_alone(tokenizer)
    cache = WordCache(tokenizer)
    for text in (first, second, f"{first} {second}", first):
        assert ids_of(cache, text) == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("lowercase", [True, False])
@given(text=st.lists(_ascii, max_size=20).map("".join))
def test_ordinary_words_are_split_as_the_library_splits_them(lowercase: bool, text: str) -> None:
    tokenizer = tokenizer_with_special_tokens(lowercase=lowercase)
    tokenizer.add_tokens([AddedToken("Café", normalized=True), AddedToken("f-1", single_word=True)])
    assert ids_of(WordCache(tokenizer), text) == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    tokenizer_with_special_tokens().save(str(path))
    return TextEncoder(path, 32)


@given(text=texts, max_tokens=st.integers(3, 40))
def test_a_lower_limit_cuts_known_words_as_the_library_does(encoder: TextEncoder, text: str, max_tokens: int) -> None:
    tokenizer = tokenizer_with_special_tokens()
    tokenizer.enable_truncation(min(max_tokens, 32))
    expected = tokenizer.encode(text)
    (encoding,) = encoder.encode([text], EncodingOptions(max_tokens=max_tokens))
    assert encoding.input_ids.tolist() == expected.ids
    assert encoding.truncated == bool(expected.overflowing)


def test_a_tokenizer_whose_added_tokens_reach_over_spaces_is_left_to_the_library(tmp_path: Path) -> None:
    tokenizer = tokenizer_with_special_tokens()
    tokenizer.add_tokens(["new york"])
    assert not treats_words_alone(tokenizer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoded = TextEncoder(tmp_path / "tokenizer.json", 16).encode(["hello new york"])[0]
    assert encoded.input_ids.tolist() == tokenizer.encode("hello new york").ids


def test_a_tokenizer_that_sees_spaces_is_left_to_the_library() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert not treats_words_alone(tokenizer)


def test_the_cache_starts_anew_at_its_bound_and_stays_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_cache, "_MAX_BYTES", 20_000)
    tokenizer = tiny_tokenizer()
    cache = WordCache(tokenizer)
    largest = 0
    for number in range(1000):
        text = f"hello {number} {number + 1}x world"
        assert ids_of(cache, text) == tokenizer.encode(text, add_special_tokens=False).ids
        largest = max(largest, sum(sys.getsizeof(word) + sys.getsizeof(ids) for word, ids in cache._known.items()))
    assert 0 < largest < 40_000


def test_threads_share_a_cache_that_is_renewed_under_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_cache, "_MAX_BYTES", 5_000)
    tokenizer = tiny_tokenizer()
    cache = WordCache(tokenizer)
    wrong: list[str] = []

    def work(offset: int) -> None:
        for number in range(300):
            text = f"cat {number * 7 + offset} the {number}"
            if ids_of(cache, text) != tokenizer.encode(text, add_special_tokens=False).ids:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("content", ["\n", "\t", "\u3000"])
def test_an_added_token_that_is_normalized_to_a_space_reaches_over_words(content: str) -> None:
    tokenizer = wordpiece_tokenizer()
    assert treats_words_alone(tokenizer)
    tokenizer.add_tokens([content])
    assert not treats_words_alone(tokenizer)
