"""A light HTTP client: raw sockets, one thread, requests made beforehand. Runs as a process of its own.

Reads a task from stdin and prints what happened, both JSON; ``benchmarks/load.py`` is the other end.

    {"port", "seconds", "lead", "patience_s", "streams": [{
        "name", "method", "path", "headers", "bodies",
        "concurrency",                     closed loop: so many requests on their way, until bodies run out
        "arrivals_s", "max_connections",   open loop: body i (cyclically) is due so many seconds after the start
        "retry", "poll_s"}]}               on 429 and 503: never; obey (wait as Retry-After says); poll (every poll_s)

No request starts once ``seconds`` have passed or every body of the stream called ``lead`` has its answer (whichever
is given); what is on its way is waited for, ``patience_s`` at most. An open loop's request that finds no free
connection waits here, and its latency counts from when it was due: a server that stalls cannot slow the questions down.

It parses no more of an answer than its head and its length, so that the cores it shares with the server go to the
server. Times are seconds since ``started_s`` (CLOCK_MONOTONIC). Status 0: the connection broke; -1: not
answered, or (``sent_s`` -1) never sent.
"""

from __future__ import annotations

import heapq
import json
import resource
import select
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

BROKEN, UNANSWERED = 0, -1
_KEPT = 400  # bytes of an error's body
_ERRORS_KEPT = 5
_AFTER_BREAK_S = 0.01
_NO_BODY = frozenset((204, 304))


class Answer:
    """One HTTP/1.1 answer, read in the pieces in which it comes. A body is counted, and its first bytes are kept."""

    def __init__(self) -> None:
        self.status = 0
        self._head = b""
        self.kept = bytearray()
        self._buffer = bytearray()
        self._left = 0  # bytes of the body, or of its chunk with the line end behind it
        self._read: Callable[[], bool | None] = self._read_head

    @property
    def has_begun(self) -> bool:
        """Whether a byte of it has come."""
        return bool(self.status or self._buffer)

    @property
    def ends_with_connection(self) -> bool:
        """Whether the body goes on until the server closes."""
        return self._read == self._read_rest

    def header(self, name: bytes) -> bytes | None:
        """The value of a header, in lower case as ``name`` must be; None where there is none."""
        start = self._head.find(b"\r\n" + name + b":")
        if start < 0:
            return None
        return self._head[start + len(name) + 3 :].split(b"\r\n", 1)[0].strip()

    def feed(self, data: bytes) -> bool:
        """Take the next piece; whether the answer is whole."""
        self._buffer += data
        while True:
            progress = self._read()
            if progress is not None:
                return progress

    # Each step returns True where the answer is whole, False where more bytes are needed, None to go on.

    def _read_head(self) -> bool | None:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        self._head = bytes(self._buffer[:end]).lower()
        del self._buffer[: end + 4]
        status = int(self._head[9:12])
        if status < 200:  # an interim answer: the true one follows
            return None
        self.status = status
        if status in _NO_BODY:
            return True
        if (length := self.header(b"content-length")) is not None:
            self._left = int(length)
            self._read = self._read_counted
        elif (self.header(b"transfer-encoding") or b"").endswith(b"chunked"):
            self._read = self._read_chunk_size
        else:
            self._read = self._read_rest
        return None

    def _read_counted(self) -> bool | None:
        self._left -= self._discard(self._left)
        return self._left == 0

    def _read_rest(self) -> bool | None:
        self._discard(len(self._buffer))
        return False

    def _read_chunk_size(self) -> bool | None:
        line = self._line()
        if line is None:
            return False
        size = int(line.split(b";", 1)[0], 16)
        self._left = size + 2
        self._read = self._read_chunk if size else self._read_trailer
        return None

    def _read_chunk(self) -> bool | None:
        self._left -= self._discard(self._left)
        if self._left:
            return False
        self._read = self._read_chunk_size
        return None

    def _read_trailer(self) -> bool | None:
        line = self._line()
        return False if line is None else (True if not line else None)

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _discard(self, most: int) -> int:
        count = min(most, len(self._buffer))
        if len(self.kept) < _KEPT:
            self.kept += self._buffer[: min(count, _KEPT - len(self.kept))]
        del self._buffer[:count]
        return count


