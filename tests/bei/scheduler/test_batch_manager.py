"""BatchManager's threads: every request gets exactly one answer, and the engine gets its next batch in time.

Engines wait at gates that the tests open; what the manager does meanwhile is seen in its metrics. No test sleeps.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence, Set
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bei.core import Encoding, Outputs, PackedBatch, Row
from bei.engine.fake import FakeEngine, fake_row
from bei.errors import EngineDiedError, EngineError, NonFiniteOutputError, ShuttingDownError
from bei.port import Answer
from bei.scheduler.execution import rows_of_batch
from bei.scheduler.queue import Entry, Waiter
from tests.bei.scheduler.conftest import MakeFront
from tests.bei.scheduler.front import LIMITS, Front, Request, fake_rows, metric, rows_of, wait_until
from tests.support.engines import GatedEngine, NaNEngine, PickyEngine, TokenEngine, ids, sequences_of, token_rows

POISON = 99


@pytest.mark.parametrize(
    "failing", ["bei.scheduler.row_cache.RowCache.put", "bei.scheduler.cost_model.CostModel.observe"]
)
def test_what_follows_a_step_may_fail_and_answers_still_come(failing: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without the thread that delivers them nobody would get an answer any more."""
    front = Front(FakeEngine(LIMITS), cache_bytes=100_000)
    with mock.patch(failing, side_effect=ValueError("a bug")):
        for inputs in ([[1, 2], [3]], [[4]], [[5, 6, 7]]):
            request = front.submit(*inputs)
            front.wait(request)
            assert rows_of(request) == fake_rows(inputs)
        assert front.close() == 3
    assert "a bug" in caplog.text


def test_outputs_that_no_rows_can_be_made_of_cost_their_step_alone(caplog: pytest.LogCaptureFixture) -> None:
    front = Front(FakeEngine(LIMITS))
    with mock.patch("bei.scheduler.execution.rows_of_batch", side_effect=KeyError("a bug")):
        failed = front.submit([1], [2])
        front.wait(failed)
    assert type(failed.error) is EngineError
    assert failed.num_answers == 2
    assert metric(front, "bei_batch_failures_total", kind="exception") == 1
    answered = front.submit([3])
    front.wait(answered)
    assert rows_of(answered) == fake_rows([[3]])
    assert front.close() == 2
    assert "a bug" in caplog.text


def test_rows_are_made_in_the_delivery_thread_while_the_engine_runs_the_next_step(make_front: MakeFront) -> None:
    engine = GatedEngine(LIMITS)
    front, made = make_front(engine), rows_of_batch
    names: list[str] = []

    def noting(*outputs: Any) -> list[Row]:
        names.append(threading.current_thread().name)
        return made(*outputs)

    with mock.patch("bei.scheduler.execution.rows_of_batch", noting):
        first = front.submit([1], [2], [3], [4], [5])  # a full step, and one that waits behind it
        engine.wait_entered()
        engine.open()
        front.wait(first)
    assert names[0] == "bei-delivery"


@pytest.mark.parametrize("error", [RuntimeError, EngineDiedError])
def test_a_step_that_was_run_several_times_says_nothing_of_what_steps_cost(error: type[Exception]) -> None:
    """Not even where everything in it was answered."""

    class FailsOnce(FakeEngine):
        def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
            answers = super().run(batch)
            if len(self.batches) == 1:
                raise error("it was moved")
            return answers

    front = Front(FailsOnce(LIMITS))
    with mock.patch("bei.scheduler.cost_model.CostModel.observe") as observe:
        request = front.submit([1], [2])
        front.wait(request)
        assert rows_of(request) == fake_rows([[1], [2]])
        front.wait(front.submit([3]))
        front.close()
    assert observe.call_count == 1


