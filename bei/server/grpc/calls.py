"""A call on its way: what a request over HTTP passes through, around a function from one message to another.

The middlewares are those of HTTP (telemetry, request ids, keys), over a scope that has the call's metadata as headers.
Errors are statuses with the same messages; what HTTP says in headers of an answer is in trailing metadata.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import orjson
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bei import errors
from bei.errors import BeiError, InvalidRequestError, MalformedRequestError, PayloadTooLargeError
from bei.metrics.request_timing import Timing
from bei.server.auth.keys import Key, Keyring, flow_of
from bei.server.auth.middleware import ApiKeys
from bei.server.auth.priority import Urgency, urgency_of
from bei.server.endpoint.context import Context, RequestContext
from bei.server.endpoint.decoder_errors import malformed
from bei.server.endpoint.parse import INLINE_BODY_BYTES
from bei.server.endpoint.render import INLINE_BYTES, Reply, whole
from bei.server.http.accept import answer_form
from bei.server.http.errors import UNEXPECTED, status_of
from bei.server.http.memory_budgets import AnswerAccount, Body, BodyMemory
from bei.server.http.message_head import joined
from bei.server.http.request_id import RequestIds
from bei.server.http.responses import TRUNCATED_HEADER, index_ranges
from bei.server.scope import SCOPE_API_KEY, SCOPE_RECORD, SCOPE_REQUEST_ID, names_of
from bei.server.telemetry.middleware import Telemetry
from bei.server.telemetry.request_record import RequestRecord
from bei.utils.threads import off_loop

if TYPE_CHECKING:
    import grpc

log = logging.getLogger(__name__)

_CALL = "bei.call"
_WARNING = "x-bei-warning"
_REPORT = "x-bei-report"
_MODEL = b"x-bei-model"

Header: TypeAlias = tuple[bytes, bytes]


class RpcAnswer(NamedTuple):
    """What a handler answers: a message, the places of inputs that were cut, and the report on its inputs, as JSON.

    ``message`` may be its bytes, or a function that makes either: a large one is made in a thread."""

    message: Any
    truncated: Seq[int] = ()
    report: object = None


# Of a message, its context, and the model that metadata name.
Handle: TypeAlias = Callable[[Any, RequestContext, str | None], Awaitable[RpcAnswer]]


@dataclass(frozen=True)
class RpcMethod:
    """A method of a service: its path, the class of its requests, and what answers one. ``any_model``: as a dialect's.
    ``is_open``: without a key. ``has_report``: the handler can report on its inputs."""

    path: str
    request: Any
    handle: Handle
    any_model: bool = False
    is_open: bool = False
    has_report: bool = False


class RpcCall:
    """One message of a call, and its answer: ``content``, or ``error``, and ``trailing`` metadata. ``account``: of a
    large answer, to be released when it was taken. ``body``: the bytes of what is ``given``, until it is admitted.
    ``peer``: the connection."""

    def __init__(
        self, method: RpcMethod, given: Any, peer: str, deadline_s: float | None, body: Body, *, is_stream: bool
    ) -> None:
        self.method = method
        self.peer = peer
        self.given = given
        self.deadline_s = deadline_s
        self.body = body
        self.is_stream = is_stream
        self.content = b""
        self.error: BeiError | None = None
        self.account: AnswerAccount | None = None
        self.trailing: list[tuple[str, str]] = []
        self.is_cancelled = False

    async def receive(self) -> Message:
        """The message as a body; for what counts its bytes."""
        content = self.given if isinstance(self.given, bytes) else b""
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(self, message: Message) -> None:
        """The answer as a body; for the same."""


class Calls:
    """Answers calls on ``shared``'s models, for whoever has one of ``keys``: of a stream each message is looked at, so
    that a key which is taken back ends it. Messages count against ``bodies`` until their calls are admitted."""

    def __init__(
        self,
        shared: Context,
        bodies: BodyMemory,
        keys: Keyring | None,
        telemetry: Callable[[ASGIApp], Telemetry],
        payload_limit: int,
    ) -> None:
        self._shared = shared
        self._bodies = bodies
        self._payload_limit = payload_limit
        keyed: ASGIApp = self._answer if keys is None else ApiKeys(self._answer, keys, frozenset())

        async def by_method(scope: Scope, receive: Receive, send: Send) -> None:
            await (self._answer if scope[_CALL].method.is_open else keyed)(scope, receive, send)

        self._app = telemetry(RequestIds(_Guard(by_method)))

    async def answered(
        self,
        method: RpcMethod,
        given: Any,
        peer: str,
        headers: Seq[Header],
        deadline_s: float | None,
        body: Body | None = None,
        *,
        is_stream: bool = False,
    ) -> RpcCall:
        """``given``, a message or several, and the answer. ``body``: of several, which were counted as they came."""
        if body is None:
            body = self.new_body()
            body.complete = True  # who has sent all is not slow
            body.add(len(given))
        call = RpcCall(method, given, peer, deadline_s, body, is_stream=is_stream)
        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": method.path,
            "raw_path": method.path.encode(),
            "root_path": "",
            "query_string": b"",
            "http_version": "2",
            "scheme": "grpc",
            "client": None,
            "server": None,
            "headers": headers,
            _CALL: call,
        }
        try:
            await self._app(scope, call.receive, call.send)
        finally:
            body.end()
        if call.is_cancelled:
            raise asyncio.CancelledError
        return call

    def new_body(self) -> Body:
        """The account of messages that arrive."""
        return Body(self._bodies)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: RpcCall = scope[_CALL]
        method = call.method
        work: RequestRecord = scope[SCOPE_RECORD]
        work.route = method.path
        if work.timing is None:
            work.timing = Timing()
        timing = work.timing
        timing.reads_body = True
        await receive()
        key: Key | None = scope.get(SCOPE_API_KEY)
        headers: Seq[Header] = scope["headers"]
        if len({*names_of(headers)}) < len(headers):
            headers = joined(headers)
        asked = self._urgency(call, headers)
        if key is not None:
            key.urgency(asked)
        has_report = answer_form(headers).has_report
        if has_report and (call.is_stream or not method.has_report):
            raise InvalidRequestError(
                f"The metadata {_REPORT} is for calls of one text, to embed it: leave it out.", _REPORT
            )
        timing.received()
        if call.body.error is not None:
            raise call.body.error
        if call.body.size > self._payload_limit:
            raise PayloadTooLargeError(
                f"The messages have more than {self._payload_limit} bytes together: send fewer or shorter inputs."
            )
        parse = partial(_parsed, method.request, call.given)
        request = await off_loop(parse) if call.body.size > INLINE_BODY_BYTES else parse()
        timing.parsed()
        flow = flow_of(call.peer) if key is None else key.flow
        any_model = method.any_model
        context = RequestContext(
            self._shared, asked, work, call.body, key, flow, any_model=any_model, has_report=has_report
        )
        try:
            answer = await method.handle(request, context, _model_in(headers))
            message = answer.message
            call.content = await off_loop(_content, message) if callable(message) else _content(message)
            if len(call.content) > INLINE_BYTES:
                call.account = AnswerAccount(self._shared.answers)
                call.account.grow(len(call.content), may_exceed=True)  # instead of what its context has counted
        finally:
            context.let_go()
            context.close()
        if answer.truncated:
            call.trailing.append((TRUNCATED_HEADER, index_ranges(answer.truncated)))
        if context.warnings:
            call.trailing.append((_WARNING, ascii("; ".join(context.warnings))[1:-1]))
        if has_report:
            call.trailing.append((_REPORT, ascii(orjson.dumps(answer.report).decode())[1:-1]))
        await send({"type": "http.response.body", "body": call.content})

    @staticmethod
    def _urgency(call: RpcCall, headers: Seq[Header]) -> Urgency:
        """A stream is bulk unless it says otherwise. Of the metadata's deadline and the call's the earlier counts."""
        asked = urgency_of(headers)
        if call.is_stream and asked.lane is None:
            asked = asked._replace(lane="bulk")
        if call.deadline_s is not None and (asked.deadline_s is None or call.deadline_s < asked.deadline_s):
            asked = asked._replace(deadline_s=call.deadline_s)
        return asked


def _content(message: Any) -> bytes:
    made = message() if callable(message) else message
    return made if isinstance(made, bytes) else bytes(made.SerializeToString())


def _model_in(headers: Seq[Header]) -> str | None:
    return next((value.decode("latin-1") for name, value in headers if name == _MODEL), None)


def _parsed(request: Any, content: bytes | Seq[bytes]) -> Any:
    """The message, or each of several. Raises MalformedRequestError."""
    from google.protobuf.message import DecodeError

    if not isinstance(content, bytes):
        return [_parsed(request, one) for one in content]
    try:
        return request.FromString(content)
    except DecodeError as error:
        name = request.DESCRIPTOR.full_name
        raise MalformedRequestError(f"The message is not a {name}: {error}.") from error


class _Guard:
    """Middleware: what the layers below raise becomes the call's error, and its status that of HTTP, for metrics."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: RpcCall = scope[_CALL]
        work: RequestRecord = scope[SCOPE_RECORD]
        try:
            await self._app(scope, receive, send)
        except BeiError as error:
            call.error = error
        except asyncio.CancelledError:
            call.is_cancelled = True
            raise ClientDisconnect from None  # which counts as 499
        except Exception:  # a border: a bug costs its own call the answer, and the client sees no traceback
            log.exception("unexpected error, request %s on %s", scope[SCOPE_REQUEST_ID], scope["path"])
            call.error = UNEXPECTED
        status = 200 if call.error is None else status_of(call.error)
        call.trailing += [(name.decode(), value.decode("latin-1")) for name, value in work.begin_answer(status)]


