"""TextEncoder gives what the tokenizers library gives; the pool survives whatever its callbacks and texts do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordPiece

from bei.core import Encoding
from bei.errors import ArtifactManifestError, BeiError, EngineError, InvalidRequestError
from bei.tokenization import CHUNK, TextEncoder, TokenizerPool
from tests.artifacts import LIMITS, tiny_tokenizer
from tests.engines import DEADLINE_S

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


class Answers:
    """Collects a pool's callbacks until as many texts are answered as were asked, or the request has failed."""

    def __init__(self, num_texts: int) -> None:
        self.encodings: dict[int, Encoding] = {}
        self.errors: list[BeiError] = []
        self._num_texts = num_texts
        self._done = threading.Event()

    def on_encoded(self, start: int, encodings: list[Encoding]) -> None:
        self.encodings.update(enumerate(encodings, start))
        if len(self.encodings) == self._num_texts:
            self._done.set()

    def on_failed(self, _: int, error: BeiError) -> None:
        self.errors.append(error)
        self._done.set()

    def wait(self) -> None:
        assert self._done.wait(DEADLINE_S), "the pool did not answer"


MakePool = Callable[[int], TokenizerPool]


@pytest.fixture
def make_pool(tokenizer_path: Path) -> Iterator[MakePool]:
    pools: list[TokenizerPool] = []

    def make(num_threads: int) -> TokenizerPool:
        encoder = TextEncoder(tokenizer_path, LIMITS.max_seq_len, auto_truncate=False)
        pools.append(TokenizerPool(encoder, num_threads))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def submit(pool: TokenizerPool, texts: Sequence[str]) -> Answers:
    answers = Answers(len(texts))
    pool.submit(texts, answers.on_encoded, answers.on_failed, lambda: False)
    return answers


@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_text_of_every_request_is_encoded_once_at_its_place(make_pool: MakePool, num_threads: int) -> None:
    pool = make_pool(num_threads)
    requests = [[f"{chr(97 + i)} {j % 10}" for j in range(size)] for i, size in enumerate([1, CHUNK, CHUNK + 1, 100])]
    all_answers = [submit(pool, texts) for texts in requests]
    for texts, answers in zip(requests, all_answers, strict=True):
        answers.wait()
        assert not answers.errors
        got = [answers.encodings[index].input_ids.tolist() for index in range(len(texts))]
        assert got == [plain_ids(text, LIMITS.max_seq_len) for text in texts]


def test_a_refused_text_fails_its_request_alone(make_pool: MakePool) -> None:
    pool = make_pool(1)
    bad, good = submit(pool, ["a " * 100]), submit(pool, ["a"])
    bad.wait()
    good.wait()
    assert isinstance(bad.errors[0], InvalidRequestError)
    assert good.encodings[0].num_tokens == 3


def test_the_threads_survive_exceptions_of_the_tokenizer(make_pool: MakePool) -> None:
    pool = make_pool(1)
    bad = submit(pool, ["lone \ud800 surrogate"])  # HTTP refuses it before; the library raises on it
    bad.wait()
    assert isinstance(bad.errors[0], EngineError)
    good = submit(pool, ["a"])
    good.wait()
    assert pool.is_alive


def test_the_threads_survive_exceptions_of_a_callback(make_pool: MakePool) -> None:
    pool = make_pool(1)
    failed = Answers(1)

    def broken(start: int, encodings: list[Encoding]) -> None:
        raise RuntimeError("a bug")

    pool.submit(["a"], broken, failed.on_failed, lambda: False)
    failed.wait()
    good = submit(pool, ["a"])
    good.wait()
    assert pool.is_alive


def test_a_cancelled_request_is_not_tokenized(make_pool: MakePool) -> None:
    pool = make_pool(1)
    cancelled = Answers(1)
    pool.submit(["a"], cancelled.on_encoded, cancelled.on_failed, lambda: True)
    submit(pool, ["b"]).wait()  # one thread, in order: the first has been passed over by now
    assert not cancelled.encodings
    assert not cancelled.errors


def test_close_finishes_what_is_queued(tokenizer_path: Path) -> None:
    pool = TokenizerPool(TextEncoder(tokenizer_path, LIMITS.max_seq_len), 2)
    all_answers = [submit(pool, ["a b"] * 50) for _ in range(20)]
    pool.close()
    assert all(len(answers.encodings) == 50 for answers in all_answers)
    assert not pool.is_alive
