"""Sends the requests of several streams concurrently and receives the answers: one thread, no locks.

A stream is a closed loop (constant concurrency) or an open one (requests have due times). A request of an open loop
without a free connection waits here, and its latency counts from its due time: a slow server cannot slow the arrivals
down.

Times are seconds since the start. Contents of requests and evaluation of results are up to the caller.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from bei.cli.bench.bounded_http import most_answer_bytes
from bei.cli.bench.http1 import HttpResponse, NotHttpError
from bei.cli.bench.sockets import ClientConnection, ConnectionHandler, Network

# Results of requests without an HTTP status.
BROKEN, UNANSWERED, TIMED_OUT, UNREACHABLE, NOT_HTTP, TOO_LONG = 0, -1, -2, -3, -4, -5

# Limit for the bodies of all answers that a process is receiving; beyond it the answer that grows is dropped.
_MOST_HELD_BYTES = 512_000_000

_AFTER_BREAK_S = 0.01
_LONGEST_WAIT_S = 1.0
_TRY_AGAIN = frozenset((429, 503))


class LoadRequest:
    """A request with all its tries. ``due_s``: due time of the first try; ``try_due_s``: of the current one.

    ``taken_s``: when the driver processed it; ``sent_s``: when it was written to a connection, -1: never.
    """

    __slots__ = (
        *("attempt", "content", "due_s", "index", "is_done", "link", "num_inputs", "reconnected", "sent_s", "stream"),
        *("taken_s", "try_due_s"),
    )

    def __init__(self, stream: _Traffic, index: int, content: bytes, num_inputs: int, due_s: float) -> None:
        self.stream = stream
        self.index = index
        self.content = content
        self.num_inputs = num_inputs
        self.due_s = self.try_due_s = self.taken_s = due_s
        self.sent_s = -1.0
        self.attempt = 0
        self.reconnected = False
        self.is_done = False
        self.link: _Link | None = None


class RequestSink(Protocol):
    """Records results."""

    def ended(
        self, request: LoadRequest, done_s: float, outcome: int, answer: HttpResponse | None, again_s: float | None
    ) -> None:
        """Record a try that has ended. ``outcome``: its status, or a constant above; ``again_s``: seconds until the
        next try, if any."""


@dataclass
class RequestStream:
    """A kind of traffic. ``concurrency`` makes it a closed loop, ``arrivals`` (ascending seconds) an open one.

    ``content()``: the next request and its number of inputs; None: no more (closed loops only). ``retry`` on 429 and
    503: never; obey (wait as Retry-After says); poll (every ``poll_s``). ``timeout_s`` counts from the due time.
    ``connect``: None: the network's.
    """

    name: str
    content: Callable[[], tuple[bytes, int] | None]
    sink: RequestSink
    concurrency: int | None = None
    arrivals: Iterator[float] | None = None
    max_connections: int = 1000
    retry: Literal["never", "obey", "poll"] = "never"
    poll_s: float = 0.05
    timeout_s: float = math.inf
    keeps_body: bool = False
    connect: Callable[[ConnectionHandler], ClientConnection] | None = None


class _Traffic:
    """The state of a stream."""

    def __init__(self, stream: RequestStream) -> None:
        if (stream.concurrency is None) == (stream.arrivals is None):
            raise ValueError("a stream has either a concurrency or arrivals")
        self.stream = stream
        self.is_open_loop = stream.arrivals is not None
        self.most_links = stream.max_connections if stream.concurrency is None else stream.concurrency
        self.backlog: deque[LoadRequest] = deque()
        self.deadlines: deque[LoadRequest] = deque()  # by due time
        self.unanswered: dict[LoadRequest, None] = {}
        self.idle: list[_Link] = []
        self.num_links = 0
        self.num_total: int | None = None  # None: more may come
        self.num_started = 0
        self.num_finished = 0
        self.num_reconnects = 0

    @property
    def is_over(self) -> bool:
        """True if all requests have ended."""
        return self.num_finished == self.num_total

    def next_request(self, due_s: float) -> LoadRequest | None:
        if self.num_started == self.num_total:
            return None
        made = self.stream.content()
        if made is None:
            self.num_total = self.num_started
            return None
        request = LoadRequest(self, self.num_started, *made, due_s)
        self.num_started += 1
        self.unanswered[request] = None
        if self.stream.timeout_s < math.inf:
            self.deadlines.append(request)
        return request


class _Link:
    """A connection with at most one request in flight."""

    def __init__(self, driver: LoadDriver, traffic: _Traffic) -> None:
        self.driver = driver
        self.traffic = traffic
        self.request: LoadRequest | None = None
        self.answer = HttpResponse(keeps_body=traffic.stream.keeps_body)
        self.num_used = 0
        self.connection: ClientConnection

    def received(self, data: bytes) -> None:
        self.driver.received(self, data)

    def ended(self, reason: str) -> None:
        self.driver.ended(self, reason)


class LoadDriver:
    """Runs streams to their end.

    No request starts after ``seconds``, or after the stream called ``lead`` is over; requests in flight are awaited for
    ``patience_s`` at most. ``abandons_waiting``: requests that are then due but unsent, or wait for a retry, are given
    up; otherwise they are still sent.
    """

    def __init__(
        self,
        network: Network,
        streams: Sequence[RequestStream],
        *,
        seconds: float | None = None,
        lead: str | None = None,
        patience_s: float = math.inf,
        abandons_waiting: bool = False,
    ) -> None:
        self._network = network
        self._seconds = seconds
        self._patience_s = patience_s
        self._abandons_waiting = abandons_waiting
        self._traffics = {stream.name: _Traffic(stream) for stream in streams}
        self._lead = self._traffics.get(lead or "")
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._num_timers = 0
        self._stopped_s: float | None = None
        self._is_aborted = False
        self._started_s = 0.0
        self._num_held_bytes = 0

    def run(self, started_s: float | None = None) -> None:
        """Run all streams. ``started_s``: time 0 on the network's clock; None: now."""
        self._started_s = self._network.now() if started_s is None else started_s
        for traffic in self._traffics.values():
            if traffic.is_open_loop:
                self._await_arrival(traffic)
            else:
                self.at(0.0, partial(self._open_loops, traffic))
        while self._goes_on():
            self._network.wait(self._timeout())
            self._fire_timers()
        self._give_up()

    def abort(self) -> None:
        """End at once; requests in flight count as unanswered."""
        self._is_aborted = True

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        """Call ``action()`` at ``when_s``."""
        self._num_timers += 1
        heapq.heappush(self._timers, (when_s, self._num_timers, action))

    def now(self) -> float:
        return self._network.now() - self._started_s

    def counts(self, name: str) -> tuple[int, int, int]:
        """Numbers of a stream's requests: started, ended, and resent because an idle connection was closed."""
        traffic = self._traffics[name]
        return traffic.num_started, traffic.num_finished, traffic.num_reconnects

    # The loop.

    def _goes_on(self) -> bool:
        if self._is_aborted:
            return False
        now = self.now()
        traffics = self._traffics.values()
        if self._stopped_s is None:
            is_due = self._seconds is not None and now >= self._seconds
            if is_due or (self._lead is not None and self._lead.is_over):
                self._stop(now)
            else:
                return any(not traffic.is_over for traffic in traffics)
        assert self._stopped_s is not None
        return any(not traffic.is_over for traffic in traffics) and now < self._stopped_s + self._patience_s

    def _stop(self, now: float) -> None:
        """Start no new requests, except those of open loops that are already due."""
        self._stopped_s = now
        for traffic in self._traffics.values():
            if self._abandons_waiting or not traffic.is_open_loop:
                traffic.num_total = traffic.num_started
        if self._abandons_waiting:
            self._timers.clear()
            for traffic in self._traffics.values():
                traffic.backlog.clear()
                for request in [one for one in traffic.unanswered if one.link is None]:
                    self._finish(request, UNANSWERED, None)

    def _give_up(self) -> None:
        self._is_aborted = True
        for traffic in self._traffics.values():
            for request in list(traffic.unanswered):
                self._finish(request, UNANSWERED, None)
        self._network.close()

    def _timeout(self) -> float:
        now = self.now()
        soonest = now + _LONGEST_WAIT_S
        if self._timers:
            soonest = min(soonest, self._timers[0][0])
        if self._seconds is not None and self._stopped_s is None:
            soonest = min(soonest, self._seconds)
        for traffic in self._traffics.values():
            if traffic.deadlines:
                soonest = min(soonest, traffic.deadlines[0].due_s + traffic.stream.timeout_s)
        return max(0.0, soonest - now)

    def _fire_timers(self) -> None:
        while self._timers and self._timers[0][0] <= self.now():
            heapq.heappop(self._timers)[2]()
        for traffic in self._traffics.values():
            deadlines, timeout_s = traffic.deadlines, traffic.stream.timeout_s
            while deadlines and (deadlines[0].is_done or deadlines[0].due_s + timeout_s <= self.now()):
                self._time_out(deadlines.popleft())

    # Starting requests.

    def _await_arrival(self, traffic: _Traffic) -> None:
        assert traffic.stream.arrivals is not None
        due_s = next(traffic.stream.arrivals, None)
        if due_s is None:
            traffic.num_total = traffic.num_started
        else:
            self.at(due_s, partial(self._arrive, traffic, due_s))

    def _arrive(self, traffic: _Traffic, due_s: float) -> None:
        request = traffic.next_request(due_s)
        self._await_arrival(traffic)
        if request is not None:
            request.taken_s = self.now()
            self._start(request)

    def _open_loops(self, traffic: _Traffic) -> None:
        for _ in range(traffic.most_links):
            self._follow(traffic)

    def _follow(self, traffic: _Traffic) -> None:
        """Start the next request of a closed loop before its end; several answers may arrive after the end was
        noticed."""
        now = self.now()
        if self._stopped_s is not None or (self._seconds is not None and now >= self._seconds):
            return
        if (request := traffic.next_request(now)) is not None:
            self._start(request)

    def _start(self, request: LoadRequest) -> None:
        """Send over an idle or new connection, or wait for one."""
        traffic = request.stream
        if traffic.idle:
            link = traffic.idle.pop()
        elif traffic.num_links < traffic.most_links:
            link = _Link(self, traffic)
            try:
                link.connection = (traffic.stream.connect or self._network.connect)(link)
            except OSError:
                request.sent_s = self.now()
                self._finish(request, UNREACHABLE, None)
                return
            traffic.num_links += 1
        else:
            traffic.backlog.append(request)
            return
        link.request = request
        link.num_used += 1
        link.answer.begin()
        request.link = link
        request.sent_s = self.now()
        link.connection.send(request.content)

    # Events of connections.

    def received(self, link: _Link, data: bytes) -> None:
        """Handle a part of an answer."""
        request, answer = link.request, link.answer
        if request is None:
            self._drop(link)  # unsolicited data
            return
        num_kept_bytes = answer.num_kept_bytes
        try:
            is_whole = answer.feed(data)
        except NotHttpError:
            self._refuse(link, request, NOT_HTTP)
            return
        finally:
            self._num_held_bytes += answer.num_kept_bytes - num_kept_bytes
        if answer.num_kept_bytes > most_answer_bytes(request.num_inputs) or self._num_held_bytes > _MOST_HELD_BYTES:
            self._refuse(link, request, TOO_LONG)
        elif is_whole:
            self._answered(link, request)

    def _refuse(self, link: _Link, request: LoadRequest, outcome: int) -> None:
        self._drop(link)
        self._release(link.answer)
        self._finish(request, outcome, None)

    def _release(self, answer: HttpResponse) -> None:
        """Let go of the body of an answer."""
        self._num_held_bytes -= answer.num_kept_bytes
        answer.begin()

    def ended(self, link: _Link, reason: str) -> None:
        """Handle a connection that was closed, or could not be opened."""
        request, answer, traffic = link.request, link.answer, link.traffic
        self._drop(link)
        if request is None:
            return
        if answer.status and answer.ends_with_connection:
            self._finish(request, answer.status, answer)
        elif not answer.has_begun and link.num_used > 1 and not request.reconnected:
            request.reconnected = True  # the server closed an idle connection at the moment of its reuse: send again
            traffic.num_reconnects += 1
            self._start(request)
        else:
            self._release(answer)
            self._finish(request, UNREACHABLE if reason else BROKEN, None)

    def _answered(self, link: _Link, request: LoadRequest) -> None:
        answer = link.answer
        link.request = None
        if answer.keeps_connection:
            link.traffic.idle.append(link)
        else:
            self._drop(link)
        self._finish(request, answer.status, answer)

    def _drop(self, link: _Link) -> None:
        if link in link.traffic.idle:
            link.traffic.idle.remove(link)
        if link.request is not None:
            link.request.link = None
            link.request = None
        link.connection.close()
        link.traffic.num_links -= 1

    def _time_out(self, request: LoadRequest) -> None:
        if not request.is_done:
            if (link := request.link) is not None:
                self._drop(link)
                self._release(link.answer)
            self._finish(request, TIMED_OUT, None)

    # Results.

    def _finish(self, request: LoadRequest, outcome: int, answer: HttpResponse | None) -> None:
        """Record the result, and schedule a retry or the next request."""
        now, traffic = self.now(), request.stream
        request.link = None
        again_s = self._again_s(traffic.stream, outcome, answer)
        traffic.stream.sink.ended(request, now, outcome, answer, again_s)
        if answer is not None:
            self._release(answer)
        if again_s is None:
            request.is_done = True
            del traffic.unanswered[request]
            traffic.num_finished += 1
        else:
            request.try_due_s, request.sent_s = now + again_s, -1.0
            request.attempt += 1
            request.reconnected = False
            self.at(request.try_due_s, partial(self._try_again, request))
            if not traffic.is_open_loop:
                return  # a closed loop's client waits with its request
        if outcome == UNREACHABLE or (outcome <= 0 and not traffic.is_open_loop):  # delayed, and not recursive
            self.at(now + _AFTER_BREAK_S, partial(self._start_next, traffic))
        else:
            self._start_next(traffic)

    def _start_next(self, traffic: _Traffic) -> None:
        """Use a connection that may be free now."""
        while traffic.backlog and traffic.backlog[0].is_done:  # timed out
            traffic.backlog.popleft()
        if self._is_aborted:
            return
        if traffic.backlog:
            if traffic.idle or traffic.num_links < traffic.most_links:
                self._start(traffic.backlog.popleft())
        elif not traffic.is_open_loop:
            self._follow(traffic)

    def _try_again(self, request: LoadRequest) -> None:
        if not request.is_done:
            self._start(request)

    def _again_s(self, stream: RequestStream, outcome: int, answer: HttpResponse | None) -> float | None:
        """Seconds until the stream's retry policy tries again, or None."""
        may = self._stopped_s is None or not self._abandons_waiting
        if outcome not in _TRY_AGAIN or stream.retry == "never" or self._is_aborted or not may:
            return None
        return stream.poll_s if stream.retry == "poll" else retry_after_s(answer)


def retry_after_s(answer: HttpResponse | None) -> float | None:
    """The delay in ``retry-after-ms``, else ``retry-after`` in seconds; None: neither."""
    if answer is None:
        return None
    for name, unit in ((b"retry-after-ms", 1e-3), (b"retry-after", 1.0)):
        try:
            value = float(answer.header(name) or b"nan")
        except ValueError:
            continue  # a date
        if 0 <= value < math.inf:
            return value * unit
    return None
