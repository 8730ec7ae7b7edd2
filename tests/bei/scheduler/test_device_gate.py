"""DeviceGate: turns on a device that several engines share.

Each turn is taken in a thread of its own. Nobody sleeps: a test waits until a thread has its turn, or stands in line.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bei.scheduler import device_gate as gates
from bei.scheduler.device_gate import DeviceGate, GateUser, Turn
from tests.support.engines import DEADLINE_S


class Line:
    """Threads at a gate, and who got a turn when."""

    def __init__(self) -> None:
        self.gate = DeviceGate()
        self.granted: queue.SimpleQueue[tuple[str, Turn]] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []

    def user(
        self,
        has_interactive: Callable[[], bool] = lambda: False,
        num_streams: int = 1,
        short_step_s: float = 0.01,
        *,
        uses_cores: bool = False,
    ) -> GateUser:
        """An engine."""
        return self.gate.join(num_streams, has_interactive, lambda: short_step_s, uses_cores=uses_cores)

    def ask(self, name: str, user: GateUser) -> None:
        """Stand in line; returns when the thread is in it, or has its turn already."""
        before = self._num_asked()
        thread = threading.Thread(target=lambda: self.granted.put((name, user.turn())), name=name, daemon=True)
        thread.start()
        self.threads.append(thread)
        wait_until(lambda: self._num_asked() > before or not thread.is_alive())

    def _num_asked(self) -> int:
        return len(self.gate._waiting)

    def next(self) -> tuple[str, Turn]:
        """Who gets a turn next."""
        return self.granted.get(timeout=DEADLINE_S)

    def order(self, seconds: float, count: int) -> list[str]:
        """Who gets the next ``count`` turns, one after the other, each of ``seconds``."""
        names = []
        for _ in range(count):
            name, turn = self.next()
            names.append(name)
            turn.end(seconds)
        return names


def wait_until(is_true: Callable[[], bool]) -> None:
    """Poll; fails after the deadline."""
    for _ in range(int(DEADLINE_S / 0.001)):
        if is_true():
            return
        threading.Event().wait(0.001)
    raise AssertionError("waited too long")


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    for thread in line.threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "a thread never got its turn"


@pytest.mark.parametrize("streams", [(1, 1), (1, 3), (2, 1)])
def test_as_many_steps_run_at_once_as_the_engine_with_the_most_streams_has(
    line: Line, streams: tuple[int, ...]
) -> None:
    users = [line.user(num_streams=number) for number in streams]
    for index in range(5):
        line.ask(str(index), users[index % 2])
    turns = [line.next()[1] for _ in range(max(streams))]
    assert line.granted.empty()
    for waiting in range(5 - max(streams), 0, -1):
        assert len(line.gate._waiting) == waiting
        turns.pop(0).end(0.0)
        turns.append(line.next()[1])
    for turn in turns:
        turn.end(0.0)


def test_an_engine_that_leaves_takes_its_turns_along_and_is_forgotten(line: Line) -> None:
    wide, narrow = line.user(num_streams=3), line.user()
    for index in range(3):
        line.ask(str(index), narrow)
    turns = [line.next()[1] for _ in range(3)]
    wide.leave()
    wide.leave()
    assert line.gate._users == [narrow]
    line.ask("later", narrow)
    for turn, num_free in zip(turns[:2], (-1, 0), strict=True):
        turn.end(0.0)
        assert (line.gate._free, len(line.gate._waiting)) == (num_free, 1)  # as many run as there may be
    turns[2].end(0.0)
    line.next()[1].end(0.0)


def test_a_turn_that_is_ended_twice_is_given_back_once(line: Line) -> None:
    user = line.user()
    line.ask("first", user)
    line.ask("second", user)
    line.ask("third", user)
    first = line.next()[1]
    first.end(2.0)
    first.end(2.0)
    second = line.next()[1]
    assert line.granted.empty()
    assert user.served_s == 2.0
    second.end(0.0)
    line.next()[1].end(0.0)


def test_interactive_work_goes_before_bulk_work_of_another_model(line: Line) -> None:
    bulk, interactive = line.user(), line.user(lambda: True)
    line.ask("runs", bulk)
    _, turn = line.next()
    line.ask("bulk", bulk)
    line.ask("interactive", interactive)
    turn.end(0.01)
    assert line.order(0.01, 2) == ["interactive", "bulk"]


def test_among_equals_the_one_that_had_the_least_time_goes_first(line: Line) -> None:
    users = [line.user() for _ in range(3)]
    for user, served_s in zip(users, (0.3, 0.1, 0.2), strict=True):
        user.served_s = served_s
    line.ask("runs", users[0])
    _, turn = line.next()
    for index, user in enumerate(users):
        line.ask(str(index), user)
    turn.end(0.0)
    assert line.order(0.0, 3) == ["1", "2", "0"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.01, 0.5), min_size=20, max_size=40), st.integers(1, 3))
def test_bulk_work_waits_at_most_a_bounded_time_behind_another_model_s_interactive_work(
    steps_s: list[float], num_others: int
) -> None:
    """Simulated: every user always waits, each step lasts as drawn."""
    gate = DeviceGate()
    bulk = gate.join(1, lambda: False, lambda: 0.01)
    others = [gate.join(1, lambda: True, lambda: 0.01) for _ in range(num_others)]
    gate._waiting = [gates._Place(user) for user in (bulk, *others)]
    waited_s, bound_s = 0.0, num_others * (gates._MOST_AHEAD_S + 2 * max(steps_s))
    for seconds in steps_s:
        user = gate._next(gate._waiting).user
        user.served_s += seconds
        waited_s = 0.0 if user is bulk else waited_s + seconds
        assert waited_s <= bound_s


def test_the_shortest_step_is_that_of_the_engines_which_expect_interactive_work(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert line.gate.shortest_step_s() is None
    waits = [False]
    images, texts = line.user(short_step_s=0.03), line.user(lambda: waits[0], short_step_s=0.01)
    assert line.gate.shortest_step_s() == 0.01  # none expects any: any may come
    images.note_interactive()
    assert line.gate.shortest_step_s() == 0.03
    waits[0] = True
    assert line.gate.shortest_step_s() == 0.01
    waits[0] = False
    monkeypatch.setattr(gates, "_EXPECTED_S", 0.0)
    assert not line.gate.expects_interactive()
    texts.leave()
    assert line.gate.shortest_step_s() == 0.03


def test_who_was_idle_does_not_get_the_time_back(line: Line) -> None:
    busy, idle = line.user(), line.user()
    busy.served_s = 1000.0
    line.ask("runs", busy)
    _, turn = line.next()
    line.ask("busy", busy)
    line.ask("idle", idle)
    assert idle.served_s == busy.served_s - gates._MOST_AHEAD_S
    turn.end(0.0)
    line.order(0.0, 2)


def test_a_new_model_does_not_start_ahead_of_those_that_have_run(line: Line) -> None:
    first = line.user()
    first.served_s = 50.0
    assert line.user().served_s == 50.0


def test_a_free_turn_is_taken_even_if_the_work_changes_while_they_decide(line: Line) -> None:
    """Whose interactive work comes and goes must not make each of two engines believe that it is the other's turn."""
    holder = line.user()
    line.ask("holder", holder)
    _, turn = line.next()
    interactive_to = {"a": "b", "b": "a"}  # to the thread of one, the other has the interactive work
    a = line.user(lambda: interactive_to.get(threading.current_thread().name) == "a")
    b = line.user(lambda: interactive_to.get(threading.current_thread().name) == "b")
    line.ask("a", a)
    line.ask("b", b)
    turn.end(0.0)
    assert sorted(line.order(0.0, 2)) == ["a", "b"]


