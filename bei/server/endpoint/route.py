"""Handles an inference request from the bytes of its body to the bytes of the answer, in the same way on every route.

A route is a request Struct, a function that parses it, and a handler, which runs a task of a model and returns the
reply. Handlers deal with neither bytes nor HTTP; everything that they have in common is here.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from bei.errors import BeiError, InvalidRequestError
from bei.metrics.request_timing import Timing
from bei.server.auth.keys import Key
from bei.server.auth.priority import TIER_FIELD, urgency_of
from bei.server.endpoint.context import Context, RequestContext
from bei.server.endpoint.examples import Example
from bei.server.endpoint.parse import BYTE_ORDER_MARK, Read, read
from bei.server.endpoint.render import INLINE_BYTES, Octets, Reply, num_bytes_of, pieces_of, slices_of, whole
from bei.server.http.accept import AnswerForm, answer_form
from bei.server.http.compression import coded
from bei.server.http.memory_budgets import Body
from bei.server.http.responses import (
    TRUNCATED_HEADER,
    StreamedResponse,
    WholeResponse,
    index_ranges,
    read_body,
    unless_disconnected,
    whole_body,
)
from bei.server.http.routing import ApiRoute
from bei.server.scope import SCOPE_API_KEY, SCOPE_BODY, SCOPE_CONNECTION, SCOPE_RECORD, SCOPE_URGENCY
from bei.server.telemetry.request_record import RequestRecord
from bei.utils.threads import off_loop

RequestT = TypeVar("RequestT")

WARNING_HEADER = "x-bei-warning"

# Smaller answers are not compressed: they fit into about one packet.
_LEAST_CODED_BYTES = 1_000

# After larger bodies memory is given back to the system, as after answers that are streamed.
_LARGE_BODY_BYTES = 1_000_000


@dataclass(frozen=True)
class Route(Generic[RequestT]):
    """``request`` and ``response`` are the bodies' types (or tuples of alternatives) for /openapi.json; ``summary``,
    ``example`` and ``handle``'s docstring describe the route there. ``parse`` and ``handle`` raise BeiError.
    ``has_report``: the handler can report the result or error of each input. ``octet_headers``: names of headers that
    an answer of raw bytes has; empty if the route has no such answer. ``timing_headers``: makes the headers of a
    successful answer about its time. ``runs_engine``: False if the handler needs only the tokenizer. ``parse_for``:
    makes the parser of a request whose path or headers say how its body is read; None: ``parse`` reads all.
    """

    path: str
    summary: str
    request: Any
    response: Any
    parse: Callable[[bytes], RequestT]
    handle: Callable[[RequestT, RequestContext], Awaitable[Reply]]
    example: Example
    has_report: bool = False
    octet_headers: Seq[str] = ()
    timing_headers: Callable[[Timing], Mapping[str, str]] | None = None
    runs_engine: bool = True
    parse_for: Callable[[Request], Callable[[bytes], RequestT]] | None = None


class Endpoint:
    """A route, bound to the served models."""

    def __init__(
        self,
        route: Route[Any],
        shared: Context,
        payload_limit: int,
        *,
        any_model: bool = False,
    ) -> None:
        self.path = route.path
        self._any_model = any_model
        self._route = route
        self._shared = shared
        self._payload_limit = payload_limit
        self._memory = shared.memory

    def framework_route(self) -> ApiRoute:
        """This endpoint as the framework's route, for paths with parameters and for /openapi.json."""
        route = ApiRoute(self.path, self.answer, ("POST",), self._route.summary)
        route.description = inspect.getdoc(self._route.handle) or ""
        return route

    async def answer(self, request: Request) -> Response:
        """Read and parse the body, run the handler, and render the reply. Raises BeiError, ClientDisconnect."""
        key: Key | None = request.scope.get(SCOPE_API_KEY)
        work: RequestRecord = request.scope[SCOPE_RECORD]
        if work.timing is None and self._route.timing_headers is not None:
            work.timing = Timing()
        timing = work.timing
        if timing is not None:
            timing.reads_body = True
        asked = request.scope.get(SCOPE_URGENCY) or urgency_of(request.scope["headers"])
        form = answer_form(request.scope["headers"])
        if key is not None:
            key.urgency(asked)  # refuses before the body is read
        if form.has_report and not self._route.has_report:
            raise _no_report()
        content = whole_body(request, self._payload_limit)
        if content is None:
            content = await read_body(request, self._payload_limit)
        if timing is not None:
            timing.received()
        is_large = len(content) > _LARGE_BODY_BYTES
        parse = self._route.parse if self._route.parse_for is None else self._route.parse_for(request)
        body, unreadable = await self._read(parse, content, in_part=form.has_report)
        del content
        if timing is not None:
            timing.parsed()
        account: Body | None = request.scope.get(SCOPE_BODY)
        flow: int = request.scope.get(SCOPE_CONNECTION, 0) if key is None else key.flow
        context = RequestContext(
            self._shared, asked, work, account, key, flow, any_model=self._any_model, has_report=form.has_report
        )
        context.unreadable = unreadable
        response: Response | None = None
        try:
            context.ask_tier(getattr(getattr(body, "body", body), TIER_FIELD, None))
            handling = self._route.handle(body, context)
            del body
            try:
                reply = await unless_disconnected(request, handling)
            finally:
                context.let_go()  # not after the answer is sent, which may take a client minutes
            response = await self._written(request, reply, context, form)
            return response
        finally:
            if not isinstance(response, StreamedResponse):  # which ends the request when it is sent
                self._end(context, is_large)

    async def _written(self, request: Request, reply: Reply, context: RequestContext, form: AnswerForm) -> Response:
        """``reply`` as a response: whole, or streamed in pieces if it is large."""
        if form.has_report and reply.report is None:
            raise _no_report()
        written, notation, media_type = reply.written_in(form.media_types)
        headers = self._headers(reply, context, written)
        coding = None
        if self._shared.compresses:
            headers["vary"] = "accept-encoding"
            coding = next(iter(form.codings), None)
        if num_bytes_of(written) <= INLINE_BYTES:
            content = whole(written, notation)
            if coding is not None and len(content) >= _LEAST_CODED_BYTES:
                headers["content-encoding"] = coding
                content = await unless_disconnected(request, off_loop(b"".join, coded([content], coding)))
            return WholeResponse(content, headers, media_type)
        pieces: Iterator[bytes] = pieces_of(written, notation)
        del reply, written
        if coding is not None:
            headers["content-encoding"] = coding
            pieces = coded(pieces, coding)
        on_end = partial(self._end, context, True)
        if request.scope.get("http_version") == "1.0":  # HTTP/1.0 needs the length of a body before it
            content = await unless_disconnected(request, off_loop(b"".join, pieces))
            slices = slices_of(content)
            return StreamedResponse(next(slices), slices, headers, media_type, on_end, context.answer, len(content))
        first = await unless_disconnected(request, off_loop(next, pieces))  # fails before anything is sent
        return StreamedResponse(first, pieces, headers, media_type, on_end, context.answer)

    def _headers(self, reply: Reply, context: RequestContext, written: object) -> dict[str, str]:
        headers = {TRUNCATED_HEADER: index_ranges(reply.truncated)} if reply.truncated else {}
        if isinstance(written, Octets):
            headers |= written.headers
        if context.warnings:
            headers[WARNING_HEADER] = ascii("; ".join(context.warnings))[1:-1]  # no control characters either
        if context.timing is not None and self._route.timing_headers is not None:
            headers |= self._route.timing_headers(context.timing)
        return headers

    def _end(self, context: RequestContext, is_large: bool) -> None:
        context.close()
        if is_large:
            self._memory.soon()

    async def _read(self, parse: Callable[[bytes], Any], body: bytes, *, in_part: bool) -> Read:
        try:
            return await read(parse, body.removeprefix(BYTE_ORDER_MARK), in_part=in_part)
        except BeiError:
            if len(body) > _LARGE_BODY_BYTES:  # millions of objects may have been made of it before it was refused
                self._memory.soon()
            raise


def _no_report() -> InvalidRequestError:
    return InvalidRequestError(
        "The header x-bei-report is for routes that embed texts, each by itself: leave it out.", "x-bei-report"
    )
