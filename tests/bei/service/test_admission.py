"""Admission: what is accepted, what has to come back and when, and that everything is given back."""

from __future__ import annotations

import threading
from math import ceil, inf
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bei.errors import DeadlineExceededError, InvalidRequestError, OverloadedError, ShuttingDownError
from bei.port import LANES, Lane, LaneStats, PortStats
from bei.service.admission import Admission, AdmissionLimits, Demand, Ticket, estimated_length

PER_TOKEN_S = 0.01
NOW_S = 1000.0


@pytest.fixture(autouse=True)
def _every_request_asks_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bei.service.admission._QUIET", 0.0)  # these tests say what waits without accepting it


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bei.service.admission.time", SimpleNamespace(monotonic=lambda: NOW_S))


class LinearCosts:
    """Ten milliseconds a token."""

    def sequence_seconds(self, length: int) -> float:
        return PER_TOKEN_S * length


def stats_of(
    interactive_s: float = 0.0,
    bulk_s: float = 0.0,
    running_s: float = 0.0,
    slowdown: float = 1.0,
    overtaking: float = 1.0,
    interactive_share: float = 0.0,
    num_streams: int = 1,
) -> PortStats:
    costs = {"interactive": interactive_s, "bulk": bulk_s}
    return PortStats(
        lanes={lane: LaneStats(int(costs[lane] > 0), int(costs[lane] / PER_TOKEN_S), costs[lane]) for lane in LANES},
        num_running=0,
        running_s=running_s,
        slowdown=slowdown,
        interactive_share=interactive_share,
        is_alive=True,
        is_stalled=False,
        is_busy=False,
        last_step_s=-inf,
        step_cap_s=0.04,
        overtaking=overtaking,
        device="a CPU",
        num_streams=num_streams,
        unshared=None,
    )


class Desk:
    """An Admission whose queue is what the test says."""

    def __init__(self, max_queue_tokens: int = 1000, max_wait_s: float = inf, bulk_share: float = 0.2) -> None:
        self.stats = stats_of()
        self.num_idle = 0
        limits = AdmissionLimits(
            max_queue_tokens=max_queue_tokens,
            max_wait_s={"interactive": max_wait_s, "bulk": 10 * max_wait_s},
            interactive_inputs=4,
            interactive_tokens=100,
            bulk_share=bulk_share,
        )
        self.admission = Admission(limits, LinearCosts(), lambda: self.stats, self.on_idle)

    def on_idle(self) -> None:
        self.num_idle += 1

    def admit(self, *lengths: int, lane: Lane | None = None, in_s: float | None = None, flow: int = 0) -> Ticket:
        deadline_s = None if in_s is None else NOW_S + in_s
        return self.admission.admit(len(lengths), self.admission.demand(lengths), lane, deadline_s, flow)

    def wait_s(self, lane: Lane) -> float:
        return self.admission.wait_s(lane)


# Lanes


@pytest.mark.parametrize(
    ("lengths", "lane"),
    [([1], "interactive"), ([25] * 4, "interactive"), ([100], "interactive"), ([101], "bulk"), ([1] * 5, "bulk")],
)
def test_a_request_of_few_inputs_and_tokens_is_interactive_if_it_does_not_say(lengths: list[int], lane: Lane) -> None:
    assert Desk().admit(*lengths).lane == lane


@pytest.mark.parametrize("lane", LANES)
def test_a_request_that_names_its_lane_has_it(lane: Lane) -> None:
    assert Desk().admit(1, lane=lane).lane == lane
    assert Desk().admit(*[50] * 10, lane=lane).lane == lane


# Tokens


def test_a_request_with_more_tokens_than_may_ever_wait_is_refused_for_good() -> None:
    desk = Desk(max_queue_tokens=100)
    with pytest.raises(InvalidRequestError, match="about 101 tokens, the limit is 100: split it"):
        desk.admit(101)
    assert desk.admission.num_open == 0


def test_a_request_as_large_as_the_queue_is_accepted_alone_and_nothing_beside_it() -> None:
    desk = Desk(max_queue_tokens=100)
    with desk.admit(100), pytest.raises(OverloadedError, match="100 tokens are waiting and the limit is 100"):
        desk.admit(1)
    desk.admit(1)


