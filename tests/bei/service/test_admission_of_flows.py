"""Admission of several clients: each waits for its share of the queue, and holds its share of the tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.errors import OverloadedError
from bei.port import LANES, Lane
from bei.service.admission import NOTHING_ACCEPTED
from tests.bei.service.test_admission import (  # noqa: F401
    PER_TOKEN_S,
    Desk,
    _every_request_asks_what_waits,
    _time_stands_still,
    stats_of,
)


def test_a_flow_waits_for_its_own_work_and_for_as_much_of_each_other_flow() -> None:
    desk = Desk(max_queue_tokens=10_000)
    tickets = [desk.admit(*lengths, flow=flow) for flow, lengths in ((1, [50] * 4), (2, [30]), (3, [100]))]
    assert {ticket.lane for ticket in tickets} == {"bulk", "interactive"}
    desk.admit(60, lane="bulk", flow=2)
    desk.admit(300, lane="bulk", flow=3)

    def wait_s(flow: int, tokens: int) -> float:
        return desk.admission._wait_s("bulk", stats_of(), NOTHING_ACCEPTED, (flow, PER_TOKEN_S * tokens))

    before_s = PER_TOKEN_S * (30 + 100)  # interactive work goes first
    assert wait_s(4, 10) == pytest.approx(before_s + PER_TOKEN_S * (10 + 10 + 10))
    assert wait_s(2, 10) == pytest.approx(before_s + PER_TOKEN_S * (70 + 60 + 70))
    assert wait_s(3, 10) == pytest.approx(before_s + PER_TOKEN_S * (200 + 60 + 300))
    assert wait_s(3, 10) == pytest.approx(desk.wait_s("bulk"))


def test_what_waits_has_the_predicted_time_of_the_queue_whatever_it_was_guessed_to_take() -> None:
    desk = Desk()
    for flow in (1, 2):
        ticket = desk.admit(50, flow=flow)
        ticket.moved(ticket.admitted, 50)
    found = desk.admission._wait_s("interactive", stats_of(interactive_s=3.0), NOTHING_ACCEPTED, (3, 0.5))
    assert found == pytest.approx(0.5 + 0.5)


@pytest.mark.parametrize("lane", LANES)
def test_beside_a_flow_that_is_refused_another_one_is_accepted(lane: Lane) -> None:
    desk = Desk(max_queue_tokens=1_000_000, max_wait_s=3.0, bulk_share=0.0)
    longest_s = {"interactive": 3.0, "bulk": 30.0}[lane]
    while desk.wait_s(lane) <= longest_s:
        desk.admit(100, lane=lane, flow=1)
    with pytest.raises(OverloadedError, match=rf"the limit of the {lane} lane is {longest_s:g} s"):
        desk.admit(100, lane=lane, flow=1)
    for _ in range(10):
        desk.admit(10, lane=lane, flow=2)
    deadline = desk.admit(10, lane=lane, flow=3, in_s=1.0)
    with pytest.raises(OverloadedError, match="might not be kept"):
        desk.admit(10, lane=lane, flow=1, in_s=1.0)
    assert deadline.flow == 3


def test_a_flow_that_has_its_share_of_the_tokens_is_refused_while_others_may_have_theirs() -> None:
    desk = Desk(max_queue_tokens=120)
    desk.admit(60, flow=1)
    with pytest.raises(OverloadedError, match=r"About 60 tokens of this client are waiting and its share of .* is 60"):
        desk.admit(1, flow=1)
    second = desk.admit(40, flow=2)
    with pytest.raises(OverloadedError, match=r"About 40 tokens of this client are waiting and its share of .* is 40"):
        desk.admit(1, flow=2)
    with pytest.raises(OverloadedError, match="About 100 tokens are waiting and the limit is 120"):
        desk.admit(21, flow=3)
    desk.admit(20, flow=3)
    second.answered(40)
    second.close()
    desk.admit(40, flow=2)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 20)), min_size=1))
def test_a_flow_waits_for_no_more_than_everything_and_a_lone_one_for_that(asked: list[tuple[int, int]]) -> None:
    desk = Desk(max_queue_tokens=10_000)
    for flow, tokens in asked:
        desk.admit(tokens, lane="interactive", flow=flow)
    everything_s = desk.wait_s("interactive")
    for flow in range(1, 7):
        wait_s = desk.admission._wait_s("interactive", desk.stats, NOTHING_ACCEPTED, (flow, 0.1))
        assert wait_s <= everything_s + 1e-9
        if {flow} == {other for other, _ in asked}:
            assert wait_s == pytest.approx(everything_s)
