"""A front end and a batch manager on the two ends of a socket: answers, errors, cancelling, and ends of either."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Set
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bei.core import Encoding, Limits, Outputs, PackedBatch
from bei.engine.fake import FakeEngine, fake_row
from bei.errors import (
    BeiError,
    DeadlineExceededError,
    EngineDeadError,
    EngineDiedError,
    ModelNotFoundError,
    NonFiniteOutputError,
    ShuttingDownError,
)
from bei.multiprocess.remote import engine_port_client, engine_port_server
from bei.multiprocess.remote.engine_port_client import RemotePort, ask_model_info
from bei.multiprocess.remote.engine_port_server import PortModel, PortServer, ServedPort
from bei.multiprocess.transport.channel import Channel
from bei.multiprocess.transport.messages import OpenConnection, PortState, Submit, ToPortServer, ToRemotePort, Welcome
from bei.port import UNIT_EMBEDDING, EnginePort, Item, LaneStats, OnAnswers, PortStats, Submission
from bei.scheduler.cost_model import CostModel
from tests.bei.multiprocess.chain import (
    MODEL,
    Asker,
    LoopThread,
    Place,
    embeddings,
    model_info_of,
    nothing_left,
    own_metrics,
    places,
    serve_port,
    served_model,
)
from tests.bei.scheduler.front import LIMITS, wait_until
from tests.support.engines import DEADLINE_S, GatedEngine, NaNEngine, PickyEngine, TokenEngine, ids, token_rows


class Both:
    """A front end and its batch manager, over an engine in this process."""

    def __init__(self, place: Place, engine: Any, **rules: Any) -> None:
        self.engine = engine
        self.server = serve_port(place, {MODEL: served_model(engine, **rules)})
        self.asker = Asker(place.address)
        self.port = self.asker.port

    def close(self) -> None:
        if isinstance(self.engine, GatedEngine):
            self.engine.open(10)
        self.port.close()
        self.server.close()


@pytest.fixture
def both(place: Place) -> Iterator[Any]:
    made: list[Both] = []

    def make(engine: Any, **rules: Any) -> Both:
        made.append(Both(place, engine, **rules))
        return made[-1]

    yield make
    for one in made:
        one.close()


# Answers


def test_every_field_of_an_encoding_reaches_the_engine(both: Any) -> None:
    engine = FakeEngine(LIMITS)
    asker = both(engine).asker
    full = Encoding(ids(5, 6, 7), ids(0, 1, 1), num_keys=2, num_unpooled=1)
    (row,) = asker.rows(full)
    assert row["embedding"].tolist() == fake_row(full.input_ids, full.token_type_ids).tolist()
    (batch,) = engine.batches
    assert batch.token_type_ids is not None
    assert batch.key_lens is not None
    assert batch.unpooled_lens is not None
    assert (batch.token_type_ids.tolist(), batch.key_lens.tolist(), batch.unpooled_lens.tolist()) == (
        [0, 1, 1],
        [2],
        [1],
    )


def test_outputs_per_token_and_unit_embeddings_arrive(both: Any) -> None:
    asker = both(TokenEngine(LIMITS)).asker
    rows = asker.rows([1, 2, 3], [4], outputs=["token_ids", "embedding", UNIT_EMBEDDING])
    for row, values in zip(rows, ([1, 2, 3], [4]), strict=True):
        assert set(row) == {"token_ids", "embedding", UNIT_EMBEDDING}
        np.testing.assert_array_equal(row["token_ids"], token_rows(ids(*values)))
        assert row["embedding"].tolist() == fake_row(ids(*values)).tolist()
        assert np.linalg.norm(row[UNIT_EMBEDDING]) == pytest.approx(1.0)


def test_an_answer_has_the_times_of_its_step_and_one_from_the_cache_has_none(both: Any) -> None:
    asker = both(FakeEngine(LIMITS), cache_bytes=100_000).asker
    before_s = time.monotonic()
    first = asker.submit([1])
    wait_until(lambda: (first, 0) in asker.answers, "it is answered")
    step = asker.answers[first, 0].step
    assert step is not None
    assert before_s <= step.started_s <= step.ended_s <= time.monotonic()
    again = asker.submit([1])
    wait_until(lambda: (again, 0) in asker.answers, "it is answered")
    assert asker.answers[again, 0].step is None
    assert embeddings(asker.wait(again)) == [fake_row(ids(1)).tolist()]


def test_errors_arrive_as_they_are(both: Any) -> None:
    asker = both(NaNEngine(LIMITS, 9)).asker
    good, bad = asker.wait(asker.submit([1], [9]), 2)
    assert not isinstance(good, BeiError)
    assert type(bad) is NonFiniteOutputError
    (late,) = asker.wait(asker.submit([2], deadline_s=time.monotonic() - 1))
    assert type(late) is DeadlineExceededError


def test_twins_of_two_front_ends_are_computed_once(both: Any, place: Place) -> None:
    engine = GatedEngine(LIMITS)
    one = both(engine)
    other = Asker(place.address)
    one.asker.submit([7])
    engine.wait_entered()
    first, second = one.asker.submit([1, 2]), other.submit([1, 2])
    wait_until(lambda: not one.port._unseen and not other.port._unseen, "both are with the batch manager")
    assert sum(lane.num_sequences for lane in other.port.stats().lanes.values()) == 1
    engine.open(4)
    rows = [*one.asker.wait(first), *other.wait(second)]
    assert embeddings(rows) == [fake_row(ids(1, 2)).tolist()] * 2
    assert len(engine.batches) == 2
    other.port.close()


def test_what_is_answered_does_not_count_as_waiting_though_nobody_tells_the_state(
    both: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_port_server, "_TELL_EVERY_S", 3600.0)
    monkeypatch.setattr(ServedPort, "_tell_of_much", lambda _: None)
    one = both(FakeEngine(LIMITS))
    for value in range(1, 9):
        one.asker.rows([value])
    waiting = sum(lane.num_sequences for lane in one.port.stats().lanes.values())
    assert waiting <= 1  # an answer may be sent before its submission is noted as taken over


def test_front_ends_are_told_at_once_where_much_waits_or_much_is_done_and_not_of_what_comes_and_goes(
    both: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_port_server, "_TELL_EVERY_S", 3600.0)
    engine = GatedEngine(LIMITS)
    one = both(engine)
    monkeypatch.setattr(ServedPort, "_cost_s", lambda _, items: 0.6 * engine_port_server._WORTH_TELLING_S * len(items))
    (port,) = one.server._services.values()
    told: list[float] = []
    monkeypatch.setattr(port, "_on_change", lambda: told.append(port._untold_s))
    for value in range(1, 4):  # one at a time
        engine.let_one_through()
        one.asker.rows([value])
    assert not told
    requests = [one.asker.submit([value]) for value in (5, 6)]
    wait_until(lambda: bool(told), "two wait")
    assert told[0] == pytest.approx(1.2 * engine_port_server._WORTH_TELLING_S)
    engine.open(2)
    for request in requests:
        one.asker.wait(request)


class WideEngine(FakeEngine):
    """Rows of 4 MB."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.info = replace(self.info, outputs={"wide": 1 << 20})

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        starts = batch.input_ids[batch.cu_seqlens[:-1]].astype(np.float32)
        return {"wide": np.repeat(starts[:, None], 1 << 20, axis=1)}


