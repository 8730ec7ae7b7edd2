"""Processes of one server, all in this one: their questions go from one to the other by a call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from bei.metrics.aggregate import counts_of_ended
from bei.server.status.peers import ENDED, Replies


class Bus:
    """What the supervisor does: it carries questions, and of ``kept`` kinds knows what those had answered that have
    ended, or do not answer."""

    def __init__(self) -> None:
        self.peers: dict[str, BusPeers] = {}
        self.silent: set[str] = set()
        self.kept = frozenset({"metrics"})
        self._last: dict[tuple[str, str], bytes] = {}
        self._gone: list[bytes] = []

    def process(self, name: str) -> BusPeers:
        """A process that has just been started."""
        self.peers[name] = BusPeers(self, name)
        return self.peers[name]

    def dies(self, name: str) -> None:
        """The process has ended."""
        del self.peers[name]
        self._gone += [answer for (process, _), answer in self._last.items() if process == name]
        self._last = {key: answer for key, answer in self._last.items() if key[0] != name}

    async def asked(self, by: str, kind: str) -> Replies:
        """Answers are computed in a thread, as in a process of their own."""
        is_kept = kind in self.kept
        asked = {name: peer.offers[kind] for name, peer in self.peers.items() if kind in peer.offers}
        if not is_kept:
            asked.pop(by, None)
        with ThreadPoolExecutor() as pool:
            loop = asyncio.get_running_loop()
            answering = [name for name in asked if name not in self.silent]
            answers = await asyncio.gather(*(loop.run_in_executor(pool, asked[name]) for name in answering))
        found = {name: answer for name, answer in zip(answering, answers, strict=True) if answer is not None}
        silent = tuple(name for name in asked if name not in found)
        if is_kept:
            last = [self._last[name, kind] for name in silent if (name, kind) in self._last]
            self._last |= {(name, kind): answer for name, answer in found.items()}
            found[ENDED] = counts_of_ended([*self._gone, *last])
        return Replies(found, silent)


class BusPeers:
    """``bei.server.status.peers.Peers``."""

    def __init__(self, bus: Bus, name: str) -> None:
        self.name = name
        self.offers: dict[str, Callable[[], bytes | None]] = {}
        self._bus = bus

    def offer(self, kind: str, answer: Callable[[], bytes | None]) -> None:
        """Answer questions of this kind."""
        self.offers[kind] = answer

    async def ask(self, kind: str) -> Replies:
        """Ask all others, and of what is kept this one too."""
        return await self._bus.asked(self.name, kind)


class NoPeers:
    """Of a process whose questions nobody answers."""

    name = "front-0"

    def __init__(self, silent: Sequence[str] = ()) -> None:
        self._silent = tuple(silent)

    def offer(self, kind: str, answer: Callable[[], bytes | None]) -> None:
        """Nobody asks."""

    async def ask(self, kind: str) -> Replies:
        """Nobody has answered."""
        return Replies({}, self._silent)
