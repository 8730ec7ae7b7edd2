"""However many characters add no token, or make one word, in front of a text, behind it or inside: its tokens are the
library's, or it is refused by name."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from bei.core import Encoding
from bei.errors import InvalidRequestError
from bei.tokenizer import encoder as tokenization
from bei.tokenizer import long_text
from bei.tokenizer.encoder import EncodingOptions, Input, TextEncoder
from bei.tokenizer.special_tokens import kept_lengths, layout_of
from tests.support.artifacts import tiny_tokenizer
from tests.support.checkpoints import bpe_tokenizer, unigram_tokenizer, wordpiece_tokenizer

_SPECIAL = ["<s>", "</s>", "<unk>"]
_TEMPLATE = {"single": "<s> $A </s>", "pair": "<s> $A </s> $B </s>", "special_tokens": [("<s>", 0), ("</s>", 1)]}


def one_word_tokenizer() -> Tokenizer:
    """As Llama's and Gemma's: a blank is ``▁``, and BPE sees the whole text as one word."""
    merges = [("x", "x"), ("xx", "xx"), ("▁", "▁"), ("▁▁", "▁▁"), ("t", "h"), ("th", "e"), ("▁", "the"), ("c", "a")]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz0123456789.,!", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [*_SPECIAL, *letters, *("".join(merge) for merge in merges)]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = processors.TemplateProcessing(**_TEMPLATE)
    tokenizer.decoder = decoders.Replace("▁", " ")
    return tokenizer


def collapsing_tokenizer() -> Tokenizer:
    """As T5's and XLM-R's: runs of blanks are one, what has no width is none, and a unigram model sees the words.

    Where ``xx`` and ``xxx`` stand in a run depends on its length.
    """
    pieces = [("▁", -2.0), ("xx", -4.0), ("xxx", -6.0), ("▁the", -3.0), ("cat", -3.0), ("s", -3.5)]
    pieces += [(letter, -5.0) for letter in "abcdefghijklmnopqrtuvwxyz0123456789.,!é"]
    tokenizer = Tokenizer(models.Unigram([(token, 0.0) for token in _SPECIAL] + pieces, unk_id=2))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(Regex("[\u0000\u200b\u0301]"), ""),
            normalizers.NFKC(),
            normalizers.Replace(Regex(r"\s+"), " "),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(**_TEMPLATE)
    return tokenizer


def blank_merging_tokenizer() -> Tokenizer:
    """As GPT-NeoX's and ModernBERT's: byte-level BPE with tokens for runs of blanks."""
    merges = [("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("ĠĠĠĠ", "ĠĠĠĠ"), ("x", "x"), ("h", "e"), ("t", "he"), ("Ġ", "the")]
    words = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in merges)]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(**_TEMPLATE)
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "tiny": tiny_tokenizer,
    "wordpiece": wordpiece_tokenizer,
    "bpe": bpe_tokenizer,
    "unigram": unigram_tokenizer,
    "one word": one_word_tokenizer,
    "collapsing": collapsing_tokenizer,
    "blank merging": blank_merging_tokenizer,
}
REFUSED = "this model's tokenizer cannot read it in pieces"


@functools.cache
def library(kind: str) -> Tokenizer:
    return TOKENIZERS[kind]()


@functools.cache
def encoder(kind: str, max_seq_len: int = 32) -> TextEncoder:
    with tempfile.TemporaryDirectory() as folder:
        library(kind).save(f"{folder}/tokenizer.json")
        return TextEncoder(Path(folder) / "tokenizer.json", max_seq_len)


@contextmanager
def small_pieces(most_chars: int = 4_000) -> Iterator[None]:
    """All bounds a tenth of what they are, so that short texts are long ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_text, "PIECE_CHARS", 1_000)
        patch.setattr(long_text, "_WINDOW_CHARS", 60)
        patch.setattr(tokenization, "PIECE_CHARS", 1_000)
        patch.setattr(tokenization, "_MOST_CHARS_AT_ONCE", most_chars)
        yield