def test_large_answers_arrive(both: Any) -> None:
    """Of 16 MB, the rows of a step."""
    one = both(WideEngine(LIMITS))
    for first in range(0, 24, 12):
        rows = one.asker.rows(*([value] for value in range(first, first + 12)), outputs=["wide"])
        assert [float(row["wide"][0]) for row in rows] == [float(value) for value in range(first, first + 12)]
        assert all((row["wide"] == row["wide"][0]).all() for row in rows)


# Cancelling and leaving


def test_what_is_cancelled_is_not_run_and_not_answered(both: Any) -> None:
    engine = GatedEngine(LIMITS)
    one = both(engine)
    running = one.asker.submit([1])
    engine.wait_entered()
    cancelled, kept = one.asker.submit([2], [3]), one.asker.submit([4])
    one.port.cancel(cancelled)
    one.port.cancel(running)
    wait_until(lambda: not one.port._unseen, "the other side has seen the rest")
    wait_until(lambda: one.port.stats().lanes["bulk"].num_sequences == 1, "it has left the queue")
    engine.open(5)
    one.asker.wait(kept)
    one.port.close()
    assert one.asker.num_answers == 1
    assert [batch.input_ids.tolist() for batch in engine.batches] == [[1], [4]]


def test_a_front_end_that_ends_takes_its_work_along(both: Any, place: Place) -> None:
    engine = GatedEngine(LIMITS)
    one = both(engine)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(place.address))
    dying: Channel[Any] = Channel(sock, ToRemotePort)
    dying.send(OpenConnection(MODEL))
    for number, first in enumerate((10, 20), 1):
        items = [Item(index, Encoding(ids(first + index))) for index in range(3)]
        submission = Submission(number, "bulk", frozenset({"embedding"}), items)
        dying.send(Submit(number, submission))
    engine.wait_entered()
    engine.let_one_through()
    engine.wait_entered()  # rows of the first step are with the front end, or on their way
    kept = one.asker.submit([1])
    dying.end()
    port = one.server._services[MODEL]
    wait_until(lambda: len(port.clients) == 1, "its end is seen")
    engine.open(5)
    one.asker.wait(kept)
    wait_until(lambda: port._asked == {}, "what it asked is forgotten")
    assert sum(batch.batch_size for batch in engine.batches) <= 3 + 3 + 1


