"""Health, metrics and statistics of a whole server: the process that is asked answers for all processes.

Processes ask each other over ``bei.server.status.peers``, whose timeout bounds the wait for one that hangs; the answer
names what is missing then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from bei.errors import NotReadyError
from bei.metrics.registry import Metrics
from bei.server.status import stats as minute
from bei.server.status.peers import ENDED, PATIENCE_S, Peers
from bei.utils.threads import off_loop

if TYPE_CHECKING:
    from bei.server.endpoint.models import Models

# Kinds of questions: counters and gauges, which the supervisor keeps (bei.metrics.aggregate.counts_of_ended); the last
# minute; models of which a thread has died.
METRICS = "metrics"
STATS = "stats"
HEALTH = "health"

_names = msgspec.msgpack.Decoder(list[str])


class WholeServer:
    """The server that this process is, or is a front end of. With ``peers``: made on the event loop."""

    def __init__(self, models: Models, metrics: Metrics, peers: Peers | None = None) -> None:
        self._models = models
        self._metrics = metrics
        self._peers = peers
        if peers is not None:
            peers.offer(METRICS, metrics.snapshot)
            peers.offer(STATS, on_loop(lambda: minute.part(metrics, models.dead())))
            peers.offer(HEALTH, on_loop(lambda: msgspec.msgpack.encode(models.dead())))

    async def metrics(self) -> bytes:
        """The exposition text."""
        if self._peers is None:
            return self._metrics.render()
        replies = await self._peers.ask(METRICS)
        answers = {**replies.answers}
        if self._peers.name not in (*answers, *replies.silent):
            answers[self._peers.name] = self._metrics.snapshot()
        processes = sorted(answers.keys() - {ENDED})
        return await off_loop(self._metrics.render_server, answers, processes, replies.silent)

    async def stats(self) -> minute.Stats:
        """The last minute."""
        if self._peers is None:
            return minute.describe(self._models, self._metrics)
        replies = await self._peers.ask(STATS)
        return minute.describe(
            self._models, self._metrics, [*self._of_others(replies.answers).values()], replies.silent
        )

    async def dead(self) -> list[str]:
        """Models of which a thread has died, in any process."""
        return [*{name: None for name in (*self._models.dead(), *await self._dead_elsewhere())}]

    async def problems(self) -> dict[str, str]:
        """What keeps models from answering as they did at build time, by their names. The whole path is tried in this
        process, which shares the engines with the others."""
        problems, dead = await asyncio.gather(self._models.problems(), self._dead_elsewhere())
        for model, process in dead.items():
            problems.setdefault(model, f"A thread of {model} has died in {process}, which will be replaced.")
        return problems

    async def check_ready(self) -> None:
        """Return if there are no ``problems``. Raises NotReadyError."""
        problems = await self.problems()
        if problems:
            raise NotReadyError(" ".join(problems.values()))

    async def _dead_elsewhere(self) -> dict[str, str]:
        """Models of which a thread has died in another process, and that process."""
        if self._peers is None:
            return {}
        replies = await self._peers.ask(HEALTH)
        of_others = self._of_others(replies.answers)
        return {model: process for process, answer in of_others.items() for model in _names.decode(answer)}

    def _of_others(self, answers: Mapping[str, bytes]) -> dict[str, bytes]:
        assert self._peers is not None
        return {process: answer for process, answer in answers.items() if process not in (self._peers.name, ENDED)}


def offer_steps(peers: Peers, metrics: Metrics) -> None:
    """What the batch manager has for the others: it runs the steps, and answers no requests."""
    peers.offer(METRICS, metrics.snapshot)
    peers.offer(STATS, lambda: minute.part(metrics))


def on_loop(compute: Callable[[], bytes]) -> Callable[[], bytes]:
    """``compute`` on the event loop that runs, for another thread. Raises TimeoutError where the loop hangs."""
    loop = asyncio.get_running_loop()

    async def computed() -> bytes:
        return compute()

    return lambda: asyncio.run_coroutine_threadsafe(computed(), loop).result(PATIENCE_S)