def test_what_was_guessed_is_settled_when_it_is_tokenized() -> None:
    desk = Desk()
    ticket = desk.admit(10, 10)
    assert desk.wait_s("interactive") == pytest.approx(0.2)
    ticket.moved(desk.admission.demand([10]), 13)
    assert desk.admission.num_tokens == 23
    assert desk.wait_s("interactive") == pytest.approx(0.1)  # the other half is in the port's figures now
    ticket.answered(13)
    assert desk.admission.num_tokens == 10
    ticket.close()
    assert (desk.admission.num_tokens, desk.wait_s("interactive"), desk.num_idle) == (0, 0.0, 1)


def test_a_closed_ticket_counts_nothing_that_comes_late() -> None:
    """A tokenizer may finish a chunk of a request whose client has left; other requests are open meanwhile."""
    desk = Desk()
    other, ticket = desk.admit(5), desk.admit(10)
    counted: list[int] = []
    ticket.check_tokens = counted.append
    ticket.close()
    ticket.moved(desk.admission.demand([10]), 12)
    ticket.answered(3)
    ticket.count_tokens(12)
    assert not counted
    ticket.close()
    assert desk.admission.num_tokens == 5
    other.close()
    assert desk.num_idle == 1


def test_more_answers_than_tokens_give_nothing_back_twice() -> None:
    desk = Desk()
    other, ticket = desk.admit(5), desk.admit(10)
    ticket.moved(desk.admission.demand([10]), 10)
    ticket.answered(10)
    ticket.answered(10)
    assert desk.admission.num_tokens == 5
    other.close()


def test_the_server_s_own_work_is_never_refused_and_counts_as_open() -> None:
    desk = Desk(max_queue_tokens=10)
    with desk.admit(10), desk.admission.admit_anyway() as own:
        own.moved(Demand(0, 0.0), 4)
        assert desk.admission.num_open == 2
        assert desk.admission.num_tokens == 14
    assert desk.admission.num_tokens == 0


def test_threads_may_use_tickets_at_once() -> None:
    desk = Desk(max_queue_tokens=10**9)
    with desk.admit(1):

        def work() -> None:
            for _ in range(300):
                with desk.admit(3, 4) as ticket:
                    ticket.moved(desk.admission.demand([3]), 5)
                    ticket.answered(5)
                    ticket.moved(desk.admission.demand([4]), 1)

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert desk.admission.num_tokens == 1
        assert desk.wait_s("bulk") == pytest.approx(0.01)
    assert desk.num_idle == 1


# The predicted wait

_seconds = st.floats(0, 1000)
_shares = st.floats(0, 0.9)


@given(_seconds, _seconds, _seconds, st.floats(0.2, 4), _seconds, st.sampled_from(LANES), _shares)
def test_the_predicted_wait_grows_with_whatever_is_queued(
    interactive_s: float, bulk_s: float, running_s: float, slowdown: float, more_s: float, lane: Lane, share: float
) -> None:
    desk = Desk(bulk_share=share)
    desk.stats = stats_of(interactive_s, bulk_s, running_s, slowdown)
    wait_s = desk.wait_s(lane)
    assert wait_s >= running_s * slowdown
    for more in ((more_s, 0.0, 0.0), (0.0, more_s, 0.0), (0.0, 0.0, more_s)):
        desk.stats = stats_of(interactive_s + more[0], bulk_s + more[1], running_s + more[2], slowdown)
        assert desk.wait_s(lane) >= wait_s * (1 - 1e-9)


@given(_seconds, _seconds, _seconds, _shares)
def test_interactive_work_waits_for_its_lane_and_for_bulk_work_s_share_meanwhile(
    interactive_s: float, bulk_s: float, running_s: float, share: float
) -> None:
    desk = Desk(bulk_share=share)
    desk.stats = stats_of(interactive_s, bulk_s, running_s)
    assert desk.wait_s("bulk") == pytest.approx(running_s + interactive_s + bulk_s)
    slower = 1 / (1 - share) if bulk_s > 0 else 1.0
    assert desk.wait_s("interactive") == pytest.approx(running_s + interactive_s * slower)


