"""The pool answers every text once, at its place, and survives whatever its callbacks and texts do."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from bei.core import Encoding
from bei.errors import BeiError, EngineError, InvalidRequestError
from bei.image.source import ImageInput, ImagesInText
from bei.tokenizer.encoder import EncodingOptions, TextEncoder
from bei.tokenizer.pool import CHUNK, TokenizerPool, chunks_of, is_long
from tests.support.artifacts import LIMITS, tiny_tokenizer, token_ids
from tests.support.engines import DEADLINE_S


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tiny_tokenizer().save(str(path))
    return path


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
        assert got == [token_ids(text) for text in texts]


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


def test_a_request_that_is_cancelled_in_the_middle_of_a_long_text_is_left_there(make_pool: MakePool) -> None:
    pool = make_pool(1)
    text, pieces = "cat " * 50_000, 13
    asked = []

    def is_cancelled() -> bool:
        asked.append(1)
        return len(asked) > 3

    left, behind = Answers(1), Answers(1)
    options = EncodingOptions(whole=True)
    pool.submit([text], left.on_encoded, left.on_failed, is_cancelled, options, one_by_one=True)
    pool.submit(["a"], behind.on_encoded, behind.on_failed, lambda: False)
    behind.wait()
    assert not left.encodings
    assert not left.errors
    assert len(asked) == 4 < pieces


def test_an_urgent_text_does_not_wait_for_the_chunks_of_others(make_pool: MakePool) -> None:
    pool = make_pool(1)
    is_held, go_on = threading.Event(), threading.Event()

    def hold(start: int, encodings: list[Encoding]) -> None:
        is_held.set()
        assert go_on.wait(DEADLINE_S)

    pool.submit(["held"] * (3 * CHUNK), hold, lambda *_: None, lambda: False)
    assert is_held.wait(DEADLINE_S)
    behind, urgent = Answers(1), Answers(1)
    pool.submit(["a"], behind.on_encoded, behind.on_failed, lambda: False)
    pool.submit(["b"], urgent.on_encoded, urgent.on_failed, lambda: False, is_urgent=True)
    urgent.wait()
    assert not behind.encodings
    go_on.set()
    behind.wait()


class RecordedTurns:
    """Notes which threads have a turn."""

    def __init__(self) -> None:
        self.entered: list[int] = []
        self.inside: set[int] = set()
        self.left = threading.Event()

    def enter(self, is_cancelled: Callable[[], bool]) -> None:
        self.left.clear()
        self.entered.append(threading.get_ident())
        self.inside.add(threading.get_ident())

    def leave(self) -> None:
        self.inside.discard(threading.get_ident())
        self.left.set()


def test_chunks_that_are_not_urgent_take_turns_which_end_where_none_waits(tokenizer_path: Path) -> None:
    turns = RecordedTurns()
    pool = TokenizerPool(TextEncoder(tokenizer_path, LIMITS.max_seq_len), 1, turns=turns)
    urgent = Answers(1)
    pool.submit(["b"], urgent.on_encoded, urgent.on_failed, lambda: False, is_urgent=True)
    urgent.wait()
    assert not turns.entered
    inside: list[int] = []
    done = threading.Event()

    def note(start: int, encodings: list[Encoding]) -> None:
        inside.append(len(turns.inside))
        if start == 2 * CHUNK:
            done.set()

    pool.submit(["a"] * 3 * CHUNK, note, lambda *_: None, lambda: False)
    assert done.wait(DEADLINE_S)
    assert turns.left.wait(DEADLINE_S)
    assert (inside, len(turns.entered), turns.inside) == ([1, 1, 1], 3, set())
    submit(pool, ["a"])
    pool.close()
    assert not turns.inside, "a closed pool's thread would keep bulk work of other models waiting"


def test_close_finishes_what_is_queued(tokenizer_path: Path) -> None:
    pool = TokenizerPool(TextEncoder(tokenizer_path, LIMITS.max_seq_len), 2)
    all_answers = [submit(pool, ["a b"] * 50) for _ in range(20)]
    pool.close()
    assert all(len(answers.encodings) == 50 for answers in all_answers)
    assert not pool.is_alive


def test_images_of_one_input_are_as_long_as_those_of_many() -> None:
    """Eight inputs of 64 images each were urgent, and were decoded without waiting for room."""
    alone = [ImageInput(b"")] * 9
    within = ImagesInText(((("",),),) * 10, (*alone,))
    assert [is_long(inputs, EncodingOptions()) for inputs in (alone[:8], alone, [within])] == [False, True, True]
    assert [*chunks_of([within, within, alone[0]])] == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_chunks_that_are_not_urgent_leave_the_cores_to_others(make_pool: MakePool) -> None:
    """Beside a decoding thread, steps of an engine with a thread on every core took twice their time."""
    pool = make_pool(1)
    found: dict[bool, int] = {}
    for is_urgent in (True, False):
        done = threading.Event()

        def look(_: int, __: list[Encoding], is_urgent: bool = is_urgent, done: threading.Event = done) -> None:
            found[is_urgent] = os.getpriority(os.PRIO_PROCESS, 0)
            done.set()

        pool.submit(["hello"], look, lambda *_: None, lambda: False, is_urgent=is_urgent)
        assert done.wait(DEADLINE_S)
    assert found[False] > found[True] == os.getpriority(os.PRIO_PROCESS, 0)
