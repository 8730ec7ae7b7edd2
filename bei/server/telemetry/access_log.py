"""A line of the log for every request, where the server is asked for it (--access-log).

It has the route, not the path, and no text of a client's: what a path or an input holds is the client's own. Where no
route has the path, the line has the begin of it, which shows what is wrong with a client's base URL. With --log-inputs
the first inputs are in it. The key is its name.
"""

from __future__ import annotations

import json
import logging
from urllib.parse import quote

from starlette.types import Message, Receive, Scope, Send

from bei.config.settings import ServeConfig
from bei.server.scope import SCOPE_API_KEY, SCOPE_REQUEST_ID
from bei.server.telemetry.request_record import UNMATCHED, Inputs, RequestRecord
from bei.utils.log_format import FIELDS

log = logging.getLogger(__name__)

_MOST_INPUTS = 10
_MOST_CHARS = 500
_MOST_CHARS_OF_PATH = 200


class LoggedRequest(RequestRecord):
    """A record that also counts bytes of bodies and, ``has_texts``, keeps the first inputs."""

    def __init__(self, *, has_texts: bool) -> None:
        super().__init__()
        self._has_texts = has_texts
        self._texts: list[object] = []
        self._bytes_in = self._bytes_out = 0

    def asks(self, model: str, inputs: Inputs) -> None:
        super().asks(model, inputs)
        if self._has_texts:
            self._texts += map(_shown, inputs[: _MOST_INPUTS - len(self._texts)])

    def counting(self, receive: Receive, send: Send) -> tuple[Receive, Send]:
        """The two, counting the bytes of bodies: those that came over the wire, and those that went."""

        async def counting_receive() -> Message:
            message = await receive()
            self._bytes_in += len(message.get("body", b""))
            return message

        async def counting_send(message: Message) -> None:
            self._bytes_out += len(message.get("body", b""))
            await send(message)

        return counting_receive, counting_send

    def fields(self) -> dict[str, object]:
        """What the line says of the work; null where there was none."""
        timing = self.timing
        found: dict[str, object] = {
            "lane": self.lane,
            "model": self.model,
            "inputs": self.num_inputs if self.model is not None else None,
            "tokens": None if timing is None or timing.accepted_s is None else timing.num_tokens,
            "bytes_in": self._bytes_in,
            "bytes_out": self._bytes_out,
        }
        return {**found, "texts": self._texts} if self._has_texts else found


def _shown(given: object) -> object:
    if isinstance(given, tuple):
        return [text[:_MOST_CHARS] for text in given]
    return given[:_MOST_CHARS] if isinstance(given, str | list) else "(an image)"


def _escaped(path: str) -> str:
    """The begin of ``path``, in printable characters without spaces."""
    shown = quote(path[:_MOST_CHARS_OF_PATH], safe="/:@!$&'()*+,;=", errors="replace")
    return shown if len(path) <= _MOST_CHARS_OF_PATH else f"{shown}..."


class RequestLog:
    """Writes the lines. ``has_texts``: with the first inputs."""

    def __init__(self, *, has_texts: bool) -> None:
        self._has_texts = has_texts

    def begin(self, receive: Receive, send: Send) -> tuple[LoggedRequest, Receive, Send]:
        """Of a request. What the application is to receive and send with."""
        record = LoggedRequest(has_texts=self._has_texts)
        return (record, *record.counting(receive, send))

    def end(self, record: RequestRecord, scope: Scope, seconds: float) -> None:
        """The request is answered."""
        assert isinstance(record, LoggedRequest)  # made by ``begin``
        key = scope.get(SCOPE_API_KEY)
        name = None if key is None else key.name
        request_id = scope[SCOPE_REQUEST_ID]
        fields = record.fields()
        if record.route == UNMATCHED:
            fields["path"] = _escaped(scope["path"])
        self._write(scope["method"], record.route, record.status, seconds, request_id, name, fields)

    def refused(self, status: int, request_id: str) -> None:
        """A request was answered before it had a scope."""
        self._write(None, UNMATCHED, status, 0.0, request_id, None, {})

    def _write(
        self,
        method: str | None,
        route: str,
        status: int,
        seconds: float,
        request_id: str,
        key: str | None,
        work: dict[str, object],
    ) -> None:
        fields = {
            "message": "request",
            "method": method,
            "route": route,
            "status": status,
            "duration_ms": round(seconds * 1000, 3),
            "request_id": request_id,
            "key": key,
            **work,
        }
        log.info("%s", _Line(fields), extra={FIELDS: fields})


class _Line:
    """The message of a request: written out by whoever needs it as text."""

    def __init__(self, fields: dict[str, object]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        fields = {name: value for name, value in self._fields.items() if name != "message"}
        start = f"{fields.pop('method') or '-'} {fields.pop('route')} {fields.pop('status')}"
        rest = [f"{name}={_value(value)}" for name, value in fields.items() if value is not None]
        return " ".join([start, *rest])


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def request_log_of(config: ServeConfig) -> RequestLog | None:
    """As ``config`` says; None: requests are not logged."""
    return RequestLog(has_texts=config.log_inputs) if config.access_log else None
