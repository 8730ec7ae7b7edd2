"""HTTP/1.1 on one connection: uvicorn's protocol, with limits on the time and memory that a client may take.

httptools parses; uvicorn runs the application and writes what it sends. This file adds the requests' scopes, the
deadline of each phase of a request, the limits on its headers, the account of its body (``memory_budgets``), refusals
in bei's form of errors, and the body of a request that asks for another protocol.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections import deque
from functools import partial
from itertools import chain
from urllib.parse import unquote

import httptools
import uvicorn
from starlette.responses import Response
from starlette.types import Scope
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from bei.errors import (
    BeiError,
    HeadersTooLargeError,
    InvalidRequestError,
    MethodNotAllowedError,
    PayloadTooLargeError,
    RequestTimeoutError,
)
from bei.server.http.body_time import body_due_s, body_too_slow
from bei.server.http.connections import Connections
from bei.server.http.errors import error_response
from bei.server.http.fast_response import AnswerTransport, Exchange, head
from bei.server.http.http2_refusal import HTTP_1_1_REQUIRED, HTTP_2_PREFACE, NOT_SUPPORTED
from bei.server.http.memory_budgets import Body
from bei.server.http.message_head import checked_headers, joined, reason_of, without_upgrade
from bei.server.http.request_id import HEADER as REQUEST_ID
from bei.server.http.request_id import request_id_of
from bei.server.scope import SCOPE_BODY, SCOPE_CONNECTION

# Seconds for which a connection is read after its last answer if the client is still sending. Closed at once, it would
# be reset, and the client might never see the answer (RFC 9112, section 9.6).
_LINGER_S = 2.0

# Most bytes that are read and dropped of a body whose request is answered already.
_MOST_DROPPED = 64_000_000

# Most requests that wait for the answer to an earlier one on the same connection.
_MOST_PIPELINED = 100

_ASGI = {"version": "3.0", "spec_version": "2.3"}


class _Phase(enum.Enum):
    """The client's activity."""

    IDLE = enum.auto()  # nothing; all its requests are answered
    HEAD = enum.auto()  # sends a request line and headers
    BODY = enum.auto()  # sends a body; the answer may be there already
    WAIT = enum.auto()  # has sent a whole request and waits
    CLOSING = enum.auto()  # takes its last answer


# Names of the module, because looking a member up in its class is slow up to Python 3.11, and a request does it often.
_IDLE, _HEAD, _BODY, _WAIT, _CLOSING = _Phase


