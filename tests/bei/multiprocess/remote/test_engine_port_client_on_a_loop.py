"""A front end's port that its event loop reads: who calls whom, closing, a loop that is busy, processes that end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bei.core import Limits
from bei.engine.fake import FakeEngine, fake_row
from bei.errors import EngineDeadError
from bei.multiprocess.remote import engine_port_client
from bei.multiprocess.transport.channel import Channel
from bei.multiprocess.transport.messages import PortState, ToPortServer, Welcome
from tests.bei.multiprocess.chain import (
    MODEL,
    Asker,
    LoopThread,
    Place,
    abandon,
    embeddings,
    model_info_of,
    nothing_left,
    places,
    serve_port,
    served_model,
)
from tests.bei.multiprocess.remote.test_engine_port_client import STATS, Quiet
from tests.bei.scheduler.front import LIMITS, wait_until
from tests.support.engines import DEADLINE_S, GatedEngine, ids


class OnALoop:
    """A batch manager, and a front end on an event loop."""

    def __init__(self, place: Place, engine: Any, thread: LoopThread) -> None:
        self.engine = engine
        self.thread = thread
        self.server = serve_port(place, {MODEL: served_model(engine)})
        self.quiet = Quiet(self.server)
        self.asker = thread.call(lambda: Asker(place.address, loop=thread.loop))
        self.port = self.asker.port

    def close(self) -> None:
        if isinstance(self.engine, GatedEngine):
            self.engine.open(100)
        self.port.close()
        self.server.close()


MakeOnALoop = Callable[[Any], OnALoop]


@pytest.fixture
def on_a_loop(place: Place, loop_thread: LoopThread) -> Iterator[MakeOnALoop]:
    made: list[OnALoop] = []

    def make(engine: Any) -> OnALoop:
        made.append(OnALoop(place, engine, loop_thread))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_small_and_large_answers_come_on_the_loop(on_a_loop: MakeOnALoop) -> None:
    one = on_a_loop(FakeEngine(Limits(8192, 2048, 16)))
    values = [[value // 100, value % 100] for value in range(2048)]
    rows = [*one.asker.rows(*values), *one.asker.rows([1])]
    assert embeddings(rows) == [fake_row(ids(*value)).tolist() for value in [*values, [1]]]
    assert {*one.asker.answering_threads} == {one.thread.ident}


def test_a_request_may_be_submitted_and_cancelled_on_the_loop_itself(on_a_loop: MakeOnALoop) -> None:
    engine = GatedEngine(LIMITS)
    one = on_a_loop(engine)
    running = one.thread.call(lambda: one.asker.submit([1]))
    engine.wait_entered()
    cancelled = one.thread.call(lambda: one.asker.submit([2]))
    one.thread.call(lambda: one.port.cancel(cancelled))
    engine.open(2)
    assert embeddings(one.asker.wait(running)) == [fake_row(ids(1)).tolist()]
    one.port.close()
    assert one.asker.num_answers == 1


def test_closing_waits_for_answers(place: Place, loop_thread: LoopThread) -> None:
    engine = GatedEngine(LIMITS)
    one = OnALoop(place, engine, loop_thread)
    request = one.asker.submit(*([value] for value in range(9)))
    engine.wait_entered()
    closing = threading.Thread(target=one.port.close)
    with loop_thread.blocked():
        closing.start()
        engine.open(9)
    closing.join(DEADLINE_S)
    assert len(embeddings(one.asker.wait(request, 9))) == 9
    one.server.close()


def test_closing_does_not_wait_for_a_loop_that_is_closed(place: Place, loop_thread: LoopThread) -> None:
    engine = GatedEngine(LIMITS)
    one = OnALoop(place, engine, loop_thread)
    one.asker.submit([1])
    engine.wait_entered()
    loop_thread.close()
    one.port.close()
    engine.open(9)
    one.server.close()


def test_a_loop_that_was_busy_has_not_heard_and_takes_nobody_to_hang(
    on_a_loop: MakeOnALoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_port_client, "_SILENT_S", 0.3)
    one = on_a_loop(FakeEngine(LIMITS))
    first_thing: list[bool] = []
    with one.thread.blocked():
        wait_until(lambda: time.monotonic() - one.port._heard_s > 0.5, "the loop has not heard anything for long")
        assert not one.port.stats().is_stalled
        one.thread.loop.call_soon_threadsafe(lambda: first_thing.append(one.port.stats().is_stalled))
    wait_until(lambda: first_thing == [False], "the loop goes on")
    with one.quiet:
        since = time.monotonic()  # what was sent before comes first
        wait_until(lambda: time.monotonic() - max(since, one.port._heard_s) > 0.5, "the other side is silent")
        assert one.port.stats().is_stalled
        with one.thread.blocked():
            assert one.port.stats().is_stalled
    wait_until(lambda: not one.port.stats().is_stalled, "it speaks again")


def test_what_is_unanswered_goes_to_the_next_process_which_the_loop_reads_too(
    on_a_loop: MakeOnALoop, place: Place
) -> None:
    engine = GatedEngine(LIMITS)
    one = on_a_loop(engine)
    request = one.asker.submit([1], [2])
    engine.wait_entered()
    abandon(one.server)
    wait_until(lambda: one.port.stats().is_stalled, "it is away")
    meanwhile = one.asker.submit([3])
    one.server = serve_port(place, {MODEL: served_model(FakeEngine(LIMITS))})
    assert embeddings(one.asker.wait(request, 2)) == [fake_row(ids(value)).tolist() for value in (1, 2)]
    one.asker.wait(meanwhile)
    one.asker.rows([4])
    assert one.asker.num_answers == 4


def test_a_process_that_was_killed_before_it_read_everything_is_found_to_have_ended_behind_its_last_message(
    place: Place, loop_thread: LoopThread
) -> None:
    """Its socket has a message and an error at once, of which uvloop tells once: the front end waited for ever."""
    opened: list[Channel[Any]] = []

    def accept() -> None:
        opened.append(Channel(place.listener.accept()[0], ToPortServer))
        opened[0].receive()
        opened[0].send(Welcome(model_info_of(FakeEngine(LIMITS)), PortState(STATS, 0.0, 0)))

    accepting = threading.Thread(target=accept)
    accepting.start()
    asker = loop_thread.call(lambda: Asker(place.address, loop=loop_thread.loop))
    accepting.join()
    with loop_thread.blocked():
        request = asker.submit([1])
        wait_until(opened[0].has_arrived, "it has not read what was submitted")
        opened[0].send(PortState(STATS, 0.0, 0))
        opened[0].end()
    server = serve_port(place, {MODEL: served_model(FakeEngine(LIMITS))})
    assert embeddings(asker.wait(request)) == [fake_row(ids(1)).tolist()]
    asker.port.close()
    server.close()


def test_an_error_in_the_ports_own_code_ends_it_and_is_told(
    on_a_loop: MakeOnALoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = GatedEngine(LIMITS)
    one = on_a_loop(engine)
    request = one.asker.submit([1])
    engine.wait_entered()
    monkeypatch.setattr(one.port, "_settled", lambda *_: 1 // 0)
    engine.open(1)
    (error,) = one.asker.wait(request)
    assert type(error) is EngineDeadError
    assert not one.port.stats().is_alive


def test_nothing_is_left_of_ports_that_were_closed(loop_thread: LoopThread) -> None:
    with nothing_left(), places(1) as (place,):
        one = OnALoop(place, FakeEngine(LIMITS), loop_thread)
        one.asker.rows([1], [2])
        one.close()
        del one
