"""A simulated network and clock for the driver, without sockets or waiting."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from functools import partial

from bei.cli.bench.driver import LoadRequest
from bei.cli.bench.http1 import HttpResponse
from bei.cli.bench.sockets import ConnectionHandler

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


def response(status: int, body: bytes = b"{}", **headers: str) -> bytes:
    """An answer's bytes."""
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} X\r\n{lines}content-length: {len(body)}\r\n\r\n".encode() + body


# A server's reaction to a request at a time: seconds until the answer, and the answer; an answer of None never comes.
# None: the connection is closed.
Server = Callable[[float, bytes], "tuple[float, bytes | None] | None"]


class SimulatedNetwork:
    """``bei.cli.bench.sockets.Network`` around a server that is a function. ``begins_s``: what the clock says first."""

    def __init__(
        self, server: Server, *, begins_s: float = 1000.0, refuses: Callable[[], bool] = lambda: False
    ) -> None:
        self.clock_s = begins_s
        self.server = server
        self.refuses = refuses
        self.num_connects = 0
        self.most_open = 0
        self._open = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0

    def now(self) -> float:
        return self.clock_s

    def connect(self, handler: ConnectionHandler) -> SimulatedConnection:
        self.num_connects += 1
        connection = SimulatedConnection(self, handler)
        if self.refuses():
            self.at(0.0, partial(connection.end, "refused"))
        self._open += 1
        self.most_open = max(self.most_open, self._open)
        return connection

    def closed(self) -> None:
        self._open -= 1

    def at(self, after_s: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self.clock_s + after_s, self._num_events, action))

    def wait(self, timeout_s: float) -> None:
        assert timeout_s >= 0
        until_s = self.clock_s + timeout_s
        if timeout_s > 0:  # a clock goes on, however short the wait
            until_s = max(until_s, math.nextafter(self.clock_s, math.inf))
        if not self._events or self._events[0][0] > until_s:
            self.clock_s = until_s
            return
        self.clock_s = max(self.clock_s, self._events[0][0])
        while self._events and self._events[0][0] <= self.clock_s:
            heapq.heappop(self._events)[2]()

    def close(self) -> None:
        self._events.clear()


class SimulatedConnection:
    def __init__(self, network: SimulatedNetwork, handler: ConnectionHandler) -> None:
        self._network = network
        self._handler = handler
        self._is_closed = False

    def send(self, data: bytes) -> None:
        done = self._network.server(self._network.clock_s, data)
        if done is None:
            self._network.at(0.0, partial(self.end, ""))
        elif done[1] is not None:
            self._network.at(done[0], partial(self._answer, done[1]))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._network.closed()

    def end(self, reason: str) -> None:
        if not self._is_closed:
            self.close()
            self._handler.ended(reason)

    def _answer(self, data: bytes) -> None:
        if not self._is_closed:
            self._handler.received(data)


class Outcomes:
    """A sink that keeps everything: (index, outcome, due, done, is it tried again)."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, float, float, bool]] = []

    def ended(
        self, request: LoadRequest, done_s: float, outcome: int, answer: HttpResponse | None, again_s: float | None
    ) -> None:
        self.rows.append((request.index, outcome, request.due_s, done_s, again_s is not None))

    @property
    def outcomes(self) -> list[int]:
        """Of the last tries."""
        return [outcome for _, outcome, _, _, again in self.rows if not again]


class Line:
    """A server that does one thing at a time, each for ``service_s``, and nothing from ``stalls_s[0]`` to ``[1]``."""

    def __init__(self, service_s: float, stalls_s: tuple[float, float] = (0.0, 0.0)) -> None:
        self._service_s = service_s
        self._stalls_s = stalls_s
        self._free_s = 0.0

    def __call__(self, now_s: float, data: bytes) -> tuple[float, bytes]:
        begin_s = max(now_s, self._free_s)
        if self._stalls_s[0] <= begin_s < self._stalls_s[1]:
            begin_s = self._stalls_s[1]
        self._free_s = begin_s + self._service_s
        return self._free_s - now_s, OK
