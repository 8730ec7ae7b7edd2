"""The laws of ``next_batch`` and of ``Request``. The threads that use them are in test_batch_manager.py."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bei.batching import MAX_SLOTS_PER_TOKEN, QueueKey, Request, next_batch
from bei.core import Limits
from bei.errors import EngineError


@st.composite
def queues(draw: st.DrawFn) -> tuple[list[QueueKey], int, Limits]:
    """A sorted queue as the manager keeps it, the position of its oldest sequence, and limits it may have."""
    max_seq_len = draw(st.integers(1, 64))
    max_num_tokens = draw(st.integers(max_seq_len, 4 * max_seq_len))
    limits = Limits(max_num_tokens, draw(st.integers(1, 12)), max_seq_len)
    lengths = draw(st.lists(st.integers(1, max_seq_len), min_size=1, max_size=40))
    queued = sorted(QueueKey(length, arrival) for arrival, length in enumerate(lengths))
    return queued, bisect_left(queued, QueueKey(lengths[0], 0)), limits


def holds(batch: list[QueueKey], limits: Limits) -> bool:
    """Whether ``batch`` respects all three limits."""
    tokens, longest = sum(key.num_tokens for key in batch), max(key.num_tokens for key in batch)
    return (
        tokens <= limits.max_num_tokens
        and len(batch) <= limits.max_batch_size
        and len(batch) * longest <= MAX_SLOTS_PER_TOKEN * tokens
    )


@given(queues())
def test_next_batch_respects_token_limit_size_limit_and_padding_cap(case: tuple[list[QueueKey], int, Limits]) -> None:
    queued, oldest, limits = case
    assert holds(queued[next_batch(queued, oldest, limits)], limits)


@given(queues())
def test_next_batch_is_a_window_with_the_oldest_in_it_and_never_empty(case: tuple[list[QueueKey], int, Limits]) -> None:
    queued, oldest, limits = case
    window = next_batch(queued, oldest, limits)
    assert window.step is None
    assert 0 <= window.start <= oldest < window.stop <= len(queued)


@given(queues())
@example(([QueueKey(1, 0)], 0, Limits(1, 1, 1)))
def test_next_batch_is_maximal_no_neighbour_on_either_side_fits(case: tuple[list[QueueKey], int, Limits]) -> None:
    queued, oldest, limits = case
    window = next_batch(queued, oldest, limits)
    if window.start > 0:
        assert not holds(queued[window.start - 1 : window.stop], limits)
    if window.stop < len(queued):
        assert not holds(queued[window.start : window.stop + 1], limits)


@given(queues())
def test_cutting_again_and_again_takes_every_sequence_once_and_the_oldest_first(
    case: tuple[list[QueueKey], int, Limits],
) -> None:
    queued, _, limits = case
    waiting, taken = list(queued), list[QueueKey]()
    while waiting:
        oldest = min(range(len(waiting)), key=lambda position: waiting[position].arrival)
        window = next_batch(waiting, oldest, limits)
        assert waiting[oldest] in waiting[window]
        taken += waiting[window]
        del waiting[window]
    assert sorted(taken) == queued


@given(st.integers(1, 64), st.integers(1, 40), st.integers(1, 16))
def test_alike_sequences_fill_a_batch_to_its_limits(length: int, count: int, max_batch_size: int) -> None:
    limits = Limits(max_num_tokens=256, max_batch_size=max_batch_size, max_seq_len=64)
    window = next_batch([QueueKey(length, arrival) for arrival in range(count)], count // 2, limits)
    assert window.stop - window.start == min(count, max_batch_size, 256 // length)


def test_next_batch_grows_towards_the_nearer_length() -> None:
    queued = [QueueKey(5, 3), QueueKey(8, 0), QueueKey(9, 2), QueueKey(20, 1)]
    assert next_batch(queued, 1, Limits(1000, 2, 100)) == slice(1, 3)


def test_one_long_text_does_not_pad_many_short_ones() -> None:
    queued = [*(QueueKey(2, arrival) for arrival in range(1, 50)), QueueKey(512, 0)]
    assert next_batch(queued, 49, Limits(4096, 128, 512)) == slice(48, 50)


ROW = {"embedding": np.zeros(1, np.float32)}


def test_a_request_is_done_when_its_last_row_is_recorded() -> None:
    request = Request(2)
    assert not request.record(1, ROW)
    assert not request.is_done
    assert request.record(0, ROW)
    assert request.is_done


def test_a_request_is_answered_once_rows_after_an_error_do_not_count() -> None:
    request, error = Request(2), EngineError("first")
    assert request.fail(error)
    assert not request.fail(EngineError("second"))
    assert not request.record(0, ROW)
    assert not request.record(1, ROW)
    assert request.error is error


def test_a_complete_request_cannot_fail_any_more() -> None:
    request = Request(1)
    assert request.record(0, ROW)
    assert not request.fail(EngineError("late"))
    assert request.error is None


@pytest.mark.parametrize("late", ["record", "fail"])
def test_nobody_answers_a_cancelled_request(late: str) -> None:
    request = Request(1)
    request.cancel()
    assert request.is_done
    assert not (request.record(0, ROW) if late == "record" else request.fail(EngineError("late")))


def test_cancelling_an_answered_request_changes_nothing() -> None:
    request = Request(1)
    request.record(0, ROW)
    request.cancel()
    assert request.rows[0] is ROW
    assert request.error is None
