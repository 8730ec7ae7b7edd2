"""Loops, timeouts, retries and counts, on a simulated clock."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bei.cli.bench.arrivals import LoadPlan, WorkerShare
from bei.cli.bench.driver import BROKEN, NOT_HTTP, TIMED_OUT, UNANSWERED, UNREACHABLE, LoadDriver, RequestStream
from bei.cli.bench.recorder import LoadRecorder
from tests.bei.cli.bench.results import merged
from tests.bei.cli.bench.simulated import OK, Line, Outcomes, Server, SimulatedNetwork, response

START_S = 1000.0


def endless() -> tuple[bytes, int]:
    return b"GET", 1


def some(count: int) -> Callable[[], tuple[bytes, int] | None]:
    numbers = iter(range(count))
    return lambda: None if (number := next(numbers, None)) is None else (str(number).encode(), 1)


def driven(
    server: Server, *, seconds: float | None = None, network: SimulatedNetwork | None = None, **stream: Any
) -> Outcomes:
    """The outcomes of one stream against ``server``."""
    outcomes = Outcomes()
    LoadDriver(
        network or SimulatedNetwork(server),
        [RequestStream("one", **{"content": endless, **stream}, sink=outcomes)],
        seconds=seconds,
    ).run()
    return outcomes


def test_a_closed_loop_sends_each_request_once_and_never_more_at_once_than_its_concurrency() -> None:
    seen: list[bytes] = []

    def server(now_s: float, data: bytes) -> tuple[float, bytes]:
        seen.append(data)
        return 0.01 * (1 + len(seen) % 3), OK

    network = SimulatedNetwork(server)
    outcomes = driven(server, network=network, content=some(40), concurrency=3)
    assert sorted(seen, key=int) == [str(number).encode() for number in range(40)]
    assert outcomes.outcomes == [200] * 40
    assert (network.num_connects, network.most_open) == (3, 3)


def test_a_closed_loop_ends_with_its_time_and_hears_what_is_on_its_way() -> None:
    outcomes = driven(lambda now, data: (0.3, OK), seconds=1.0, concurrency=2)
    assert [round(done, 6) for *_, done, _ in outcomes.rows] == [0.3, 0.3, 0.6, 0.6, 0.9, 0.9, 1.2, 1.2]


def test_answers_taken_together_behind_the_end_are_followed_by_no_request_of_a_closed_loop() -> None:
    """As where the generator stands still over the end: it finds several answers at once."""
    network: SimulatedNetwork

    def server(now_s: float, data: bytes) -> tuple[float, bytes]:
        if START_S < now_s < START_S + 1.0:
            network.clock_s += 2.0
        return 0.3, OK

    network = SimulatedNetwork(server)
    outcomes = driven(server, network=network, seconds=1.0, concurrency=3)
    assert sorted(round(due, 6) for _, _, due, *_ in outcomes.rows) == [0.0, 0.0, 0.0, 0.3]


def test_an_open_loop_sends_when_requests_are_due_whatever_becomes_of_them() -> None:
    sent: list[float] = []

    def server(now_s: float, data: bytes) -> tuple[float, bytes]:
        sent.append(now_s - START_S)
        return 5.0, OK

    outcomes = driven(server, arrivals=iter([0.0, 0.1, 0.25, 0.25]))
    np.testing.assert_allclose(sent, [0.0, 0.1, 0.25, 0.25], atol=1e-6)
    assert outcomes.outcomes == [200] * 4


def recorded(server: Server, *, num_workers: int = 1, **plan: Any) -> LoadRecorder:
    """A load of ten seconds behind one of warm-up, as a worker records it."""
    load = LoadPlan(name="all", **plan)
    recorder = LoadRecorder(1.0, 11.0, 1.0, lambda body, count: None, is_open_loop=load.rate is not None)
    stream = RequestStream("all", endless, recorder)
    if load.rate is None:
        stream.concurrency = load.concurrency
    else:
        stream.arrivals = WorkerShare(0, num_workers).arrivals(load, 11.0, seed=0)
    LoadDriver(SimulatedNetwork(server), [stream], seconds=11.0).run()
    return recorder


def test_a_server_that_stalls_for_a_second_is_seen_by_an_open_loop_and_hardly_by_a_closed_one() -> None:
    """Coordinated omission: a closed loop asks nothing while it waits."""
    stall = (START_S + 5.0, START_S + 6.0)
    opened = merged(recorded(Line(0.004, stall), rate=100.0, arrivals="constant").take(99.0, is_last=True))
    assert opened.latency.count == 1000
    # A hundred requests were due in the stall; the queue behind it (100/s at 250/s) is gone after 0.67 s more.
    p50, p90, p99 = opened.latency.percentiles_ms([50, 90, 99])
    assert p50 == pytest.approx(4.0, rel=0.002)
    assert p90 is not None
    assert p99 is not None
    assert 300 < p90 < 500
    assert 900 < p99 < 1005
    closed = merged(recorded(Line(0.01, stall), concurrency=1).take(99.0, is_last=True))
    assert 890 <= closed.latency.count <= 901
    assert closed.latency.percentiles_ms([50, 99]) == pytest.approx([10.0, 10.0], rel=0.002)
    assert closed.latency.max_ms == pytest.approx(1010.0, rel=0.01)


def test_percentiles_are_those_of_the_delays_the_server_has() -> None:
    delays = np.random.default_rng(0).lognormal(-4, 1, 2000)
    numbers = itertools.count()
    recorder = recorded(
        lambda now, data: (float(delays[next(numbers) % len(delays)]), OK), rate=200.0, arrivals="constant"
    )
    total = merged(recorder.take(99.0, is_last=True))
    due = np.concatenate([delays, delays])[200:2200]  # those of the warm-up are not counted
    asked = [50, 75, 90, 95, 99, 99.9]
    expected = [sorted(due)[math.ceil(each * len(due) / 100 - 1e-6) - 1] * 1e3 for each in asked]
    assert total.latency.percentiles_ms(asked) == pytest.approx(expected, rel=0.0015)
    assert total.latency.mean_ms == pytest.approx(due.mean() * 1e3, rel=1e-3)
    assert total.latency.max_ms == pytest.approx(due.max() * 1e3, rel=1e-3)


def test_an_answer_that_takes_too_long_is_given_up_when_its_time_is_over_also_in_a_queue_for_connections() -> None:
    outcomes = driven(lambda now, data: (0.0, None), arrivals=iter([0.0, 0.1, 0.2]), timeout_s=2.0, max_connections=1)
    assert outcomes.outcomes == [TIMED_OUT] * 3
    assert [done for *_, done, _ in outcomes.rows] == pytest.approx([2.0, 2.1, 2.2], abs=1e-6)


def test_a_closed_loop_goes_on_behind_a_timeout_on_a_new_connection() -> None:
    answers = iter([None, *[OK] * 1000])
    network = SimulatedNetwork(lambda now, data: (0.1, next(answers)))
    outcomes = driven(network.server, network=network, seconds=1.5, concurrency=1, timeout_s=1.0)
    assert outcomes.outcomes == [TIMED_OUT, 200, 200, 200, 200, 200]
    assert network.num_connects == 2


@pytest.mark.parametrize(
    ("header", "waits_s"),
    [
        ({"retry_after": "1"}, 1.0),
        ({"retry_after": "1", "retry_after_ms": "150"}, 0.15),
        ({"retry_after": "Mon"}, None),
    ],
)
def test_who_obeys_comes_again_when_told_and_the_latency_counts_from_the_first_time(
    header: dict[str, str], waits_s: float | None
) -> None:
    answers = iter([response(429, b"{}", **header), OK])
    outcomes = driven(lambda now, data: (0.05, next(answers)), content=some(1), concurrency=1, retry="obey")
    if waits_s is None:
        assert outcomes.outcomes == [429]
    else:
        assert [(outcome, again) for _, outcome, _, _, again in outcomes.rows] == [(429, True), (200, False)]
        assert [due for _, _, due, _, _ in outcomes.rows] == [0.0, 0.0]
        assert outcomes.rows[-1][3] == pytest.approx(0.1 + waits_s)


def test_where_nobody_listens_every_request_fails_and_the_loops_go_on() -> None:
    network = SimulatedNetwork(Line(0.01), refuses=lambda: True)
    closed = driven(Line(0.01), network=network, seconds=0.1, concurrency=1)
    assert set(closed.outcomes) == {UNREACHABLE}
    assert 9 <= len(closed.outcomes) <= 11  # every ten milliseconds, not as fast as it can
    network = SimulatedNetwork(Line(0.01), refuses=lambda: True)
    arrivals = iter([0.0] * 5000)  # none of them in the call of another
    assert driven(Line(0.01), network=network, arrivals=arrivals, max_connections=1).outcomes == [UNREACHABLE] * 5000


def test_connections_that_break_are_failures_but_one_that_was_closed_while_idle_is_made_anew() -> None:
    behind = iter([(0.01, OK), None, (0.01, OK)])
    assert driven(lambda now, data: next(behind), content=some(2), concurrency=1).outcomes == [200, 200]
    at_once = iter([None, (0.01, OK)])
    assert driven(lambda now, data: next(at_once), content=some(2), concurrency=1).outcomes == [BROKEN, 200]


def test_what_is_not_http_is_a_failure() -> None:
    assert driven(lambda now, data: (0.01, b"220 mail ready\r\n"), content=some(1), concurrency=1).outcomes == [
        NOT_HTTP
    ]


def test_an_end_at_once_leaves_what_is_on_its_way_unanswered() -> None:
    outcomes, network = Outcomes(), SimulatedNetwork(lambda now, data: (10.0, OK))
    driver = LoadDriver(network, [RequestStream("one", endless, outcomes, concurrency=3)])
    driver.at(1.0, driver.abort)
    driver.run()
    assert outcomes.outcomes == [UNANSWERED] * 3
    assert network.clock_s == pytest.approx(START_S + 1.0)


def test_requests_that_are_due_at_the_end_are_sent_though_they_wait_for_a_connection() -> None:
    outcomes = driven(Line(0.1), seconds=1.0, arrivals=iter([0.9] * 5), max_connections=1)
    assert outcomes.outcomes == [200] * 5
    assert outcomes.rows[-1][3] == pytest.approx(1.4)


def test_streams_end_with_their_lead() -> None:
    lead, beside = Outcomes(), Outcomes()
    streams = [
        RequestStream("lead", some(10), lead, concurrency=1),
        RequestStream("beside", endless, beside, arrivals=(number / 100 for number in itertools.count())),
    ]
    LoadDriver(SimulatedNetwork(lambda now, data: (0.1, OK)), streams, lead="lead", abandons_waiting=True).run()
    assert lead.outcomes == [200] * 10
    assert len(beside.outcomes) == pytest.approx(100, abs=2)
    assert set(beside.outcomes) == {200}


def test_a_stream_is_a_closed_loop_or_an_open_one() -> None:
    both: dict[str, Any] = {"concurrency": 1, "arrivals": iter([0.0])}
    for wrong in ({}, both):
        with pytest.raises(ValueError, match="either"):
            driven(Line(0.01), **wrong)


OUTCOMES = st.sampled_from(["good", "slow", "never", "refused", "closed", "rubbish"])


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(OUTCOMES, min_size=1, max_size=20),
    gaps=st.lists(st.floats(0, 0.5), max_size=30),
    concurrency=st.integers(1, 4),
    is_open=st.booleans(),
    connections=st.integers(1, 3),
    retry=st.sampled_from(["never", "obey"]),
)
def test_every_request_ends_exactly_once_whatever_the_server_does(
    kinds: list[str], gaps: list[float], concurrency: int, is_open: bool, connections: int, retry: str
) -> None:
    turns = itertools.cycle(kinds)

    def server(now_s: float, data: bytes) -> tuple[float, bytes | None] | None:
        what = next(turns)
        if what == "closed":
            return None
        answers = {"refused": response(503, retry_after="0.05"), "rubbish": b"\x00\x00", "never": None}
        return (3.0 if what == "slow" else 0.01), answers.get(what, OK)

    arrivals = list(itertools.accumulate(gaps))
    loop: dict[str, Any] = {"concurrency": concurrency, "content": some(len(gaps))}
    if is_open:
        loop = {"arrivals": iter(arrivals), "max_connections": connections}
    outcomes = driven(server, timeout_s=2.0, retry=retry, **loop)
    ended = [index for index, *_, again in outcomes.rows if not again]
    assert sorted(ended) == list(range(len(gaps)))
    assert all(done - due <= 2.0 + 1e-6 for _, _, due, done, _ in outcomes.rows)