class Connection(HttpToolsProtocol):
    """One connection. Closed by the client, by uvicorn, or by ``expire``, ``refuse`` and ``drop``."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        connections: Connections,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(config, server_state, {}, loop)
        self._connections = connections
        self._limits = connections.config
        self._max_header_bytes, self._max_headers = self._limits.max_header_bytes, self._limits.max_headers
        self._phase = _IDLE
        self._number = next(connections.numbers)
        self._has_asked = False  # its first request has begun
        # After a fatal error: further input is ignored, answers that are due still go out, the last one closes the
        # connection.
        self._is_deaf = False
        self.deadline_s = math.inf
        self._body_since_s = 0.0
        self._head_begins = False  # a head begins within the bytes that are parsed now
        # Bytes of the request's target, headers and trailers; of a head in several packets also of method and version.
        self._head_bytes = 0
        self._unparsed_bytes = 0  # of a body: the parser has taken them and called nothing
        self._has_moved = False
        self._dropped_bytes = 0
        self._unsent_bytes: float = math.inf  # at the time when the client's time to take its answers began
        self._due: deque[tuple[RequestResponseCycle, Body]] = deque()  # requests that are not answered
        self._body: Body | None = None  # of the last request

    # Called by the transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._answer_transport = AnswerTransport(self, transport)
        self._set_idle()
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed: tell all requests that are not answered."""
        for cycle, body in self._due:  # uvicorn tells the last one only
            cycle.disconnected = True
            cycle.message_event.set()
            body.lose()
        self._due.clear()
        self.pipeline.clear()
        super().connection_lost(exc)
        self._connections.discard(self)

    def data_received(self, data: bytes) -> None:
        """Parse what the client has sent."""
        if self._phase is _CLOSING or self._is_deaf:
            return
        if not self._has_asked and data.startswith(HTTP_2_PREFACE):
            self._refuse_http_2()
            return
        if self._phase is _IDLE or self._phase is _WAIT:
            self._begin_head()
        self._has_moved = False
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._give_up(reason_of(error))  # not kept in a variable: its traceback leads here, and would keep ``data``
            return
        if self._phase is _HEAD:
            self._head_bytes = self._parsed_head_bytes() if self._head_begins else self._head_bytes + len(data)
            self._head_begins = False
        elif self._has_moved:
            self._unparsed_bytes = 0
            return
        else:  # within a trailer or the size of a chunk
            self._unparsed_bytes += len(data)
        if self._head_bytes + self._unparsed_bytes > self._max_header_bytes:
            self._give_up(self._headers_too_large())

    def _parsed_head_bytes(self) -> int:
        around = 4 * len(self.headers)  # ": " and the line's end
        return len(self.url) + sum(map(len, chain.from_iterable(self.headers))) + around

    def _feed(self, data: bytes) -> None:
        """Parse ``data``. A request to upgrade is parsed again as one that does not ask for it, since the parser skips
        the body of a request to upgrade."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self.parser.get_method() == b"CONNECT":
                    self._give_up(MethodNotAllowedError("CONNECT is for proxies, and this server is not one."))
                    return
                method, version = self.parser.get_method(), self.parser.get_http_version()
                data = without_upgrade(method, self.url, version, self.headers) + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)

    def pause_writing(self) -> None:
        """The client does not take its answers as fast as they are written; further ones wait."""
        super().pause_writing()
        if self._is_waiting:
            self._await_answer()

    def resume_writing(self) -> None:
        """The client has taken what was written."""
        super().resume_writing()
        self._unsent_bytes = math.inf
        if self._is_waiting:
            self._await_answer()

    @property
    def _is_waiting(self) -> bool:
        return self._phase is _WAIT or self._is_deaf

    # Called by the parser. An error that these raise stops the parser and comes out of ``_feed``.

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        if self._phase is not _HEAD:
            self._begin_head()
        self._head_begins = True
        self.url = b""
        self.headers = []

    def on_url(self, url: bytes) -> None:
        """A part of the request's target."""
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer after the body, which is dropped."""
        if self._phase is _HEAD:
            self.headers.append((name.lower(), value))
            return
        self._has_moved = True
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > self._max_header_bytes:
            raise self._headers_too_large()

    def _headers_too_large(self) -> HeadersTooLargeError:
        return HeadersTooLargeError(
            f"The request has more than {self._max_headers} headers or {self._max_header_bytes} bytes "
            "of them: send fewer."
        )

    def on_headers_complete(self) -> None:
        """Start the application for the request."""
        self._has_moved = True
        self._head_bytes = self._parsed_head_bytes()
        if self._head_bytes > self._max_header_bytes or len(self.headers) > self._max_headers:
            raise self._headers_too_large()
        version = self.parser.get_http_version()
        named = checked_headers(version, self.headers)
        if len(named) < len(self.headers):
            self.headers = joined(self.headers)
        if self.parser.should_upgrade():
            return  # to be parsed again
        if len(self.pipeline) >= _MOST_PIPELINED:
            raise InvalidRequestError("Too many requests wait on this connection: await answers before sending more.")
        former, body = self.cycle, Body(self._connections.bodies)
        self.cycle = exchange = self._exchange(body, version, named.get(b"expect", b""))
        body.on_fail = partial(self._body_failed, exchange)
        body.on_watch = self.flow.resume_reading  # else it would not notice that the client leaves
        self._has_asked = True
        self._body = body
        self._due.append((exchange, body))
        self._connections.set_busy(self)
        self._phase = _BODY
        self._dropped_bytes = 0
        self._body_since_s = body.started_s
        self.deadline_s = body.started_s + self._limits.body_timeout
        if former is None or former.response_complete:
            self._start_asgi_task(exchange, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self.app))

    def _exchange(self, body: Body, version: str, expected: bytes) -> Exchange:
        """The exchange of the request whose headers are complete, with a scope in uvicorn's form."""
        target = httptools.parse_url(self.url)
        path = target.path.decode("ascii")
        scope: Scope = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "method": self.parser.get_method().decode("ascii"),
            "root_path": "",
            "path": unquote(path) if "%" in path else path,
            "raw_path": target.path,
            "query_string": target.query or b"",
            "headers": self.headers,
            SCOPE_BODY: body,
            SCOPE_CONNECTION: self._number,
        }
        return Exchange(
            body,
            scope=scope,
            transport=self._answer_transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=expected.lower() == b"100-continue",
            keep_alive=version != "1.0" and self.parser.should_keep_alive() and not self._connections.is_draining,
            on_response=self.on_response_complete,
        )

    def on_body(self, body: bytes) -> None:
        self._has_moved = True
        assert self._body is not None
        if self.cycle.response_complete:
            self._dropped_bytes += len(body)
            if self._dropped_bytes > _MOST_DROPPED:
                raise PayloadTooLargeError("The request is answered and its body goes on.")
            return
        self._body.add(len(body))
        if self._body.error is not None:
            raise self._body.error
        self.cycle.body += body
        if len(self.cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        """The last byte of a request."""
        self._has_moved = True
        if self.parser.should_upgrade():
            return
        assert self._body is not None
        self._body.complete = True
        self._body.on_fail = None  # the application does not wait for the connection any more
        if self.cycle.response_complete:
            self._set_idle()
            self._connections.set_idle(self)
        else:
            self.cycle.more_body = False
            self.cycle.message_event.set()
            self._phase = _WAIT
            self._await_answer()

    # Called by the request's cycle.

    def on_response_complete(self) -> None:
        """A request is answered: go on with the next one, or wait for it."""
        self.server_state.total_requests += 1
        self._answer_transport.end_answer()
        if self._due:  # else the connection is lost
            self._due.popleft()[1].end()
        if self._phase is _CLOSING or self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._phase is _WAIT:
            self._set_idle()
            self._connections.set_idle(self)

    def close_after_answer(self) -> None:
        """Close, but let the client take what was written: a client that is still sending is read for a while."""
        if self._phase is _WAIT:
            self._phase = _CLOSING
            self._await_flush(self.loop.time())
            self.transport.close()
        else:
            self._linger()

    # Called by other connections and the clock.

    def expire(self, now_s: float) -> None:
        """Called when ``deadline_s`` has passed: give up what the connection waits for, or extend the deadline.

        It waits for the client to take an answer, to send headers or a body, or (idle) to send the next request.
        """
        if self._is_waiting:
            self._expire_flush(now_s)
        elif self._phase is _HEAD:
            self._expire_head(now_s)
        elif self._phase is _BODY:
            self._expire_body(now_s)
        elif self.transport.get_write_buffer_size():
            self._expire_flush(now_s)
        else:
            self.transport.close()

    def _expire_flush(self, now_s: float) -> None:
        if self.transport.get_write_buffer_size() < self._unsent_bytes:
            self._await_flush(now_s)  # the client has taken a part since
        else:
            self.transport.abort()

    def _expire_unread(self, now_s: float, timeout_s: float) -> None:
        """Extend the deadline: the server itself has paused reading. A client that takes no answer is cut off."""
        if self.flow.write_paused:
            self._expire_flush(now_s)
        else:
            self.deadline_s = now_s + timeout_s

    def _expire_head(self, now_s: float) -> None:
        timeout_s = self._connections.header_timeout_s
        if self.flow.read_paused:
            self._expire_unread(now_s, timeout_s)
        else:
            message = f"The headers did not arrive within {timeout_s:g} s: send the request again."
            self._give_up(RequestTimeoutError(message))

    def _expire_body(self, now_s: float) -> None:
        assert self._body is not None
        num_bytes = self._body.size + self._dropped_bytes
        due_s = body_due_s(self._body_since_s, self._limits.body_timeout, num_bytes)
        if self.flow.read_paused:
            self._body_since_s = now_s
            self._expire_unread(now_s, self._limits.body_timeout)
        elif due_s > now_s:
            self.deadline_s = due_s
        else:
            self._give_up(body_too_slow(self._limits.body_timeout))

    def _refuse_http_2(self) -> None:
        self._connections.count_refusal(NOT_SUPPORTED, request_id_of(()))
        self.transport.write(HTTP_1_1_REQUIRED)
        self._linger()

    def refuse(self, error: BeiError) -> None:
        """Answer with ``error`` in place of the application, and close. Call it only if no answer is due."""
        response, request_id = error_response(error), request_id_of(self.headers or ())
        self._connections.count_refusal(response.status_code, request_id)
        response.raw_headers.append((REQUEST_ID, request_id))
        self.transport.write(self._rendered(response))
        self._linger()

    def shutdown(self) -> None:
        """The server ends: close when the client has taken the answer that is due.

        A new connection's first request may be on its way: its headers have their usual time.
        """
        if self._phase is _HEAD or (self._phase is _IDLE and not self._has_asked):
            self.deadline_s = min(self.deadline_s, self.loop.time() + self._connections.header_timeout_s)
        elif self._phase is _IDLE:
            self.transport.close()
        elif self._phase is _BODY and self.cycle.response_complete:
            self._linger()
        elif self._phase is not _CLOSING:
            self.cycle.keep_alive = False

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers that the client has not taken."""
        return self.transport.get_write_buffer_size()

    def drop(self) -> None:
        """Close at once. The rest of an answer that the client has not taken is lost."""
        self._phase = _CLOSING
        self.transport.abort()

    # The ends of a connection.

    def _give_up(self, error: BeiError) -> None:
        """End the connection with ``error``; without it if earlier answers are due, or the request has one already."""
        is_due = self.cycle is not None and not self.cycle.response_complete
        if self._phase is _BODY and is_due:
            assert self._body is not None
            self._body.fail(error)
        elif is_due:  # the answers to requests before this one
            self._end_with(self.cycle)
        elif self._phase is _BODY:
            self._linger()
        else:
            self.refuse(error)

    def _body_failed(self, cycle: RequestResponseCycle) -> None:
        """The application wakes up and answers with the body's error."""
        self._end_with(cycle)
        cycle.body = bytearray()
        cycle.message_event.set()

    def _end_with(self, cycle: RequestResponseCycle) -> None:
        cycle.keep_alive = False
        self._is_deaf = True
        self._await_answer()

    def _linger(self) -> None:
        self._phase = _CLOSING
        self.deadline_s = self.loop.time() + _LINGER_S
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # within TLS there is no half of a connection
            self.transport.write_eof()
        self._connections.set_lingering(self)

    def _set_idle(self) -> None:
        self._phase = _IDLE
        self._await_flush(self.loop.time())
        # An idle connection keeps nothing of its last request.
        self.cycle = self.scope = self.headers = self._body = None  # type: ignore[assignment]
        self.url = b""

    def _begin_head(self) -> None:
        self._phase = _HEAD
        self._head_begins = False  # the parser skips empty lines before a head without a call
        self._head_bytes = self._unparsed_bytes = 0
        self._unsent_bytes = math.inf
        self.deadline_s = self.loop.time() + self._connections.header_timeout_s

    def _await_answer(self) -> None:
        """Set no deadline while the server works on an answer, but one if the client does not take what is written."""
        if self.flow.write_paused:
            self._await_flush(self.loop.time())
        else:
            self.deadline_s = math.inf

    def _await_flush(self, now_s: float) -> None:
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self.deadline_s = now_s + self._limits.keep_alive_timeout

    def _rendered(self, response: Response) -> bytes:
        headers = [*self.server_state.default_headers, *response.raw_headers]
        headers = [header for header in headers if header[0] != b"connection"]
        return head(response.status_code, headers, closes=True) + bytes(response.body)
