"""Ports and engines that reach each other over sockets, all in this process."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from bei.core import Encoding, Engine, Row
from bei.errors import BeiError
from bei.metrics.registry import Metrics, ModelMetrics
from bei.multiprocess.remote.engine_pool import RemoteEngines
from bei.multiprocess.remote.engine_port_client import RemotePort
from bei.multiprocess.remote.engine_port_server import PortModel, PortServer
from bei.multiprocess.remote.engine_server import EngineServer
from bei.multiprocess.remote.recorded_engine import end_process
from bei.multiprocess.transport.messages import ModelInfo
from bei.port import Answer, EnginePort, Item, Lane, OnAnswers, Submission
from bei.scheduler.batch_manager import BatchManager
from bei.scheduler.cost_model import CostModel
from bei.scheduler.device_gate import DeviceGate
from bei.scheduler.scheduler import SchedulingRules
from tests.bei.scheduler.front import wait_until
from tests.support.engines import DEADLINE_S, ids

MODEL = "tiny@0"

ResultT = TypeVar("ResultT")


class Place:
    """A listening socket, and its address, in a folder of its own. It outlives the servers that accept on it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.address = Path(self._folder.name) / "socket"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(self.address))
        self.listener.listen(64)

    def close(self) -> None:
        self.listener.close()
        self._folder.cleanup()


@contextmanager
def places(count: int) -> Iterator[list[Place]]:
    made = [Place() for _ in range(count)]
    try:
        yield made
    finally:
        for place in made:
            place.close()


def own_metrics() -> ModelMetrics:
    return ModelMetrics(Metrics(), "tiny")


def model_info_of(engine: Engine, model: str = MODEL) -> ModelInfo:
    return ModelInfo.of(model, engine.info, CostModel.assumed(engine.info.limits))


def serve_engine(place: Place, engine: Engine, on_dead: Callable[[], None] | None = None) -> EngineServer:
    """As an engine process does."""
    server = EngineServer(place.listener, on_dead or end_process)
    server.add_engine(engine, model_info_of(engine))
    server.start()
    return server


def served_model(engine: Engine, gate: DeviceGate | None = None, **rules: Any) -> PortModel:
    """A batch manager in front of ``engine``, as a batch manager's process opens it."""
    costs = engine.costs if isinstance(engine, RemoteEngines) else CostModel.assumed(engine.info.limits)

    def open_port(on_answers: OnAnswers, metrics: ModelMetrics) -> EnginePort:
        return BatchManager(engine, on_answers, costs, metrics, rules=SchedulingRules(**rules), gate=gate)

    num_ready = engine.num_ready if isinstance(engine, RemoteEngines) else None
    return PortModel(open_port, model_info_of(engine), own_metrics(), costs, num_ready)


def serve_port(place: Place, models: Mapping[str, PortModel], *, has_culprits: bool = False) -> PortServer:
    """As a process with batch managers does."""
    server = PortServer(place.listener, has_culprits=has_culprits)
    for served in models.values():
        server.add_model(served)
    server.start()
    return server


def abandon(server: PortServer | EngineServer) -> None:
    """What is left of a process that was killed: its connections have ended, and nobody accepts."""
    server._stop_accepting()
    if isinstance(server, PortServer):
        server._stopped.set()
    server._end_connections(flush_s=0.0)


class Asker:
    """A front end's service: asks a port, and counts what it is answered."""

    def __init__(self, address: Path, model: str = MODEL, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._changed = threading.Condition()
        self._next_id = 0
        self.answers: dict[tuple[int, int], Answer] = {}
        self.num_answers = 0
        self.metrics = own_metrics()
        self.answering_threads: list[int] = []  # of each call of ``_on_answers``, its thread
        self.port = RemotePort(address, model, self._on_answers, self.metrics, loop or SHARED.loop)

    def _on_answers(self, answers: Sequence[Answer]) -> None:
        with self._changed:
            for answer in answers:
                assert (answer.request_id, answer.place) not in self.answers, "answered twice"
                self.answers[answer.request_id, answer.place] = answer
            self.num_answers += len(answers)
            self.answering_threads.append(threading.get_ident())
            self._changed.notify_all()

    def submit(
        self,
        *inputs: Sequence[int] | Encoding,
        outputs: Sequence[str] = ("embedding",),
        lane: Lane = "bulk",
        deadline_s: float | None = None,
    ) -> int:
        """One request; its number."""
        self._next_id += 1
        encodings = [value if isinstance(value, Encoding) else Encoding(ids(*value)) for value in inputs]
        items = [Item(place, encoding) for place, encoding in enumerate(encodings)]
        self.port.submit(Submission(self._next_id, lane, frozenset(outputs), items, deadline_s))
        return self._next_id

    def wait(self, request_id: int, count: int = 1) -> list[Row | BeiError]:
        """The answers to its first ``count`` items, taken out."""
        wanted = [(request_id, place) for place in range(count)]
        with self._changed:
            assert self._changed.wait_for(lambda: self.answers.keys() >= set(wanted), DEADLINE_S), "no answer"
            return [self.answers.pop(place).result for place in wanted]

    def rows(self, *inputs: Sequence[int] | Encoding, outputs: Sequence[str] = ("embedding",)) -> list[Row]:
        """Ask, and wait; fails where an answer is an error."""
        found = self.wait(self.submit(*inputs, outputs=outputs), len(inputs))
        rows = [row for row in found if not isinstance(row, BeiError)]
        assert len(rows) == len(inputs), found
        return rows


def embeddings(answers: Sequence[Row | BeiError]) -> list[list[float]]:
    """Those of the answers that are no errors."""
    return [row["embedding"].tolist() for row in answers if not isinstance(row, BeiError)]


class LoopThread:
    """An event loop that runs in a thread of its own, as a front end's does in its process."""

    def __init__(self, make: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop) -> None:
        self.loop = make()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.call(lambda: None)

    @property
    def ident(self) -> int | None:
        """Of the thread."""
        return self._thread.ident

    def call(self, work: Callable[[], ResultT]) -> ResultT:
        """``work()`` on the loop."""

        async def done() -> ResultT:
            return work()

        return asyncio.run_coroutine_threadsafe(done(), self.loop).result(DEADLINE_S)

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Within the block the loop does nothing."""
        begun, over = threading.Event(), threading.Event()

        def block() -> None:
            begun.set()
            assert over.wait(DEADLINE_S)

        self.loop.call_soon_threadsafe(block)
        assert begun.wait(DEADLINE_S)
        try:
            yield
        finally:
            over.set()

    def stop(self) -> None:
        """It runs no more; it is not closed."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    def close(self) -> None:
        """Stop it, do what was left to be done, close it."""
        self.stop()
        if not self.loop.is_closed():
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()


# For front ends of which a test does not say where they run.
SHARED = LoopThread()


@contextmanager
def nothing_left(num_descriptors: int = 0) -> Iterator[None]:
    """After the block its threads end and its descriptors are closed, but for ``num_descriptors``: soon, since threads
    end by themselves."""
    gc.collect()  # what earlier tests have left is not to be taken for what the block gives back
    descriptors, num_threads = _num_descriptors() + num_descriptors, threading.active_count()
    yield

    def is_so() -> bool:
        gc.collect()
        return threading.active_count() <= num_threads and _num_descriptors() <= descriptors

    wait_until(is_so, "threads end and descriptors are closed")


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
