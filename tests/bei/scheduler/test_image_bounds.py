"""Images are held back from the tower while others' states have as many bytes as may be; each gets one answer."""

from __future__ import annotations

import numpy as np
import pytest

from bei.artifact.image_sequence import MOST_IMAGES
from bei.errors import EngineDeadError, ShuttingDownError
from bei.metrics.registry import Metrics, ModelMetrics
from bei.port import Answer, Lane, LaneStats
from bei.scheduler import image_bounds
from tests.bei.scheduler.scripted_ports import WIDTH, Ports, assumed_costs

NOTHING = LaneStats(0, 0, 0.0)
DECODER_S, TOWER_S = map(assumed_costs().sequence_seconds, (5, 2))


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> Ports:
    """With room for the states of two images."""
    monkeypatch.setattr(image_bounds, "MOST_STATES_BYTES", 2 * 2 * WIDTH * 4)
    return Ports()


def assert_waiting(ports: Ports, lane: Lane, held: int, without_decoder: int) -> None:
    found = ports.port.stats().lanes[lane]
    assert found[:2] == (held, 2 * held)
    assert found.cost_s == pytest.approx(held * TOWER_S + without_decoder * DECODER_S)


def test_states_in_flight_are_bounded_until_the_decoder_has_read_them(ports: Ports) -> None:
    ports.submit(0, 1, 2, 3, 4)
    assert ports.asked == [(1, 0), (1, 1)]
    assert_waiting(ports, "bulk", held=3, without_decoder=5)
    ports.compute([0, 1])
    assert ports.asked == [(1, 0), (1, 1)]  # the decoder has yet to read them
    assert_waiting(ports, "bulk", held=3, without_decoder=3)
    ports.read([1])
    assert ports.asked[2:] == [(1, 2)]
    ports.read([0])
    ports.compute([2, 3])
    ports.read([2, 3])
    ports.compute([4])
    ports.read([4])
    assert sorted(answer.place for answer in ports.answers) == [0, 1, 2, 3, 4]
    assert not ports.port._inputs
    assert ports.port.stats().lanes == {"interactive": NOTHING, "bulk": NOTHING}


def test_an_image_of_more_bytes_than_the_bound_goes_alone(ports: Ports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_bounds, "MOST_STATES_BYTES", 1)
    ports.submit(0, 1)
    assert ports.asked == [(1, 0)]
    ports.compute([0])
    ports.read([0])
    assert ports.asked == [(1, 0), (1, 1)]


def test_a_lane_does_not_hold_up_the_other(ports: Ports) -> None:
    ports.submit(0, 1, 2)
    ports.submit(0, 1, 2, request_id=2, lane="interactive")
    assert ports.asked == [(1, 0), (1, 1), (2, 0), (2, 1)]
    ports.compute([0], request_id=2)
    ports.read([0], request_id=2)
    assert ports.asked[4:] == [(2, 2)]


def test_flows_take_turns_and_each_in_the_order_in_which_it_came(ports: Ports) -> None:
    ports.submit(0, 1, 2, 3, 4, flow=1)
    ports.submit(0, 1, request_id=2, flow=2)
    for request_id, place in [(1, 0), (1, 1), (1, 2), (2, 0), (1, 3)]:
        ports.compute([place], request_id)
        ports.read([place], request_id)
    assert ports.asked == [(1, 0), (1, 1), (1, 2), (2, 0), (1, 3), (2, 1), (1, 4)]


def test_what_is_cancelled_is_not_asked_for_and_makes_room(ports: Ports) -> None:
    ports.submit(0, 1, 2)
    ports.submit(0, 1, request_id=2)
    ports.submit(0, request_id=3)
    ports.port.cancel(2)
    assert ports.asked == [(1, 0), (1, 1)]
    assert_waiting(ports, "bulk", held=2, without_decoder=4)
    ports.port.cancel(1)
    assert ports.asked == [(1, 0), (1, 1), (3, 0)]
    ports.compute([0, 1])  # too late
    assert not ports.texts.submitted
    ports.port.cancel(3)
    assert not ports.port._inputs
    assert ports.port.stats().lanes == {"interactive": NOTHING, "bulk": NOTHING}