class _Request:
    """Body ``index`` of a stream, and which try it is."""

    __slots__ = ("attempt", "due_s", "index", "reconnected", "sent_s")

    def __init__(self, index: int, due_s: float, attempt: int = 0) -> None:
        self.index = index
        self.due_s = due_s
        self.attempt = attempt
        self.sent_s = -1.0  # not yet
        self.reconnected = False


class _Stream:
    """A kind of traffic: its bodies, what happened to them, its idle connections."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.name: str = spec["name"]
        self.requests = _rendered(spec)
        self.arrivals: list[float] | None = spec.get("arrivals_s")
        self.num_total = len(self.requests) if self.arrivals is None else len(self.arrivals)
        self.most_connections: int = spec["concurrency"] if self.arrivals is None else spec["max_connections"]
        self.retry: str = spec.get("retry", "never")
        self.poll_s: float = spec.get("poll_s", 0.05)
        self.backlog: deque[_Request] = deque()
        self.idle: list[_Connection] = []
        self.num_open = 0
        self.num_started = 0  # of num_total
        self.num_finished = 0
        self.num_reconnects = 0
        self.rows: list[tuple[int, int, float, float, float, int, float | None, float | None]] = []
        self.errors: list[str] = []

    @property
    def num_unanswered(self) -> int:
        """Started and not finished, waiting retries included."""
        return self.num_started - self.num_finished

    def next_request(self, due_s: float) -> _Request | None:
        """The next body, or None."""
        if self.num_started == self.num_total:
            return None
        self.num_started += 1
        return _Request(self.num_started - 1, due_s)

    def record(self, request: _Request, done_s: float, answer: Answer | None, status: int) -> float | None:
        """Write a row; seconds after which this stream's policy tries again, or None."""
        seconds = milliseconds = None
        if answer is not None and status != 200:
            seconds, milliseconds = _number(answer.header(b"retry-after")), _number(answer.header(b"retry-after-ms"))
        self.rows.append(
            (request.index, request.attempt, request.due_s, request.sent_s, done_s, status, seconds, milliseconds)
        )
        if status != 200 and answer is not None and len(self.errors) < _ERRORS_KEPT:
            error = f"{status} {bytes(answer.kept).decode(errors='replace')}"
            if error not in self.errors:
                self.errors.append(error)
        if status not in (429, 503) or self.retry == "never":
            return None
        if self.retry == "poll":
            return self.poll_s
        return milliseconds / 1e3 if milliseconds is not None else seconds

    def report(self) -> dict[str, Any]:
        """Columns of all rows, and counts."""
        names = ("body", "attempt", "due_s", "sent_s", "done_s", "status", "retry_after_s", "retry_after_ms")
        columns = zip(*self.rows, strict=True) if self.rows else ((),) * len(names)
        return {
            **{name: list(column) for name, column in zip(names, columns, strict=True)},
            "num_started": self.num_started,
            "num_finished": self.num_finished,
            "num_reconnects": self.num_reconnects,
            "errors": self.errors,
        }


class _Connection:
    """One kept-alive connection with at most one request on its way."""

    def __init__(self, port: int, stream: _Stream) -> None:
        self.stream = stream
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.request: _Request | None = None
        self.answer = Answer()
        self.unsent = memoryview(b"")
        self.num_used = 0

    def flush(self) -> bool:
        """Send what the kernel takes; whether all has gone."""
        while self.unsent:
            try:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]
            except BlockingIOError:
                return False
        return True