def check_as_the_library(kind: str, given_input: Input, options: EncodingOptions, found: Encoding) -> None:
    """``found`` has the library's tokens of whole texts, cut at the end."""
    texts = [given_input] if isinstance(given_input, str) else list(given_input)
    parts = [library(kind).encode(text, add_special_tokens=False) for text in texts]
    layout = layout_of(library(kind), len(texts), with_special=True)
    room = (options.max_tokens or 32) - layout.num_special
    kept = kept_lengths([len(part.ids) for part in parts], room)
    cuts = [
        slice(0, count) if options.direction != "left" else slice(len(part.ids) - count, None)
        for part, count in zip(parts, kept, strict=True)
    ]
    expected: list[int] = []
    offsets: list[Any] = []
    for piece in layout.pieces:
        if piece.text is None:
            expected += piece.ids.tolist()
            offsets += [[0, 0]] * len(piece.ids)
        else:
            expected += parts[piece.text].ids[cuts[piece.text]]
            offsets += [list(one) for one in parts[piece.text].offsets[cuts[piece.text]]]
    assert found.input_ids.tolist() == expected
    assert found.truncated == (sum(len(part.ids) for part in parts) > room)
    if found.spans is not None:
        assert found.spans.offsets.tolist() == offsets


_runs = st.one_of(
    st.tuples(st.sampled_from([" ", "\0", "\u200b", "\u0301", "\n", "x", "7", "é", "世", "-"]), st.integers(1, 9_000)),
    st.tuples(
        st.sampled_from([" \u200b", "\0 \n", "\u200b\0\u0301", "xy", "0f1a", "a ", "x \u200b"]), st.integers(1, 3_000)
    ),
).map(lambda run: run[0] * run[1])
_words = st.sampled_from(["the cats", "hello", "a", " ", "the", "1.", "é", "</s>", "it's the cat! ", "日本 "])
_texts = st.lists(st.one_of(_words, _words, _runs), min_size=1, max_size=7).map("".join)
_options = st.builds(
    EncodingOptions,
    truncate=st.just(True),
    direction=st.sampled_from(["left", "right"]),
    max_tokens=st.integers(6, 32),
    with_spans=st.booleans(),
)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(given_input=st.one_of(_texts, st.tuples(_texts, _texts)), options=_options)
@example(given_input=" " * 9_000 + "hello cats", options=EncodingOptions(True))
@example(given_input="hel" + "\u200b" * 9_000 + "lo cats", options=EncodingOptions(True))
@example(given_input="hel" + "\u200b" * 3_000 + " " + "\u200b" * 3_000 + "lo", options=EncodingOptions(True))
@example(given_input="hel" + "\u200b" * 700 + "\x1c" + "\u200b" * 700 + "lo", options=EncodingOptions(True))
@example(given_input="x" * 9_000 + " hello", options=EncodingOptions(True, direction="left", with_spans=True))
@example(given_input="the cats" + "0f1a" * 700 + "\0" * 180, options=EncodingOptions(True, with_spans=True))
@example(given_input=("x" * 5_000, "x" * 5_001), options=EncodingOptions(True, max_tokens=20))
def test_tokens_are_those_of_the_whole_text_or_it_is_refused(
    kind: str, given_input: Input, options: EncodingOptions
) -> None:
    with small_pieces():
        try:
            (found,) = encoder(kind).encode([given_input], options)
        except InvalidRequestError as error:
            if REFUSED not in str(error) and "no tokens" not in str(error):
                raise
            return
    check_as_the_library(kind, given_input, options, found)


_NOTHING = {"blanks": " ", "NULs": "\0", "zero width": "\u200b", "all of them": " \0\u200b\n"}