def test_the_device_is_shared_by_those_that_run_or_wait_and_the_one_that_asks(line: Line) -> None:
    first, second = line.user(), line.user()

    def num_busy() -> list[int]:
        return [line.gate.num_busy(user) for user in (first, second)]

    assert num_busy() == [1, 1]
    line.ask("runs", first)
    _, turn = line.next()
    assert num_busy() == [1, 2]
    for name in ("waits", "waits too"):
        line.ask(name, second)
    assert num_busy() == [2, 2]
    turn.end(0.0)
    _, turn = line.next()
    assert num_busy() == [2, 1]
    turn.end(0.0)
    line.order(0.0, 1)
    assert num_busy() == [1, 1]


def test_interactive_work_is_expected_for_a_while_after_it_came(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "_EXPECTED_S", 3600.0)
    user = line.user()
    expected = [line.gate.expects_interactive()]
    user.note_interactive()
    expected.append(line.gate.expects_interactive())
    monkeypatch.setattr(gates, "_EXPECTED_S", 0.0)
    expected.append(line.gate.expects_interactive())
    assert expected == [False, True, False]


def test_interactive_work_is_expected_while_it_waits_for_any_engine_however_long(line: Line) -> None:
    waiting: list[str] = []
    line.user(lambda: bool(waiting))
    line.user()
    assert not line.gate.expects_interactive()
    waiting.append("a text")
    assert line.gate.expects_interactive()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interactive work stays expected, and neither steps nor decoding are waited for in vain."""
    for name in ("_EXPECTED_S", "_LONGEST_DECODING_S", "_LONGEST_STEP_S"):
        monkeypatch.setattr(gates, name, 3600.0)


def decode(line: Line) -> threading.Thread:
    """A thread that begins to decode; returns when it waits for a step, or decodes."""
    before = line.gate._num_decoding
    thread = threading.Thread(target=line.gate.begin_decoding, daemon=True)
    thread.start()
    line.threads.append(thread)
    wait_until(lambda: line.gate._num_decoding > before)
    return thread


@pytest.mark.usefixtures("patient")
def test_beside_interactive_work_images_are_decoded_between_steps_on_the_cores(line: Line) -> None:
    """Beside decoding, steps took up to twice the time that was predicted."""
    user = line.user(uses_cores=True)
    user.note_interactive()
    line.ask("first", user)
    _, turn = line.next()
    thread = decode(line)
    assert thread.is_alive()
    turn.end(0.1)
    thread.join(DEADLINE_S)
    assert line.gate.may_decode()
    line.ask("bulk", user)
    assert line.gate._waiting, "bulk work waits for decoding"
    line.gate.end_decoding()
    assert line.order(0.0, 1) == ["bulk"]


@pytest.mark.usefixtures("patient")
def test_interactive_work_does_not_wait_for_decoding(line: Line) -> None:
    waiting = [True]
    user = line.user(lambda: bool(waiting), uses_cores=True)
    line.ask("first", user)
    line.order(0.0, 1)
    decode(line)
    line.ask("interactive", user)
    _, turn = line.next()
    assert not line.gate.may_decode(), "decoding goes on when that step has ended"
    turn.end(0.0)
    line.gate.end_decoding()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("uses_cores", [True, False])
def test_nothing_waits_where_no_interactive_work_is_expected_or_no_cores_are_shared(
    uses_cores: bool, line: Line
) -> None:
    user = line.user(uses_cores=uses_cores)
    if not uses_cores:
        user.note_interactive()
    line.ask("first", user)
    _, turn = line.next()
    decode(line).join(DEADLINE_S)
    assert line.gate.may_decode()
    turn.end(0.1)
    line.ask("second", user)
    assert line.order(0.0, 1) == ["second"]
    line.gate.end_decoding()


@pytest.mark.parametrize("who", ["bulk", "decoding"])
def test_the_wait_for_decoding_and_for_steps_is_bounded(who: str, line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetched image may take seconds, and a step may hang."""
    monkeypatch.setattr(gates, "_EXPECTED_S", 3600.0)
    user = line.user(uses_cores=True)
    user.note_interactive()
    line.ask("first", user)
    _, turn = line.next()
    if who == "decoding":
        decode(line).join(DEADLINE_S)
        turn.end(0.1)
    else:
        turn.end(0.1)
        decode(line)
        line.ask("bulk", user)
        assert line.order(0.0, 1) == ["bulk"]
    line.gate.end_decoding()


def test_an_engine_that_leaves_takes_the_turns_along_that_only_it_could_fill(line: Line) -> None:
    narrow, wide = line.user(), line.user(num_streams=2)
    for name, user in (("narrow", narrow), ("wide", wide)):
        line.ask(name, user)
    turns = dict(line.next() for _ in range(2))
    line.gate.leave(wide)  # its step still runs
    line.ask("next", narrow)
    turns["narrow"].end(0.0)
    assert (line.gate._free, len(line.gate._waiting)) == (0, 1)  # a turn is out, and there is one in all
    turns["wide"].end(0.0)
    assert line.order(0.0, 1) == ["next"]
    assert line.gate.num_busy(narrow) == 1


def test_an_engine_with_more_streams_lets_those_in_who_wait(line: Line) -> None:
    narrow = line.user()
    for name in ("first", "second"):
        line.ask(name, narrow)
    _, turn = line.next()
    line.user(num_streams=2)
    assert line.next()[0] == "second"
    turn.end(0.0)
