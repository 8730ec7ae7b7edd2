"""The outermost ASGI middleware: times every request, then counts, logs and traces it."""

from __future__ import annotations

import time
from collections.abc import Set
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bei.metrics.registry import Metrics
from bei.metrics.request_timing import Timing
from bei.server.scope import SCOPE_API_KEY, SCOPE_RECORD
from bei.server.telemetry.access_log import RequestLog
from bei.server.telemetry.request_record import RequestRecord

if TYPE_CHECKING:
    from bei.server.telemetry.spans import Tracing


class Telemetry:
    """Gives every request a RequestRecord, and a scope of its own, which the layers below may change in place.

    ``others`` gets what is not HTTP. ``untraced``: paths whose GET and HEAD requests have no trace.
    """

    def __init__(
        self,
        app: ASGIApp,
        others: ASGIApp,
        metrics: Metrics,
        request_log: RequestLog | None,
        tracing: Tracing | None,
        *,
        untraced: Set[str],
        server_timing: bool,
    ) -> None:
        self._app = app
        self._others = others
        self._metrics = metrics
        self._log = request_log
        self._tracing = tracing
        self._untraced = untraced
        self._server_timing = server_timing
        self._is_timed = server_timing or request_log is not None or tracing is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._others(scope, receive, send)
            return
        begun_s = time.monotonic()
        if self._log is None:
            record = RequestRecord()
        else:
            record, receive, send = self._log.begin(receive, send)
        if self._is_timed:
            record.timing, record.has_server_timing = Timing(begun_s), self._server_timing
        scope = {**scope, SCOPE_RECORD: record}  # a copy: the layers below change it in place
        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:  # in the middle of its answer
            record.status = 499
        except BaseException:  # in the middle of its answer: the server closes the connection, and logs the error
            record.status = 500
            raise
        finally:
            self._end(record, scope, time.monotonic() - begun_s)

    def _end(self, record: RequestRecord, scope: Scope, seconds: float) -> None:
        if "route" in scope:  # of the framework
            record.route = scope["route"].path
        self._metrics.request(record.route, record.status, seconds, record.model, record.lane, record.num_inputs)
        if SCOPE_API_KEY in scope:
            self._metrics.key_request(scope[SCOPE_API_KEY].label, record.status)
        if self._log is not None:
            self._log.end(record, scope, seconds)
        if self._tracing is not None and not self._is_monitoring(scope):
            self._tracing.end(record, scope, seconds)

    def _is_monitoring(self, scope: Scope) -> bool:
        return scope["method"] in ("GET", "HEAD") and scope["path"] in self._untraced


def with_answer_headers(scope: Scope, send: Send) -> Send:
    """``send``, which adds the headers that every answer gets, and notes the status."""
    record: RequestRecord = scope[SCOPE_RECORD]

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *record.begin_answer(message["status"])]
        await send(message)

    return send_with_headers