_inputs = st.lists(st.integers(0, 5000), min_size=1, max_size=LIMITS.max_seq_len)
_requests = st.lists(st.lists(_inputs, min_size=1, max_size=9), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(requests=_requests, num_streams=st.integers(1, 3), num_threads=st.integers(1, 4))
def test_nothing_is_lost_or_doubled_and_every_row_names_its_input(
    requests: list[list[list[int]]], num_streams: int, num_threads: int
) -> None:
    engine = FakeEngine(LIMITS, num_streams)
    front = Front(engine)
    submitted: dict[int, Request] = {}

    def client(first: int) -> None:
        for index in range(first, len(requests), num_threads):
            submitted[index] = front.submit(*requests[index])

    threads = [threading.Thread(target=client, args=(first,)) for first in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    front.wait(*submitted.values())
    assert front.close() == len(requests)
    for index, request in submitted.items():
        assert rows_of(request) == fake_rows(requests[index])
    ran = [tuple(sequence) for batch in engine.batches for sequence in sequences_of(batch)]
    asked = [tuple(values) for inputs in requests for values in inputs]
    assert set(ran) == set(asked)
    assert len(ran) <= len(asked)
    for batch in engine.batches:
        assert batch.num_tokens <= LIMITS.max_num_tokens
        assert batch.batch_size <= LIMITS.max_batch_size


def test_a_request_larger_than_a_batch_is_split_and_put_together_in_order(make_front: MakeFront) -> None:
    inputs = [[i] * (1 + i % LIMITS.max_seq_len) for i in range(200)]
    front = make_front(FakeEngine(LIMITS))
    request = front.submit(*inputs)
    front.wait(request)
    assert rows_of(request) == fake_rows(inputs)


def test_requests_share_a_batch(make_front: MakeFront) -> None:
    engine = GatedEngine(LIMITS)
    front = make_front(engine)
    first = front.submit([1])
    engine.wait_entered()
    others = [front.submit([2]), front.submit([3]), front.submit([4])]
    engine.open()
    front.wait(first, *others)
    assert [sequences_of(batch) for batch in engine.batches] == [[[1]], [[2], [3], [4]]]


def test_an_idle_engine_starts_at_once_with_what_there_is(make_front: MakeFront) -> None:
    engine = GatedEngine(LIMITS)
    make_front(engine).submit([1])
    engine.wait_entered()
    assert sequences_of(engine.batches[0]) == [[1]]


def test_nothing_is_cut_before_the_engine_is_free(make_front: MakeFront) -> None:
    engine = GatedEngine(LIMITS)
    front = make_front(engine)
    requests = [front.submit([1])]
    engine.wait_entered()
    assert front.num_waiting() == 0
    for value in range(2, 7):  # more than a batch holds
        requests.append(front.submit([value]))
        assert front.num_waiting() == value - 1
    engine.open()
    front.wait(*requests)
    assert [sequences_of(batch) for batch in engine.batches] == [[[1]], [[2], [3], [4], [5]], [[6]]]


def test_who_comes_while_the_engine_runs_may_take_a_place_in_the_next_batch(make_front: MakeFront) -> None:
    engine = GatedEngine(LIMITS)
    front = make_front(engine)
    requests = [front.submit([1])]
    engine.wait_entered()
    requests.append(front.submit([2] * 8))
    requests.append(front.submit([3], [4], [5]))  # with the one before it a full batch
    requests.append(front.submit([6] * 8, [7] * 8, [8] * 8))  # better neighbours
    engine.open()
    front.wait(*requests)
    assert [len(sequence) for sequence in sequences_of(engine.batches[1])] == [8, 8, 8, 8]


def test_of_those_that_come_together_the_longest_is_run_first(make_front: MakeFront) -> None:
    engine = GatedEngine(LIMITS)
    front = make_front(engine)
    first = front.submit([1])
    engine.wait_entered()
    request = front.submit(*([i] * length for i, length in enumerate((6, 7, 12, 5, 6, 9))))
    engine.open()
    front.wait(first, request)
    lengths = [[len(sequence) for sequence in sequences_of(batch)] for batch in engine.batches[1:]]
    assert lengths == [[6, 7, 9, 12], [5, 6]]


def test_several_streams_run_batches_side_by_side(make_front: MakeFront) -> None:
    engine = GatedEngine(LIMITS, num_streams=3)
    front = make_front(engine)
    requests = []
    for value in range(3):
        requests.append(front.submit([value]))
        engine.wait_entered()  # the earlier ones are still at the gate
    waiting = front.submit([3])
    assert len(engine.batches) == 3
    engine.open(3)
    front.wait(*requests, waiting)
    assert rows_of(waiting) == fake_rows([[3]])


def test_identical_queued_inputs_are_computed_once_and_all_get_the_answer(make_front: MakeFront) -> None:
    engine = GatedEngine(LIMITS)
    front = make_front(engine)
    first = front.submit([1])
    engine.wait_entered()
    twins = [front.submit([7, 8], [9], [7, 8]), front.submit([7, 8])]
    engine.open()
    front.wait(first, *twins)
    assert rows_of(twins[0]) == fake_rows([[7, 8], [9], [7, 8]])
    assert rows_of(twins[1]) == fake_rows([[7, 8]])
    assert sum(sequences_of(batch).count([7, 8]) for batch in engine.batches) == 1


def test_inputs_that_differ_in_token_types_alone_are_not_identical(make_front: MakeFront) -> None:
    front = make_front(FakeEngine(LIMITS))
    request = front.submit_encodings([Encoding(ids(5, 6), ids(0, 0)), Encoding(ids(5, 6), ids(0, 1))])
    front.wait(request)
    assert rows_of(request) == [fake_row(ids(5, 6)).tolist(), fake_row(ids(5, 6), ids(0, 1)).tolist()]


def test_inputs_that_differ_in_their_keys_alone_are_not_identical() -> None:
    partial, whole = Encoding(ids(5, 6), num_keys=1), Encoding(ids(5, 6))
    waiter = Waiter(0, 0, float("inf"), frozenset())
    of = [Entry(encoding, waiter, "bulk", 0.0, 0.0).identity for encoding in (partial, whole, partial)]
    assert of[0] == of[2] != of[1]


def test_a_cancelled_sequence_never_reaches_the_engine(make_front: MakeFront) -> None:
    engine = GatedEngine(LIMITS)
    front = make_front(engine)
    first = front.submit([1])
    engine.wait_entered()
    cancelled = front.submit(*([POISON, i] for i in range(6)))
    kept = front.submit([2])
    front.cancel(cancelled)
    engine.open()
    front.wait(first, kept)
    assert front.close() == 2
    assert [sequences_of(batch) for batch in engine.batches] == [[[1]], [[2]]]


def test_cancelled_requests_do_not_fill_the_queue_while_the_engine_is_busy(make_front: MakeFront) -> None:
    engine = GatedEngine(LIMITS)
    front = make_front(engine)
    front.submit([1])
    engine.wait_entered()
    kept = front.submit([2], [3])
    for i in range(500):
        left = front.submit([10 + i], [2000 + i])
        front.cancel(left)
    assert front.num_waiting() == 2
    engine.open()
    front.wait(kept)
    assert rows_of(kept) == fake_rows([[2], [3]])


def test_a_cancelled_twin_does_not_take_the_answer_along(make_front: MakeFront) -> None:
    engine = GatedEngine(LIMITS)
    front = make_front(engine)
    first = front.submit([1])
    engine.wait_entered()
    cancelled, kept = front.submit([5]), front.submit([5])
    front.cancel(cancelled)
    engine.open()
    front.wait(first, kept)
    assert rows_of(kept) == fake_rows([[5]])


def is_poison(sequence: Sequence[int]) -> bool:
    return POISON in sequence


@given(position=st.integers(0, 7))
@settings(max_examples=8, deadline=None)
def test_a_poisonous_sequence_costs_only_its_own_request_the_answer(position: int) -> None:
    front = Front(PickyEngine(LIMITS, is_poison))
    requests = [front.submit([POISON if index == position else index, 1]) for index in range(8)]
    front.wait(*requests)
    assert front.close() == 8
    for index, request in enumerate(requests):
        if index == position:
            assert isinstance(request.error, EngineError)
            assert "poison" not in str(request.error)  # what the engine said is for the log
        else:
            assert rows_of(request) == fake_rows([[index, 1]])


def test_what_an_engine_says_of_its_failure_stays_in_the_log(make_front: MakeFront) -> None:
    front = make_front(PickyEngine(LIMITS, is_poison, EngineError))
    request = front.submit([POISON])
    front.wait(request)
    assert "poison" not in str(request.error)


def test_an_engine_that_always_fails_answers_everyone_with_an_error_and_is_asked_again(make_front: MakeFront) -> None:
    engine = PickyEngine(LIMITS, lambda _: True)
    front = make_front(engine)
    for _ in range(2):
        requests = [front.submit([i], [i + 1]) for i in range(20)]
        front.wait(*requests)
        assert all(isinstance(request.error, EngineError) for request in requests)
    assert front.manager.stats().is_alive


@pytest.mark.parametrize("poison_position", [0, 2, 3])
def test_a_row_of_nan_is_an_error_of_that_request_alone(make_front: MakeFront, poison_position: int) -> None:
    engine = NaNEngine(LIMITS, POISON)
    front = make_front(engine)
    requests = [front.submit([POISON if index == poison_position else index]) for index in range(4)]
    front.wait(*requests)
    assert isinstance(requests.pop(poison_position).error, NonFiniteOutputError)
    assert all(np.isfinite(rows_of(request)).all() for request in requests)


@pytest.mark.parametrize("poison_position", [0, 2, 3])
def test_nan_in_one_token_is_an_error_of_its_sequence_alone(make_front: MakeFront, poison_position: int) -> None:
    front = make_front(TokenEngine(LIMITS, poison_id=POISON))
    requests = [front.submit([index, POISON if index == poison_position else 1, *range(index)]) for index in range(4)]
    front.wait(*requests)
    for index, request in enumerate(requests):
        if index == poison_position:
            assert isinstance(request.error, NonFiniteOutputError)
        else:
            assert rows_of(request) == fake_rows([[index, 1, *range(index)]])


@settings(max_examples=30, deadline=None)
@given(requests=_requests)
def test_outputs_per_token_are_cut_to_the_tokens_of_each_sequence(requests: list[list[list[int]]]) -> None:
    front = Front(TokenEngine(LIMITS))
    submitted = [front.submit(*inputs) for inputs in requests]
    front.wait(*submitted)
    front.close()
    for inputs, request in zip(requests, submitted, strict=True):
        assert rows_of(request) == fake_rows(inputs)
        for values, row in zip(inputs, request.rows, strict=True):
            assert row is not None
            np.testing.assert_array_equal(row["token_ids"], token_rows(ids(*values)))


class ShortEngine(FakeEngine):
    """Loses the last row of every batch."""

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        return {"embedding": super().run(batch)["embedding"][:-1]}


def test_the_engine_s_thread_delivers_a_small_step_s_answers_unless_work_waits(make_front: MakeFront) -> None:
    engine = GatedEngine(LIMITS)
    front = make_front(engine)
    answered, names = front.manager._on_answers, []

    def on_answers(answers: Sequence[Answer]) -> None:
        names.append(threading.current_thread().name)
        answered(answers)

    front.manager._on_answers = on_answers
    first = front.submit([1])
    engine.wait_entered()
    second = front.submit([2])
    engine.let_one_through()
    front.wait(first)
    wait_until(lambda: metric(front, "bei_engine_seconds_count") == 1, "the first step is over and done with")
    wait_until(lambda: not front.manager._delivering.locked(), "its thread is free")
    engine.open()
    front.wait(second)
    assert names == ["bei-delivery", "bei-engine-0"]
    assert rows_of(second) == fake_rows([[2]])


def test_answers_are_handed_over_one_call_at_a_time(make_front: MakeFront) -> None:
    """By two streams that end their steps at once, and by the cache."""
    front = make_front(FakeEngine(LIMITS, num_streams=2), cache_bytes=100_000)
    answered, is_inside = front.manager._on_answers, threading.Lock()
    overlaps: list[int] = []

    def on_answers(answers: Sequence[Answer]) -> None:
        if not is_inside.acquire(blocking=False):
            overlaps.append(len(answers))
            return
        threading.Event().wait(0.0005)  # lets the other threads go on
        answered(answers)
        is_inside.release()

    front.manager._on_answers = on_answers
    requests = [front.submit([value % 7]) for value in range(200)]
    front.wait(*requests)
    assert not overlaps


def test_an_engine_that_loses_rows_is_an_error_and_no_hang(make_front: MakeFront) -> None:
    front = make_front(ShortEngine(LIMITS))
    request = front.submit([1], [2])
    front.wait(request)
    assert isinstance(request.error, EngineError)
    assert front.manager.stats().is_alive


def test_close_answers_everything_that_was_accepted(make_front: MakeFront) -> None:
    engine = GatedEngine(LIMITS)
    front = make_front(engine)
    requests = [front.submit(*([i, j] for j in range(10))) for i in range(30)]
    engine.wait_entered()
    engine.open()
    assert front.close() == len(requests)
    assert [len(rows_of(request)) for request in requests] == [10] * 30


def test_after_close_nothing_is_accepted_and_no_thread_is_left() -> None:
    before = set(threading.enumerate())
    front = Front(FakeEngine(LIMITS))
    assert front.manager.stats().is_alive
    front.close()
    with pytest.raises(ShuttingDownError, match="another replica"):
        front.submit([1])
    assert set(threading.enumerate()) <= before