def test_a_front_end_that_does_not_read_keeps_nobody_waiting(both: Any, place: Place) -> None:
    one = both(TokenEngine(Limits(4096, 64, 4096)))
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(place.address))
    stopped: Channel[Any] = Channel(sock, ToRemotePort)
    stopped.send(OpenConnection(MODEL))
    for number in range(1, 41):
        items = [Item(index, Encoding(ids(number, index))) for index in range(200)]
        submission = Submission(number, "bulk", frozenset({"token_ids"}), items)
        stopped.send(Submit(number, submission))
    wait_until(lambda: any(channel.is_behind for channel in one.server._channels), "nobody reads its answers")
    began_s = time.monotonic()
    for value in range(20):
        one.asker.rows([value], outputs=["token_ids"])
    assert time.monotonic() - began_s < DEADLINE_S / 2
    stopped.end()


def test_submitting_never_waits_for_a_process_that_does_not_read(place: Place) -> None:
    stopped: list[Channel[Any]] = []

    def accept() -> None:
        """Say hello, and stop."""
        channel: Channel[Any] = Channel(place.listener.accept()[0], ToPortServer)
        stopped.append(channel)
        channel.receive()
        channel.send(Welcome(model_info_of(FakeEngine(LIMITS)), PortState(STATS, 0.0, 0)))

    accepting = threading.Thread(target=accept)
    accepting.start()
    asker = Asker(place.address)
    began_s = time.monotonic()
    request = asker.submit(*([1] * 16 for _ in range(20_000)))
    assert time.monotonic() - began_s < DEADLINE_S / 2
    assert asker.port._channel is not None
    assert asker.port._channel.is_behind
    assert asker.port.stats().lanes["bulk"].num_tokens == 16 * 20_000
    asker.port.cancel(request)
    asker.port.close()
    accepting.join()
    stopped[0].end()


# Closing and being refused


