"""Real processes that are killed in the middle of a step: every item is answered once, and nothing is left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from bei.engine.fake import fake_row
from bei.errors import EngineDiedError
from bei.multiprocess.remote.engine_pool import RemoteEngines
from bei.multiprocess.remote.recorded_engine import StepRecords
from tests.bei.multiprocess.chain import MODEL, Asker, Place, embeddings, nothing_left, places, serve_port, served_model
from tests.bei.multiprocess.killed import CRASHES, WAITS
from tests.bei.scheduler.front import wait_until
from tests.support.engines import DEADLINE_S, ids


class Child:
    """A process that accepts on ``place`` and is killed at the end. It serves ``other``, asks there, or has it as its
    records."""

    def __init__(self, role: str, place: Place, other: Place | StepRecords | None = None) -> None:
        fds = [place.listener.fileno()]
        command = [sys.executable, "-m", "tests.bei.multiprocess.killed", role, str(fds[0])]
        if isinstance(other, Place):
            command += [str(other.address)]
        elif other is not None:
            command += [str(other.fileno())]
            fds.append(other.fileno())
        self._process = subprocess.Popen(command, pass_fds=fds, stdout=subprocess.PIPE, text=True)

    def next_step(self) -> Any:
        """What it says next."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """How it ended."""
        code = self._process.wait(DEADLINE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()


class Children:
    """Those of a test."""

    def __init__(self) -> None:
        self._all: list[Child] = []

    def start(self, role: str, place: Place, other: Place | StepRecords | None = None) -> Child:
        self._all.append(Child(role, place, other))
        return self._all[-1]

    def close(self) -> None:
        for child in self._all:
            child.close()


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children()
    yield made
    made.close()


def expected(*sequences: list[int]) -> list[list[float]]:
    return [fake_row(ids(*values)).tolist() for values in sequences]


def test_engine_processes_that_are_killed_or_crash_cost_only_the_sequence_that_is_to_blame(children: Children) -> None:
    with places(2) as (engine_place, port_place):
        child = children.start("waiting", engine_place)
        engines = RemoteEngines([engine_place.address], MODEL, hang_timeout_s=0.0)
        server = serve_port(port_place, {MODEL: served_model(engines)})
        asker = Asker(port_place.address)
        # Killed in the middle of a step: each of its sequences is run alone in the next process.
        step = [WAITS, 1], [2], [3, 3]
        request = asker.submit(*step)
        began = child.next_step()
        assert isinstance(began, list)
        behind = asker.submit([7])
        child.kill()
        wait_until(lambda: asker.port.stats().is_stalled, "front ends hear of it")
        child = children.start("engine", engine_place)
        assert embeddings(asker.wait(request, 3)) == expected(*step)
        assert embeddings(asker.wait(behind)) == expected([7])
        said = [child.next_step() for _ in began]
        assert said == [[sequence] for sequence in began]
        # A sequence that crashes the engine ends two processes, not more.
        kept = asker.rows([1, 2, 3])
        request = asker.submit([CRASHES], [4], [5, 5])
        assert child.wait() == -signal.SIGSEGV
        assert children.start("engine", engine_place).wait() == -signal.SIGSEGV
        children.start("engine", engine_place)
        answers = asker.wait(request, 3)
        assert [type(answer) for answer in answers] == [EngineDiedError, dict, dict]
        assert embeddings(answers) == expected([4], [5, 5])
        assert embeddings(kept) == expected([1, 2, 3])
        assert asker.num_answers == 3 + 1 + 1 + 3
        asker.port.close()
        server.close()


def test_inputs_that_end_the_process_with_the_queue_cost_no_other_input_an_answer(children: Children) -> None:
    records = StepRecords.create()
    sequences = [[WAITS], *([CRASHES, value] for value in range(3)), *([value] for value in range(12))]
    num_ends = 0
    with places(1) as (place,):
        child = children.start("lone", place, records)
        asker = Asker(place.address)
        request = asker.submit(*sequences)

        def watch(child: Child) -> None:
            while (said := child.next_step()) is not None:
                if [WAITS] in said:
                    child.send(signal.SIGKILL)

        def watched() -> threading.Thread:
            """Until the child ends, or everything is answered."""
            watching = threading.Thread(target=watch, args=(child,))
            watching.start()
            wait_until(lambda: asker.num_answers == len(sequences) or not watching.is_alive(), "it ends, or is done")
            return watching

        while asker.num_answers < len(sequences):
            watching = watched()
            if asker.num_answers < len(sequences):
                num_ends += 1
                child.wait()
                child = children.start("lone", place, records)
        child.send(signal.SIGKILL)
        watching.join()
        child.wait()
        answers = asker.wait(request, len(sequences))
        assert [isinstance(answer, EngineDiedError) for answer in answers] == [True] * 4 + [False] * 12
        assert embeddings(answers) == expected(*sequences[4:])
        assert asker.num_answers == len(sequences)
        assert num_ends <= 2 * 4
        asker.port.close()
    records.close()


def test_a_batch_manager_that_is_killed_is_replaced_and_every_item_is_answered_once(children: Children) -> None:
    with places(2) as (engine_place, port_place):
        engine = children.start("waiting", engine_place)
        manager = children.start("manager", port_place, engine_place)
        asker = Asker(port_place.address)
        kept = asker.rows([1, 2])
        assert engine.next_step() == [[1, 2]]
        request = asker.submit([WAITS], *([value] for value in range(10)))
        while [WAITS] not in engine.next_step():
            pass
        manager.kill()
        engine.kill()  # with the step that waits
        wait_until(lambda: asker.port.stats().is_stalled, "it is away")
        meanwhile = asker.submit([20])
        children.start("engine", engine_place)
        children.start("manager", port_place, engine_place)
        sequences = [[WAITS], *([value] for value in range(10))]
        assert embeddings(asker.wait(request, 11)) == expected(*sequences)
        assert embeddings(asker.wait(meanwhile)) == expected([20])
        assert embeddings(kept) == expected([1, 2])
        assert asker.num_answers == 1 + 11 + 1
        asker.port.close()


def test_a_front_end_that_is_killed_leaves_nothing_in_the_others(children: Children) -> None:
    with places(3) as (engine_place, port_place, nowhere):
        engine = children.start("waiting", engine_place)
        engines = RemoteEngines([engine_place.address], MODEL, hang_timeout_s=0.0)
        server = serve_port(port_place, {MODEL: served_model(engines)})
        with nothing_left(num_descriptors=1):  # a connection for steps is kept
            front = children.start("front", nowhere, port_place)
            assert front.next_step() == 2  # rows that it holds; what waits comes to twelve sequences
            port = server._services[MODEL]
            wait_until(lambda: len(port._asked) == 1, "they are here")
            front.kill()
            wait_until(lambda: not port.clients, "its end is seen")
            wait_until(lambda: port._asked == {}, "what it asked is forgotten")
            wait_until(lambda: not any(s.num_sequences for s in port._port.stats().lanes.values()), "nothing waits")
            engine.kill()
            children.start("engine", engine_place)
            asker = Asker(port_place.address)
            assert embeddings(asker.rows([9])) == expected([9])
            asker.port.close()
        server.close()