@pytest.mark.parametrize(("interactive_share", "times"), [(0.0, 1.0), (0.5, 2.0), (0.7, 1 / 0.3), (0.95, 5.0)])
def test_bulk_work_is_predicted_to_wait_for_the_interactive_work_that_still_comes(
    interactive_share: float, times: float
) -> None:
    """It gets what interactive work leaves, and its share at least. Interactive work that waits counts once."""
    desk = Desk(bulk_share=0.2, max_wait_s=1.0)
    desk.stats = stats_of(interactive_s=2.0, bulk_s=10.0, running_s=1.0, interactive_share=interactive_share)
    assert desk.wait_s("bulk") == pytest.approx(3.0 + 10.0 * times)
    assert desk.wait_s("interactive") == pytest.approx(1.0 + 2.0 / 0.8)
    with pytest.raises(OverloadedError) as caught:
        desk.admit(1, lane="bulk")
    excess_s = 3.0 + 10.0 * times - 10.0
    assert excess_s * 0.999 <= caught.value.retry_after_s <= excess_s * 1.2001


def test_the_own_time_of_bulk_work_grows_with_the_interactive_work_that_still_comes() -> None:
    desk = Desk(bulk_share=0.2)
    desk.stats = stats_of(interactive_share=0.5)
    with pytest.raises(OverloadedError, match="might not be kept"):
        desk.admit(100, lane="bulk", in_s=2.0)
    desk.admit(100, lane="bulk", in_s=2.3)
    desk.admit(100, lane="interactive", in_s=1.2)


def test_without_a_share_of_its_own_bulk_work_is_not_predicted_to_wait_for_ever() -> None:
    desk = Desk(bulk_share=0.0)
    desk.stats = stats_of(bulk_s=1.0, interactive_share=1.0)
    assert desk.wait_s("bulk") == pytest.approx(20.0)


def test_what_is_not_tokenized_yet_is_waited_for_too() -> None:
    desk = Desk()
    desk.admit(*[10] * 10, lane="bulk")
    assert desk.wait_s("bulk") == pytest.approx(1.0)
    assert desk.wait_s("interactive") == 0.0


# Coming back later


def test_beyond_the_lane_s_longest_wait_a_request_without_a_deadline_is_refused() -> None:
    desk = Desk(max_wait_s=5.0)
    desk.stats = stats_of(interactive_s=6.0)
    with pytest.raises(
        OverloadedError, match=r"Work of 6\.0 s is waiting and the limit of the interactive lane is 5 s"
    ):
        desk.admit(1)
    assert desk.admit(1, lane="bulk").lane == "bulk"  # whose limit is 50 s
    desk.stats = stats_of(bulk_s=49.0)
    desk.admit(1)
    desk.stats = stats_of(bulk_s=51.0)
    with pytest.raises(OverloadedError, match="the bulk lane"):
        desk.admit(1, lane="bulk")


@given(st.floats(5.001, 1000), st.floats(0.5, 3))
def test_a_refused_client_comes_back_when_the_wait_is_short_enough(queued_s: float, slowdown: float) -> None:
    desk = Desk(max_wait_s=5.0)
    desk.stats = stats_of(interactive_s=queued_s, slowdown=slowdown)
    excess_s = queued_s * slowdown - 5.0
    if excess_s <= 0:
        desk.admit(1)
        return
    with pytest.raises(OverloadedError) as caught:
        desk.admit(1)
    assert max(0.1, excess_s) * 0.999 <= caught.value.retry_after_s <= max(0.1, excess_s) * 1.2001
    assert f"retry in {ceil(caught.value.retry_after_s)} s" in str(caught.value)
    desk.stats = stats_of(interactive_s=max(0.0, queued_s - caught.value.retry_after_s / slowdown), slowdown=slowdown)
    desk.admit(1)  # it obeyed, and nobody else came: it gets in


