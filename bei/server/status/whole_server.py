"""Health, metrics and statistics of a whole server: the process that gets the HTTP request answers for all processes.

It asks the others by ``bei.server.status.peers``, whose timeout limits the wait for a process that hangs; the answer
names the processes that did not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as LoopTimeoutError  # TimeoutError itself only from Python 3.11 on
from typing import TYPE_CHECKING

import msgspec

from bei.errors import EngineDeadError, NotReadyError
from bei.metrics.registry import Metrics
from bei.server.status import stats as minute
from bei.server.status.peers import ENDED, PATIENCE_S, Peers
from bei.utils.threads import off_loop

if TYPE_CHECKING:
    from bei.server.endpoint.models import Models

# Kinds of questions to the other processes.
METRICS = "metrics"  # counters and gauges; the supervisor keeps the counts of processes that have ended
STATS = "stats"  # statistics of the last minute
HEALTH = "health"  # names of the models with a dead thread

_names = msgspec.msgpack.Decoder(list[str])


class WholeServer:
    """The server that this process serves alone (``peers`` None), or together with ``peers``.

    With ``peers``, create it on the running event loop.
    """

    def __init__(self, models: Models, metrics: Metrics, peers: Peers | None = None) -> None:
        self._models = models
        self._metrics = metrics
        self._peers = peers
        if peers is not None:
            peers.offer(METRICS, metrics.snapshot)
            peers.offer(STATS, on_loop(lambda: minute.part(metrics, models.dead())))
            peers.offer(HEALTH, on_loop(lambda: msgspec.msgpack.encode(models.dead())))

    async def metrics(self) -> bytes:
        """The metrics of all processes, in Prometheus' text format."""
        if self._peers is None:
            return self._metrics.render()
        replies = await self._peers.ask(METRICS)
        answers = {**replies.answers}
        if self._peers.name not in (*answers, *replies.silent):
            answers[self._peers.name] = self._metrics.snapshot()
        processes = sorted(answers.keys() - {ENDED})
        return await off_loop(self._metrics.render_server, answers, processes, replies.silent)

    async def stats(self) -> minute.Stats:
        """Statistics of the last minute, of all processes."""
        if self._peers is None:
            return minute.describe(self._models, self._metrics)
        replies = await self._peers.ask(STATS)
        return minute.describe(
            self._models, self._metrics, [*self._of_others(replies.answers).values()], replies.silent
        )

    async def dead(self) -> list[str]:
        """Names of the models with a dead thread, in any process."""
        return [*{name: None for name in (*self._models.dead(), *await self._dead_elsewhere())}]

    async def check_alive(self) -> None:
        """Raise EngineDeadError if a thread of a model has died, in any process."""
        if await self.dead():
            raise EngineDeadError("A thread of a model has died: restart the server.")

    async def problems(self) -> dict[str, str]:
        """For each model that is not ready, the reason, by the model's name; empty: all are ready.

        This process sends each model its canary, through tokenizer and engine, and compares the answer with that at
        build time. Other processes share the engines and report only dead threads.
        """
        problems, dead = await asyncio.gather(self._models.problems(), self._dead_elsewhere())
        for model, process in dead.items():
            problems.setdefault(model, f"A thread of {model} has died in {process}, which will be replaced.")
        return problems

    async def check_ready(self) -> None:
        """Raise NotReadyError if there are ``problems``."""
        problems = await self.problems()
        if problems:
            raise NotReadyError(" ".join(problems.values()))

    async def _dead_elsewhere(self) -> dict[str, str]:
        """The models with a dead thread in another process: names of models to names of processes."""
        if self._peers is None:
            return {}
        replies = await self._peers.ask(HEALTH)
        of_others = self._of_others(replies.answers)
        return {model: process for process, answer in of_others.items() for model in _names.decode(answer)}

    def _of_others(self, answers: Mapping[str, bytes]) -> dict[str, bytes]:
        assert self._peers is not None
        return {process: answer for process, answer in answers.items() if process not in (self._peers.name, ENDED)}


def offer_steps(peers: Peers, metrics: Metrics) -> None:
    """Offer the metrics and statistics of the batch manager, which runs steps and answers no requests."""
    peers.offer(METRICS, metrics.snapshot)
    peers.offer(STATS, lambda: minute.part(metrics))


def on_loop(compute: Callable[[], bytes]) -> Callable[[], bytes | None]:
    """A function for other threads: it runs ``compute`` on the current event loop and returns the result; None once the
    loop is closed, as its process ends.

    It raises TimeoutError if the loop hangs.
    """
    loop = asyncio.get_running_loop()

    async def computed() -> bytes:
        return compute()

    def answer() -> bytes | None:
        asked = computed()
        try:
            return asyncio.run_coroutine_threadsafe(asked, loop).result(PATIENCE_S)
        except (RuntimeError, LoopTimeoutError):
            if not loop.is_closed():
                raise
            asked.close()
            return None

    return answer