def test_closing_a_port_answers_what_waits(both: Any) -> None:
    engine = GatedEngine(LIMITS)
    one = both(engine)
    request = one.asker.submit(*([value] for value in range(9)))
    engine.wait_entered()
    closing = threading.Thread(target=one.port.close)
    closing.start()
    wait_until(lambda: one.port._is_closing, "it closes")
    with pytest.raises(ShuttingDownError):
        one.asker.submit([1])
    assert closing.is_alive()
    engine.open(9)
    closing.join(DEADLINE_S)
    assert one.asker.num_answers == 9
    assert one.asker.wait(request, 9)
    assert not one.port.stats().is_alive


def test_rows_outlive_their_port(both: Any, place: Place) -> None:
    one = both(FakeEngine(LIMITS))
    (row,) = one.asker.rows([1, 2])
    one.port.close()
    other = Asker(place.address)
    for value in range(50):
        other.rows([value])
    assert row["embedding"].tolist() == fake_row(ids(1, 2)).tolist()
    wait_until(lambda: len(one.server._channels) == 1, "the former connection has ended")
    other.port.close()


def test_a_model_that_is_not_served_is_refused_by_name(place: Place) -> None:
    server = serve_port(place, {MODEL: served_model(FakeEngine(LIMITS))})
    with pytest.raises(ModelNotFoundError, match="other@1"):
        ask_model_info(place.address, "other@1")
    assert ask_model_info(place.address, MODEL).engine.limits == LIMITS
    server.close()


def test_hello_waits_for_a_process_to_come_and_not_for_ever(place: Place) -> None:
    with pytest.raises(EngineDiedError, match="tiny@0"):
        ask_model_info(place.address, MODEL, timeout_s=0.05)
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.append(ask_model_info(place.address, MODEL).model))
    asking.start()
    server = serve_port(place, {MODEL: served_model(FakeEngine(LIMITS))})
    asking.join(DEADLINE_S)
    assert found == [MODEL]
    server.close()


def test_models_come_and_go(both: Any, place: Place) -> None:
    one = both(FakeEngine(LIMITS))
    newer_engine = TokenEngine(LIMITS)
    served = replace(served_model(newer_engine), model_info=model_info_of(newer_engine, "tiny@1"))
    one.server.add_model(served)
    newer = Asker(place.address, "tiny@1")
    assert newer.rows([1], outputs=["token_ids"])
    one.server.retire("tiny@1")
    (refused,) = newer.wait(newer.submit([1]))
    assert type(refused) is ShuttingDownError
    with pytest.raises(ModelNotFoundError):
        ask_model_info(place.address, "tiny@1")
    assert one.asker.rows([1])
    newer.port.close()


def test_a_dead_engine_is_an_answer_and_the_end_of_the_port(both: Any) -> None:
    asker = both(PickyEngine(LIMITS, lambda values: 9 in values, EngineDeadError)).asker
    (dead,) = asker.wait(asker.submit([9]))
    assert type(dead) is EngineDeadError
    (after,) = asker.wait(asker.submit([1]))
    assert type(after) is EngineDeadError
    wait_until(lambda: not asker.port.stats().is_alive, "front ends hear of it")


