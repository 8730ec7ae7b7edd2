"""TextEncoder gives what the tokenizers library gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordPiece

from bei.errors import ArtifactManifestError, InvalidRequestError
from bei.tokenizer.encoder import AS_CONFIGURED, EncodingOptions, TextEncoder
from bei.tokenizer.special_tokens import TextFrame
from tests.support.artifacts import LIMITS, tiny_tokenizer

CLS, SEP = 2, 3

# Texts built of what goes wrong: words of one token and of a hundred, long runs of blanks, unicode of every kind.
_pieces = st.one_of(
    st.sampled_from(
        ["hello", "embedding", "cats", "x" * 90, "x" * 200, "[SEP]", "[CLS]", "é", "e\u0301", "☃", "ﷺ", "日本"]
    ),
    st.sampled_from([" ", "\t\n", " " * 300, "\u00a0" * 70, "\u200b\u200d", "\x00\x7f"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
)
odd_texts = st.lists(_pieces, max_size=60).map("".join)


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tiny_tokenizer().save(str(path))
    return path


def plain_ids(text: str, max_seq_len: int) -> list[int]:
    tokenizer = tiny_tokenizer()
    tokenizer.enable_truncation(max_seq_len)
    ids: list[int] = tokenizer.encode(text).ids
    return ids


@given(text=odd_texts, max_seq_len=st.integers(3, 40))
@example(text=" " * 60 + "embedding", max_seq_len=4)  # a cut after 64 characters goes through the last word
@example(text="x" * 50 + "embedding", max_seq_len=4)
@example(text=" " * 2000 + "hello", max_seq_len=4)
@example(text="", max_seq_len=4)
def test_encode_equals_plain_tokenizers_with_truncation(tokenizer_path: Path, text: str, max_seq_len: int) -> None:
    encoded = TextEncoder(tokenizer_path, max_seq_len).encode([text])[0]
    assert encoded.input_ids.tolist() == plain_ids(text, max_seq_len)
    assert encoded.input_ids.dtype == np.int32
    assert encoded.truncated == (len(tiny_tokenizer().encode(text).ids) > max_seq_len)


@given(texts=st.lists(odd_texts, max_size=5))
def test_a_text_is_encoded_the_same_in_any_company(tokenizer_path: Path, texts: list[str]) -> None:
    encoder = TextEncoder(tokenizer_path, LIMITS.max_seq_len)
    together = [encoding.input_ids.tolist() for encoding in encoder.encode(texts)]
    assert together == [encoder.encode([text])[0].input_ids.tolist() for text in texts]


def test_a_book_is_cut_and_says_so(tokenizer_path: Path) -> None:
    encoded = TextEncoder(tokenizer_path, 16).encode(["hello world " * 500_000])[0]
    assert encoded.truncated
    assert encoded.input_ids.tolist() == [CLS, *[4, 5] * 7, SEP]


def test_special_tokens_are_kept_after_truncation(tokenizer_path: Path) -> None:
    ids = TextEncoder(tokenizer_path, 5).encode(["a b c d e f g"])[0].input_ids.tolist()
    assert (len(ids), ids[0], ids[-1]) == (5, CLS, SEP)


def test_a_text_that_just_fits_is_not_truncated(tokenizer_path: Path) -> None:
    fits, too_long = TextEncoder(tokenizer_path, 5).encode(["a b c", "a b c d"])
    assert (fits.num_tokens, fits.truncated) == (5, False)
    assert (too_long.num_tokens, too_long.truncated) == (5, True)


def test_without_auto_truncate_a_long_text_is_an_error_that_names_the_limit(tokenizer_path: Path) -> None:
    encoder = TextEncoder(tokenizer_path, 5, auto_truncate=False)
    assert [encoding.num_tokens for encoding in encoder.encode(["a b c"])] == [5]
    with pytest.raises(InvalidRequestError, match="more than the model's 5 tokens: shorten it, or start") as caught:
        encoder.encode(["a", "a b c d"])
    assert caught.value.param == "input"


def test_a_text_without_tokens_is_an_error_and_no_empty_sequence(tmp_path: Path) -> None:
    bare = Tokenizer(WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))  # no special tokens around a text
    bare.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidRequestError, match="no tokens"):
        TextEncoder(tmp_path / "tokenizer.json", 8).encode([""])


def test_token_types_are_left_out_where_all_are_zero(tokenizer_path: Path) -> None:
    assert TextEncoder(tokenizer_path, 8).encode(["a"])[0].token_type_ids is None


def test_a_damaged_tokenizer_file_is_an_artifact_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(ArtifactManifestError, match="Build it again"):
        TextEncoder(tmp_path / "tokenizer.json", 8)


def test_an_encoder_fitted_to_another_model_of_the_tokenizer_cuts_and_frames_as_that_one_does(
    tokenizer_path: Path,
) -> None:
    former = TextEncoder(tokenizer_path, LIMITS.max_seq_len)
    texts = ["the cats " * 20, "hello"]
    former.encode(texts)
    fitted = former.fitted(6, TextFrame("hello", "!"))
    fresh = TextEncoder(tokenizer_path, 6, frame=TextFrame("hello", "!"))
    for options in (AS_CONFIGURED, EncodingOptions(framed=True), EncodingOptions(with_spans=True)):
        assert [one.input_ids.tolist() for one in fitted.encode(texts, options)] == [
            one.input_ids.tolist() for one in fresh.encode(texts, options)
        ]
    assert [one.num_tokens for one in former.encode(texts)] == [LIMITS.max_seq_len, 3]  # as before


def added_tokens(content: dict[str, Any]) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    marks = ("[MARK]", "[MORE]")  # the library gives them the next free ids
    content["added_tokens"] = [{"id": 5000, "content": mark, "special": True, **flags} for mark in marks]


def a_word(content: dict[str, Any]) -> None:
    content["model"]["vocab"]["hello"] = 5000


def a_token_around_every_text(content: dict[str, Any]) -> None:
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[END]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"[END]": {"id": "[END]", "ids": [5000], "tokens": ["[END]"]}},
    }


@pytest.mark.parametrize("spoil", [added_tokens, a_word, a_token_around_every_text])
def test_ids_beyond_the_vocabulary_of_the_model_are_refused(
    spoil: Callable[[dict[str, Any]], None], tokenizer_path: Path, tmp_path: Path
) -> None:
    content = json.loads(tokenizer_path.read_bytes())
    size = 1 + max(content["model"]["vocab"].values())
    TextEncoder(tokenizer_path, 16, vocab_size=size)
    spoil(content)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ArtifactManifestError, match=rf"its ids go up to \d+, and the model has {size} tokens"):
        TextEncoder(path, 16, vocab_size=size)
    TextEncoder(path, 16, vocab_size=5001)


def test_two_words_of_one_id_are_not_refused(tokenizer_path: Path, tmp_path: Path) -> None:
    content = json.loads(tokenizer_path.read_bytes())
    vocabulary = content["model"]["vocab"]
    vocabulary["another"] = vocabulary["hello"]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    TextEncoder(path, 16, vocab_size=max(vocabulary.values()) + 1)