class Driver:
    """Runs all streams to their end."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._port: int = task["port"]
        self._seconds: float | None = task.get("seconds")
        self._patience_s: float = task.get("patience_s", 300.0)
        self._streams = [_Stream(spec) for spec in task["streams"]]
        self._lead = next((stream for stream in self._streams if stream.name == task.get("lead")), None)
        self._selector = selectors.EpollSelector()
        self._timers: list[tuple[float, int, _Stream, _Request | None]] = []  # None: the next
        self._num_timers = 0
        self._stopped_s: float | None = None
        self._started_s = 0.0

    def run(self) -> dict[str, Any]:
        """Drive all streams; what happened."""
        cpu_s = time.process_time()
        self._started_s = time.monotonic()
        for stream in self._streams:
            if stream.arrivals is None:
                for _ in range(stream.most_connections):
                    self._follow(stream)
            elif stream.arrivals:
                self._set_timer(stream.arrivals[0], stream, None)
        while self._goes_on():
            self._fire_timers()
            for key, events in self._wait():
                self._handle(key.data, events)
        self._give_up()
        return {
            "started_s": self._started_s,
            "elapsed_s": self._now(),
            "cpu_s": time.process_time() - cpu_s,
            "streams": {stream.name: stream.report() for stream in self._streams},
        }

    def _now(self) -> float:
        return time.monotonic() - self._started_s

    def _goes_on(self) -> bool:
        now = self._now()
        if self._stopped_s is None:
            is_over = self._seconds is not None and now >= self._seconds
            is_led = self._lead is not None and self._lead.num_finished == self._lead.num_total
            if not is_over and not is_led:
                return any(stream.num_finished < stream.num_total for stream in self._streams)
            self._stop(now)
        assert self._stopped_s is not None
        waiting = any(stream.num_unanswered for stream in self._streams)
        return waiting and now < self._stopped_s + self._patience_s

    def _stop(self, now: float) -> None:
        """Start nothing any more: not what is due later, nor what waits for a connection or to be tried again."""
        self._stopped_s = now
        dropped = [(stream, request) for _, _, stream, request in self._timers if request is not None]
        self._timers.clear()
        for stream in self._streams:
            dropped += [(stream, request) for request in stream.backlog]
            stream.backlog.clear()
        for stream, request in dropped:
            self._finish(stream, request, None, UNANSWERED)

    def _give_up(self) -> None:
        for key in list(self._selector.get_map().values()):
            connection: _Connection = key.data
            if connection.request is not None:
                self._finish(connection.stream, connection.request, None, UNANSWERED)
            connection.socket.close()

    def _wait(self) -> list[tuple[selectors.SelectorKey, int]]:
        timeout = self._timeout()
        if self._timers:  # epoll waits whole milliseconds, select is exact to 0.1 ms: arrivals should be in time
            select.select([self._selector.fileno()], [], [], timeout)
            timeout = 0
        return self._selector.select(timeout)

    def _timeout(self) -> float:
        limits = [1.0]
        if self._timers:
            limits.append(self._timers[0][0] - self._now())
        if self._seconds is not None and self._stopped_s is None:
            limits.append(self._seconds - self._now())
        return max(0.0, min(limits))

    def _set_timer(self, when_s: float, stream: _Stream, request: _Request | None) -> None:
        self._num_timers += 1
        heapq.heappush(self._timers, (when_s, self._num_timers, stream, request))

    def _fire_timers(self) -> None:
        while self._timers and self._timers[0][0] <= self._now():
            when_s, _, stream, request = heapq.heappop(self._timers)
            if stream.arrivals is None and request is None:
                self._follow(stream)
                continue
            if request is None:
                assert stream.arrivals is not None
                request = stream.next_request(when_s)
                if stream.num_started < stream.num_total:
                    self._set_timer(stream.arrivals[stream.num_started], stream, None)
            if request is not None:
                self._start(stream, request)

    def _follow(self, stream: _Stream) -> None:
        """A closed loop's next request."""
        if self._stopped_s is None and (request := stream.next_request(self._now())) is not None:
            self._start(stream, request)

    def _start(self, stream: _Stream, request: _Request) -> None:
        """Send over an idle connection or a new one, or wait for one."""
        if stream.idle:
            connection = stream.idle.pop()
        elif stream.num_open < stream.most_connections:
            try:
                connection = _Connection(self._port, stream)
            except OSError:
                request.sent_s = self._now()
                self._finish(stream, request, None, BROKEN)
                return
            stream.num_open += 1
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        else:
            stream.backlog.append(request)
            return
        connection.request = request
        connection.answer = Answer()
        connection.num_used += 1
        connection.unsent = memoryview(stream.requests[request.index % len(stream.requests)])
        request.sent_s = self._now()
        self._send(connection)

    def _send(self, connection: _Connection) -> None:
        try:
            all_sent = connection.flush()
        except OSError:  # closed before all was sent: an answer that says why may have come all the same
            connection.unsent = memoryview(b"")
            all_sent = True
        events = selectors.EVENT_READ if all_sent else selectors.EVENT_READ | selectors.EVENT_WRITE
        if self._selector.get_key(connection.socket).events != events:
            self._selector.modify(connection.socket, events, connection)

    def _handle(self, connection: _Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._send(connection)
        if not events & selectors.EVENT_READ:
            return
        try:
            data = connection.socket.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._closed(connection)
        elif connection.request is not None and connection.answer.feed(data):
            self._answered(connection)

    def _answered(self, connection: _Connection) -> None:
        request, answer, stream = connection.request, connection.answer, connection.stream
        assert request is not None
        connection.request = None
        if answer.header(b"connection") == b"close" or connection.unsent:
            self._drop(connection)
        else:
            stream.idle.append(connection)
        self._finish(stream, request, answer, answer.status)

    def _closed(self, connection: _Connection) -> None:
        request, answer, stream = connection.request, connection.answer, connection.stream
        connection.request = None
        self._drop(connection)
        if request is None:
            return
        if answer.ends_with_connection:
            self._finish(stream, request, answer, answer.status)
        elif not answer.has_begun and connection.num_used > 1 and not request.reconnected:
            request.reconnected = True  # the server closed an idle connection just as it was taken: ask again
            stream.num_reconnects += 1
            self._start(stream, request)
        else:
            self._finish(stream, request, None, BROKEN)

    def _drop(self, connection: _Connection) -> None:
        if connection in connection.stream.idle:
            connection.stream.idle.remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        connection.stream.num_open -= 1

    def _finish(self, stream: _Stream, request: _Request, answer: Answer | None, status: int) -> None:
        """Write down what happened, then do what follows from it."""
        now = self._now()
        again_s = stream.record(request, now, answer, status)
        if again_s is not None and self._stopped_s is None:
            self._set_timer(now + again_s, stream, _Request(request.index, now + again_s, request.attempt + 1))
            if stream.arrivals is None:
                return  # a closed loop's client waits with its request
        else:
            stream.num_finished += 1
        if stream.backlog:
            self._start(stream, stream.backlog.popleft())
        elif stream.arrivals is None and status == BROKEN:
            self._set_timer(now + _AFTER_BREAK_S, stream, None)
        elif stream.arrivals is None:
            self._follow(stream)


def _rendered(spec: dict[str, Any]) -> list[bytes]:
    """Whole requests: head and body."""
    lines = [f"{spec.get('method', 'POST')} {spec['path']} HTTP/1.1", "host: localhost"]
    lines += [f"{name}: {value}" for name, value in spec.get("headers", {}).items()]
    head = "\r\n".join(lines)
    requests = []
    for body in spec["bodies"]:
        content = body.encode()
        about = f"\r\ncontent-type: application/json\r\ncontent-length: {len(content)}" if content else ""
        requests.append(f"{head}{about}\r\n\r\n".encode() + content)
    return requests


def _number(value: bytes | None) -> float | None:
    """Of a header; None where it is missing or no number."""
    try:
        return None if value is None else float(value)
    except ValueError:
        return None


def _allow_files() -> None:
    """As many open connections as the system lets this process have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    _allow_files()
    json.dump(Driver(json.load(sys.stdin)).run(), sys.stdout)