def test_a_full_queue_is_refused_for_as_long_as_what_is_too_much_takes() -> None:
    desk = Desk(max_queue_tokens=1000)
    ticket = desk.admit(*[100] * 9, lane="bulk")
    ticket.moved(desk.admission.demand([100] * 9), 900)
    desk.stats = stats_of(bulk_s=9.0)
    with pytest.raises(OverloadedError) as caught:
        desk.admit(*[100] * 4, lane="bulk")
    assert 3.0 * 0.999 <= caught.value.retry_after_s <= 3.0 * 1.2001  # a third of what waits must go


def test_those_who_were_refused_together_do_not_come_back_together() -> None:
    desk = Desk(max_wait_s=5.0)
    desk.stats = stats_of(interactive_s=100.0)
    found = set()
    for _ in range(20):
        with pytest.raises(OverloadedError) as caught:
            desk.admit(1)
        found.add(caught.value.retry_after_s)
    assert len(found) > 10


# Deadlines


def test_a_deadline_that_the_queue_does_not_allow_is_a_refusal_for_now() -> None:
    desk = Desk()
    desk.stats = stats_of(interactive_s=20.0)
    with pytest.raises(OverloadedError, match="deadline") as caught:
        desk.admit(1, in_s=10.0)
    # A tenth of the time is kept back.
    assert 11.0 * 0.98 <= caught.value.retry_after_s <= 11.1 * 1.2001
    desk.admit(1, in_s=100.0)


def test_a_deadline_is_kept_even_if_later_work_goes_first() -> None:
    desk = Desk()
    desk.stats = stats_of(interactive_s=20.0, overtaking=2.5)
    with pytest.raises(OverloadedError, match="might not be kept") as caught:
        desk.admit(1, in_s=50.0)
    # When 5 / 2.5 seconds of the work are done, the rest may take the 45 that are left.
    assert 2.0 * 0.98 <= caught.value.retry_after_s <= 2.1 * 1.2001
    desk.admit(1, in_s=60.0)


@pytest.mark.parametrize("in_s", [-5.0, 0.0, 0.5, 1.05])
def test_a_deadline_that_no_queue_would_allow_is_exceeded(in_s: float) -> None:
    """A tenth of the time is kept back: to come again would never help."""
    desk = Desk()
    with pytest.raises(DeadlineExceededError, match=r"predicted to take 1\.000 s"):
        desk.admit(100, in_s=in_s)
    assert desk.admission.num_open == 0
    desk.admit(100, in_s=1.2)


def test_a_deadline_that_other_models_do_not_allow_now_is_a_refusal_for_now() -> None:
    desk = Desk()
    desk.stats = stats_of(slowdown=2.0)
    with pytest.raises(OverloadedError, match="might not be kept"):
        desk.admit(100, in_s=1.5)
    desk.stats = stats_of()
    desk.admit(100, in_s=1.5)


def test_a_request_uses_no_more_streams_than_it_has_inputs() -> None:
    desk = Desk()
    desk.stats = stats_of(slowdown=0.25, num_streams=4)
    with pytest.raises(DeadlineExceededError, match=r"predicted to take 1\.000 s"):
        desk.admit(100, in_s=1.0)
    with pytest.raises(DeadlineExceededError, match=r"predicted to take 0\.500 s"):
        desk.admit(50, 50, in_s=0.5)
    desk.admit(50, 50, in_s=0.6).close()
    desk.admit(*[10] * 10, in_s=0.3).close()
    desk.stats = stats_of(interactive_s=1.0, slowdown=0.25, num_streams=4)
    with pytest.raises(OverloadedError, match=r"0\.250 s is waiting and the request is predicted to take 1\.000 s"):
        desk.admit(100, in_s=1.3)
    desk.admit(*[10] * 10, in_s=0.6)


def test_a_request_with_a_deadline_may_wait_as_long_as_that_allows() -> None:
    desk = Desk(max_wait_s=5.0)
    desk.stats = stats_of(interactive_s=50.0)
    ticket = desk.admit(1, in_s=100.0)
    assert ticket.deadline_s is not None


# Draining


def test_after_a_drain_has_begun_nothing_is_accepted_and_what_was_stays() -> None:
    desk = Desk()
    ticket = desk.admit(10)
    desk.admission.begin_drain()
    with pytest.raises(ShuttingDownError, match="another replica"):
        desk.admit(1)
    ticket.moved(desk.admission.demand([10]), 10)
    assert desk.num_idle == 0
    ticket.close()
    assert desk.num_idle == 1