def struct_of(cls: type[Any], **fields: object) -> Any:
    """A request Struct with these fields, validated as one that is read from JSON. Raises MalformedRequestError."""
    try:
        return msgspec.convert(fields, cls)
    except msgspec.ValidationError as error:
        raise malformed(error, cls, fields) from error


def report_of(reply: Reply) -> object:
    """The report of a reply on one input, for metadata."""
    return None if reply.report is None else orjson.loads(whole(reply.report))


# The first that fits.
_CODES: dict[type[BeiError], str] = {
    errors.UnauthorizedError: "UNAUTHENTICATED",
    errors.ForbiddenError: "PERMISSION_DENIED",
    errors.ModelNotFoundError: "NOT_FOUND",
    errors.TaskNotSupportedError: "UNIMPLEMENTED",
    errors.PayloadTooLargeError: "RESOURCE_EXHAUSTED",
    errors.AnswerTooLargeError: "RESOURCE_EXHAUSTED",
    errors.RequestTimeoutError: "DEADLINE_EXCEEDED",
    errors.RequestError: "INVALID_ARGUMENT",
    errors.OverloadedError: "RESOURCE_EXHAUSTED",
    errors.DeadlineExceededError: "DEADLINE_EXCEEDED",
    errors.EngineDeadError: "UNAVAILABLE",
    errors.NotReadyError: "UNAVAILABLE",
    errors.ShuttingDownError: "UNAVAILABLE",
    errors.TooManyConnectionsError: "UNAVAILABLE",
    errors.EngineError: "INTERNAL",
    errors.BeiError: "INTERNAL",
}