@pytest.mark.parametrize("kind", ["tiny", "wordpiece", "collapsing"])
@pytest.mark.parametrize("run", _NOTHING.values(), ids=_NOTHING)
@pytest.mark.parametrize("direction", ["left", "right"])
def test_what_adds_no_token_costs_no_text_its_place(kind: str, run: str, direction: Any) -> None:
    many = run * (66_000 // len(run))
    given_inputs: tuple[Input, ...] = (
        many + "the cats",
        ("hello", "the cats" + many),
        ("the ca" + many + "ts", "hello"),
    )
    for given_input in given_inputs:
        options = EncodingOptions(True, direction=direction, with_spans=True)
        (found,) = encoder(kind).encode([given_input], options)
        assert not found.truncated
        check_as_the_library(kind, given_input, options, found)


@pytest.mark.parametrize("word", ["x", "0f1a"])
@pytest.mark.parametrize("direction", ["left", "right"])
def test_behind_and_before_a_word_of_any_length_a_text_goes_on(word: str, direction: Any) -> None:
    """Of WordPiece, for which a word of more than 100 characters is one unknown token."""
    long = word * (260_000 // len(word))
    for text in (long + " the cats", "the cats " + long, "the " + long + " cats"):
        options = EncodingOptions(True, direction=direction, with_spans=True)
        (found,) = encoder("wordpiece").encode([text], options)
        check_as_the_library("wordpiece", text, options, found)


def test_a_word_without_an_end_fills_the_model_where_its_end_changes_nothing() -> None:
    """Byte-level and SentencePiece's BPE count a run of letters from its beginning."""
    for kind in ("one word", "blank merging"):
        found, whole = encoder(kind).encode(["x" * 1_000_000, "x" * 1_000], EncodingOptions(True))
        assert found.truncated
        assert found.input_ids.tolist() == whole.input_ids.tolist()


@pytest.mark.parametrize(
    ("kind", "direction"), [("one word", "left"), ("blank merging", "left"), ("collapsing", "right")]
)
def test_what_depends_on_more_than_can_be_read_at_once_is_refused_by_name(kind: str, direction: Any) -> None:
    options = EncodingOptions(True, direction=direction)
    with small_pieces(), pytest.raises(InvalidRequestError, match=REFUSED) as caught:
        encoder(kind).encode(["the cats " + "x" * 9_001 + " the"], options)
    assert caught.value.param == "input"
    text = "the cats " + "x" * 3_001 + " the"
    with small_pieces():
        (found,) = encoder(kind).encode([text], options)
    check_as_the_library(kind, text, options, found)


def test_the_longer_of_two_books_keeps_the_odd_token_wherever_they_differ() -> None:
    book = "the cats sat on it. " * 1_000
    options = EncodingOptions(True, max_tokens=20)  # 17 tokens of texts
    for pair in (
        (book + "a", book),
        (book, book + "a"),
        (book, book),
        ("a" + book, book),
        (book + "a", "hello " + book),
    ):
        with small_pieces():
            (found,) = encoder("wordpiece").encode([pair], options)
        check_as_the_library("wordpiece", pair, options, found)


@pytest.mark.parametrize("direction", ["left", "right"])
@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("make", [bpe_tokenizer, unigram_tokenizer, wordpiece_tokenizer, one_word_tokenizer])
def test_a_piece_that_ends_inside_an_added_token_is_read_on(
    make: Callable[[], Tokenizer], strips: bool, direction: Any, tmp_path: Path
) -> None:
    """Its beginning is several words, which looked as if whole words followed."""
    tokenizer = make()
    name = "<|the_beginning_of_a_marker|>"
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, lstrip=strips, rstrip=strips)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder = TextEncoder(tmp_path / "tokenizer.json", 64)
    text = f"{name} in{name}side and            {name}   " * 6
    num_special = tokenizer.num_special_tokens_to_add(False)
    for limit in range(num_special + 1, 40):
        tokenizer.enable_truncation(limit, direction=direction)
        (found,) = encoder.encode([text], EncodingOptions(True, direction, max_tokens=limit))
        assert found.input_ids.tolist() == tokenizer.encode(text).ids, limit


@pytest.mark.parametrize("options", [EncodingOptions(whole=True), EncodingOptions(True, "left")], ids=["whole", "left"])
@pytest.mark.parametrize("make", [bpe_tokenizer, unigram_tokenizer, wordpiece_tokenizer])
@pytest.mark.parametrize("word", ["hello ", "world\t", "cat  ", "the ", "\u2603 "])
def test_no_token_is_lost_where_words_repeat(
    word: str, make: Callable[[], Tokenizer], options: EncodingOptions, tmp_path: Path
) -> None:
    """Of equal tokens around a cut two others were taken, one place further."""
    tokenizer = make()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder = TextEncoder(tmp_path / "tokenizer.json", 1_000_000)
    for count in (4_000, 5_001):
        (found,) = encoder.encode([word * count], options)
        assert found.input_ids.tolist() == tokenizer.encode(word * count).ids