# Guesses


@given(st.integers(0, 10**7), st.integers(1, 8192))
def test_a_guess_is_at_least_one_token_and_at_most_what_the_model_takes(num_chars: int, max_seq_len: int) -> None:
    length = estimated_length(num_chars, max_seq_len)
    assert 1 <= length <= max_seq_len
    assert length <= estimated_length(num_chars + 1, max_seq_len)


# Everything together


class Tickets(RuleBasedStateMachine):
    """Requests that come, are tokenized to more or fewer tokens than was guessed, answered, and leave at any time."""

    LIMIT = 100

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(max_queue_tokens=self.LIMIT)
        self.open: dict[Ticket, tuple[list[int], int]] = {}  # guesses to come, tokens queued
        self.closed: list[Ticket] = []

    @rule(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), lane=st.sampled_from([None, *LANES]))
    def admit(self, lengths: list[int], lane: Lane | None) -> None:
        held = self.desk.admission.num_tokens
        try:
            ticket = self.desk.admit(*lengths, lane=lane)
        except InvalidRequestError:
            assert sum(lengths) > self.LIMIT
        except OverloadedError:
            assert held
            assert 2 * (held + sum(lengths)) > self.LIMIT  # of one flow
        else:
            assert not held or held + sum(lengths) <= self.LIMIT
            self.open[ticket] = (lengths, 0)

    @precondition(lambda self: any(guesses for guesses, _ in self.open.values()))
    @rule(data=st.data(), num_tokens=st.integers(0, 60))
    def tokenize(self, data: st.DataObject, num_tokens: int) -> None:
        ticket = data.draw(st.sampled_from([ticket for ticket, (guesses, _) in self.open.items() if guesses]))
        guesses, queued = self.open[ticket]
        ticket.moved(self.desk.admission.demand(guesses[:1]), num_tokens)
        self.open[ticket] = (guesses[1:], queued + num_tokens)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), num_tokens=st.integers(0, 80))
    def answer(self, data: st.DataObject, num_tokens: int) -> None:
        ticket = data.draw(st.sampled_from(list(self.open)))
        guesses, queued = self.open[ticket]
        ticket.answered(num_tokens)
        self.open[ticket] = (guesses, max(0, queued - num_tokens))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(list(self.open)))
        ticket.close()
        del self.open[ticket]
        self.closed.append(ticket)

    @precondition(lambda self: self.closed)
    @rule(data=st.data())
    def come_late(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.closed))
        ticket.moved(self.desk.admission.demand([5]), 7)
        ticket.answered(2)
        ticket.close()

    @invariant()
    def exactly_what_is_open_is_held(self) -> None:
        assert self.desk.admission.num_open == len(self.open)
        assert self.desk.admission.num_tokens == sum(sum(guesses) + queued for guesses, queued in self.open.values())
        expected_s = PER_TOKEN_S * sum(sum(guesses) for guesses, _ in self.open.values())
        assert self.desk.wait_s("bulk") == pytest.approx(expected_s, abs=1e-9)
        assert self.open or self.desk.wait_s("bulk") == 0.0


TestTickets = Tickets.TestCase
TestTickets.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_while_little_is_accepted_nobody_asks_the_engine_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bei.service.admission._QUIET", 0.1)
    asked = []

    def stats() -> PortStats:
        asked.append(1)
        return stats_of()

    limits = AdmissionLimits(10_000, {"interactive": 5.0, "bulk": 5.0}, 8, 1024, 0.2)
    admission = Admission(limits, LinearCosts(), stats, lambda: None)
    tickets = [admission.admit(1, Demand(60, 0.6), None, None)]
    assert not asked
    tickets.append(admission.admit(1, Demand(60, 0.6), None, None))
    assert len(asked) == 1
    for ticket in tickets:
        ticket.close()
    admission.admit(1, Demand(60, 0.6), None, None).close()
    assert len(asked) == 1
    admission.admit(1, Demand(1, 0.0), None, 1e12).close()  # a deadline is always looked at
    assert len(asked) == 2