# What TEI's server says of a model of another kind, and where its backend fails on an input.
_OF_TEI: dict[type[BeiError], str] = {
    errors.TaskNotSupportedError: "FAILED_PRECONDITION",
    errors.EngineDeadError: "UNAVAILABLE",
    errors.NotReadyError: "UNAVAILABLE",
    errors.EngineError: "FAILED_PRECONDITION",
}


def code_of(error: BeiError, path: str = "") -> grpc.StatusCode:
    """The status of a call of the method ``path`` that ends with ``error``."""
    import grpc

    codes = chain(_OF_TEI.items() if path.startswith("/tei.") else (), _CODES.items())
    return getattr(grpc.StatusCode, next(name for cls, name in codes if isinstance(error, cls)))


def error_metadata(error: BeiError) -> list[tuple[str, str]]:
    """What is to be known of ``error`` beside its message: its code, the field to blame, when to come back."""
    found = [("bei-code", error.code)]
    param = getattr(error, "param", None)
    if param is not None:
        found.append(("bei-param", ascii(param)[1:-1]))
    if isinstance(error, (errors.OverloadedError, errors.TooManyConnectionsError)):
        found.append(("retry-after", str(math.ceil(error.retry_after_s))))
        found.append(("retry-after-ms", str(math.ceil(error.retry_after_s * 1000))))
    return found


def deadline_of(remaining_s: float | None) -> float | None:
    """On the monotonic clock."""
    return None if remaining_s is None or math.isinf(remaining_s) else time.monotonic() + remaining_s
