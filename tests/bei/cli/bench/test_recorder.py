"""Histograms add up, and every request is counted once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bei.cli.bench.driver import TIMED_OUT, LoadRequest
from bei.cli.bench.http1 import HttpResponse
from bei.cli.bench.recorder import WRONG_BODY, LatencyHistogram, LoadRecorder, PackedHistogram, curve
from tests.bei.cli.bench.results import merged

LATENCIES = st.lists(st.floats(1e-6, 4000), max_size=60)
ASKED = [50, 75, 90, 95, 99, 99.9, 100]


def histogram_of(latencies: list[float]) -> LatencyHistogram:
    histogram = LatencyHistogram()
    for latency in latencies:
        histogram.record(latency)
    return histogram


@settings(max_examples=15, deadline=None)
@given(parts=st.lists(LATENCIES, max_size=5))
def test_histograms_of_several_processes_add_up_to_that_of_all_requests(parts: list[list[float]]) -> None:
    total = LatencyHistogram()
    for part in parts:
        total.add(histogram_of(part).packed())
    whole = histogram_of([latency for part in parts for latency in part])
    assert total.percentiles_ms(ASKED) == whole.percentiles_ms(ASKED)
    assert total.packed().count == whole.count == sum(map(len, parts))
    assert (total.mean_ms, total.min_ms, total.max_ms) == (whole.mean_ms, whole.min_ms, whole.max_ms)


@settings(max_examples=40, deadline=None)
@given(latencies=st.lists(st.floats(1e-5, 3000), min_size=2, max_size=300))
def test_percentiles_are_within_a_thousandth(latencies: list[float]) -> None:
    found = histogram_of(latencies).percentiles_ms(ASKED)
    for each, value in zip(ASKED, found, strict=True):
        if 50 < each < 100 and len(latencies) * (100 - each) < 100 - 1e-6:
            assert value is None  # a percentile needs an answer beyond it
        else:
            # HdrHistogram counts to the nearest rank: one further where rounding is at its edge.
            ranks = {max(1, min(len(latencies), int(each * len(latencies) / 100 + half))) for half in (0.49, 0.5, 0.51)}
            near = [sorted(latencies)[rank - 1] * 1e3 for rank in ranks]
            assert value is not None
            assert any(value == pytest.approx(one, rel=2e-3, abs=2e-3) for one in near)


def test_an_empty_histogram_has_no_figures() -> None:
    empty = LatencyHistogram()
    assert empty.packed() == PackedHistogram()
    assert empty.percentiles_ms([50, 99]) == [None, None]
    assert (empty.mean_ms, empty.min_ms, empty.max_ms) == (None, None, None)
    assert curve(empty.packed()) == []


def test_the_curve_goes_as_far_as_the_answers_carry_it() -> None:
    points = curve(histogram_of(list(np.linspace(0.001, 1, 1000))).packed())
    assert points[0][0] == 0
    assert points[-1][0] == pytest.approx(99.9)
    assert [value for _, value in points] == sorted(value for _, value in points)


def answer_of(status: int, body: bytes = b"{}") -> HttpResponse:
    answer = HttpResponse(keeps_body=True)
    answer.feed(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    return answer


def request_of(due_s: float) -> LoadRequest:
    return LoadRequest(None, 0, b"", 2, due_s)  # type: ignore[arg-type]


def test_the_window_counts_answers_that_came_in_it_and_latencies_of_requests_that_were_due_in_it() -> None:
    recorder = LoadRecorder(
        1.0, 3.0, 1.0, lambda body, count: None if body == b"{}" else "it is empty", is_open_loop=True
    )
    for due_s, done_s in ((0.2, 0.9), (0.9, 1.1), (1.0, 1.5), (2.9, 3.4)):  # warm-up; half; in it; a late answer
        recorder.ended(request_of(due_s), done_s, 200, answer_of(200), None)
    recorder.ended(request_of(2.0), 3.5, 200, answer_of(200, b"[]"), None)
    recorder.ended(request_of(2.0), 3.6, 429, answer_of(429, b"full"), 0.5)
    recorder.ended(request_of(2.0), 3.7, 429, answer_of(429, b"full"), None)
    recorder.ended(request_of(2.5), 4.5, TIMED_OUT, None, None)
    recorder.ended(request_of(3.0), 4.6, 500, answer_of(500), None)  # was due behind the window
    intervals = recorder.take(9.0, is_last=True)
    assert [(one.index, one.answers, one.latency.count) for one in intervals] == [(0, 2, 1), (2, 1, 1), (3, 0, 0)]
    total = merged(intervals)
    assert (total.answers, total.inputs, total.retries, total.latency.count) == (3, 6, 1, 2)
    assert total.failures == {WRONG_BODY: 1, "429": 1, "timeout": 1}
    assert total.latency.max_ms == pytest.approx(500)
    assert recorder.errors == ["wrong body: it is empty", "429 full", "500 {}"]
    assert recorder.take(9.0, is_last=True) == []


def test_intervals_are_handed_over_once_when_they_are_over() -> None:
    recorder = LoadRecorder(0.0, 10.0, 1.0, lambda body, count: None, is_open_loop=True)
    recorder.ended(request_of(0.1), 0.2, 200, answer_of(200), None)
    assert recorder.take(0.9) == []
    assert [one.index for one in recorder.take(1.0)] == [0]
    recorder.ended(request_of(1.1), 5.2, 200, answer_of(200), None)
    assert recorder.take(5.5) == []
    assert [one.index for one in recorder.take(6.0)] == [5]
    assert recorder.take(10.0) == []