def test_errors_of_the_tower_and_of_the_decoder_make_room(ports: Ports) -> None:
    ports.submit(0, 1, 2, 3)
    ports.tower.on_answers([Answer(1, 0, EngineDeadError("broken"))])
    ports.compute([1])
    ports.texts.on_answers([Answer(1, 1, EngineDeadError("broken"))])
    assert ports.asked == [(1, 0), (1, 1), (1, 2), (1, 3)]


def test_a_tower_that_has_died_is_the_answer_of_all_that_is_held_back(ports: Ports) -> None:
    def refuse() -> None:
        raise EngineDeadError("dead")

    ports.submit(0, 1, 2, 3, 4, 5)
    ports.tower.on_submit = refuse
    ports.tower.on_answers([Answer(1, place * MOST_IMAGES, EngineDeadError("dead")) for place in (0, 1)])
    assert sorted(answer.place for answer in ports.answers) == [0, 1, 2, 3, 4, 5]
    assert all(isinstance(answer.result, EngineDeadError) for answer in ports.answers)
    assert not ports.port._inputs
    ports.submit(0, request_id=2)
    assert isinstance(ports.answers[-1].result, EngineDeadError)
    assert not ports.port._inputs


def test_a_decoder_that_has_died_is_the_answer_of_all_that_is_held_back(ports: Ports) -> None:
    def refuse() -> None:
        raise ShuttingDownError("ends")

    ports.submit(0, 1, 2)
    ports.texts.on_submit = refuse
    ports.compute([0, 1])
    assert sorted(answer.place for answer in ports.answers) == [0, 1, 2]
    assert not ports.port._inputs


def test_what_the_decoder_knows_is_answered_without_the_tower_and_waits_for_nothing(ports: Ports) -> None:
    ports.submit(0, 1, 2)
    row = {"token_embedding": np.ones((5, 4), np.float32)}
    ports.texts.known = {bytes([7]): row}
    ports.submit(7, 8, request_id=2)
    assert ports.answers == [Answer(2, 7, row)]
    assert ports.asked == [(1, 0), (1, 1)]


def test_what_waited_is_asked_for_once_more_where_others_were_answered(ports: Ports) -> None:
    ports.submit(0, 1, 2, 3)
    assert ports.texts.num_probes == 4
    ports.compute([0])
    row = {"token_embedding": np.ones((5, 4), np.float32)}
    ports.texts.known = {bytes([2]): row}
    ports.read([0])
    assert ports.texts.num_probes == 6
    assert [answer.place for answer in ports.answers] == [2, 0]
    assert ports.asked == [(1, 0), (1, 1), (1, 3)]
    ports.tower.on_answers([Answer(1, MOST_IMAGES, EngineDeadError("broken"))])
    assert ports.texts.num_probes == 6


def test_closing_runs_what_is_held_back(ports: Ports) -> None:
    ports.submit(0, 1, 2, 3)
    ports.tower.on_close = lambda: ports.compute([0, 1, 2, 3])
    ports.texts.on_close = lambda: ports.read([0, 1, 2, 3])
    ports.port.close()
    assert sorted(answer.place for answer in ports.answers) == [0, 1, 2, 3]
    assert not any(isinstance(answer.result, Exception) for answer in ports.answers)


def test_metrics_count_what_is_held_back_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_bounds, "MOST_STATES_BYTES", 1)
    metrics = Metrics()
    ports = Ports(ModelMetrics(metrics, "pages"))
    ports.submit(0, 1, 2)
    held = 'bei_queue_tokens{lane="bulk",model="pages"} '
    assert held + "4.0" in metrics.render().decode()
    ports.port.close()
    assert held + "0.0" in metrics.render().decode()