def test_a_port_that_cannot_read_its_answers_fails_what_waits(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = both(FakeEngine(LIMITS))
    monkeypatch.setattr(engine_port_client, "_result", lambda *_, **__: 1 // 0)
    (error,) = one.asker.wait(one.asker.submit([1]))
    assert type(error) is EngineDeadError
    assert not one.port.stats().is_alive


# The state


class StatedPort:
    """A port with a state of the test's."""

    def __init__(self, stats: PortStats) -> None:
        self.now = stats

    def submit(self, submission: Submission) -> None: ...

    def cancel(self, request_id: int) -> None: ...

    def stats(self) -> PortStats:
        return self.now

    def close(self) -> None: ...


STATS = PortStats(
    lanes={"interactive": LaneStats(1, 10, 0.5), "bulk": LaneStats(0, 0, 0.0)},
    num_running=3,
    running_s=1000.0,
    slowdown=0.5,
    interactive_share=0.25,
    is_alive=True,
    is_stalled=False,
    is_busy=True,
    last_step_s=float("-inf"),
    step_cap_s=0.25,
    overtaking=3.0,
    device="a device",
    num_streams=2,
    unshared=None,
)


def test_the_state_and_the_corrections_of_costs_reach_the_front_end(place: Place, loop_thread: LoopThread) -> None:
    engine, costs, num_ready = FakeEngine(LIMITS), CostModel.assumed(LIMITS), [2]
    port = StatedPort(STATS)

    def open_port(on_answers: OnAnswers, metrics: object) -> EnginePort:
        return port

    served = PortModel(open_port, model_info_of(engine), own_metrics(), costs, lambda: num_ready[0])
    server: PortServer = serve_port(place, {MODEL: served})
    quiet = Quiet(server)
    own = CostModel.assumed(LIMITS)
    remote = RemotePort(place.address, MODEL, lambda answers: None, own_metrics(), loop_thread.loop, own)

    def seen() -> PortStats:
        return remote.stats()._replace(running_s=1000.0)

    assert seen() == STATS
    assert 990 < remote.stats().running_s <= 1000
    costs.follow(0.125)
    port.now = STATS._replace(is_busy=False, last_step_s=5.0)
    wait_until(lambda: seen() == port.now and own.speed == 0.125, "the change is told")
    num_ready[0] = 1
    wait_until(lambda: remote.stats().slowdown == 1.0, "a device is away")
    assert not remote.stats().is_stalled
    num_ready[0] = 0
    wait_until(lambda: remote.stats().is_stalled, "all devices are away")
    num_ready[0] = 2
    wait_until(lambda: not remote.stats().is_stalled, "they are back")
    # What was submitted and is not in the other side's state yet is added here; it is in the next.
    item = Item(0, Encoding(ids(1, 2, 3)))
    with quiet:
        remote.submit(Submission(1, "bulk", frozenset({"embedding"}), [item]))
        lanes = remote.stats().lanes
        assert lanes["interactive"] == STATS.lanes["interactive"]
        assert lanes["bulk"] == LaneStats(1, 3, own.sequence_seconds(3))
    wait_until(lambda: remote.stats().lanes == dict(STATS.lanes), "the other side has seen it")
    remote._in_flight.forget(1)
    remote.close()
    server.close()


class Quiet:
    """Within the block ``server``, which has one port, says nothing. To be made before a front end comes."""

    def __init__(self, server: PortServer) -> None:
        (port,) = server._services.values()
        self._lock, self._tell = threading.Lock(), port.tell
        port.tell = self._tell_when_it_may  # type: ignore[method-assign]

    def _tell_when_it_may(self, *, in_any_case: bool) -> None:
        with self._lock:
            self._tell(in_any_case=in_any_case)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_process_that_says_nothing_any_more_is_taken_to_hang(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = both(FakeEngine(LIMITS))
    assert not one.port.stats().is_stalled
    monkeypatch.setattr(engine_port_client, "_SILENT_S", 0.3)
    with Quiet(one.server):
        wait_until(lambda: one.port.stats().is_stalled, "it is silent")
    wait_until(lambda: not one.port.stats().is_stalled, "it speaks again")


def test_the_gauges_of_a_front_end_are_those_of_its_port_until_it_is_closed(both: Any) -> None:
    one = both(FakeEngine(LIMITS))
    assert [stats for stats, _ in one.asker.metrics._gauges.ports] == [one.port.stats]
    one.port.close()
    assert one.asker.metrics._gauges.ports == ()


def test_nothing_is_left_of_ports_that_were_closed() -> None:
    with nothing_left(), places(1) as (place,):
        one = Both(place, FakeEngine(LIMITS))
        one.asker.rows([1], [2])
        one.close()
        del one
