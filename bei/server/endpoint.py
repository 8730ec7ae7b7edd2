"""What every inference route shares: the way from a body's bytes to an answer's.

A route is a request Struct, a function that parses it, and a handler, which asks a model for a task and says what to
answer. Handlers know neither bytes nor HTTP; everything that is the same for all of them is here.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from bei.admission import Ticket
from bei.errors import AnswerTooLargeError, EmptyInputError, InvalidRequestError, NotAcceptableError, OverloadedError
from bei.offload import off_loop
from bei.server.answers import AnswerMemory
from bei.server.coding import coded
from bei.server.errors import JSON
from bei.server.http import (
    TRUNCATED_HEADER,
    StreamedResponse,
    WholeResponse,
    index_ranges,
    read_body,
    unless_disconnected,
)
from bei.server.memory import MemoryRelease
from bei.server.models import UNNAMED, Models
from bei.server.negotiation import MSGPACK, answer_form
from bei.server.parsing import too_many_inputs
from bei.server.rendering import (
    IN_JSON,
    IN_MSGPACK,
    INLINE_BYTES,
    Items,
    Notation,
    Octets,
    num_bytes_of,
    pieces_of,
    whole,
)
from bei.server.urgency import Urgency, urgency_of
from bei.service import InferenceService, ModelInput
from bei.timing import Timing

RequestT = TypeVar("RequestT")

WARNING_HEADER = "x-bei-warning"
_SHOWN_CHARS = 100  # of what a client sent

# Larger bodies are parsed off the event loop: smaller ones take a millisecond at most.
INLINE_BODY_BYTES = 64_000

# Smaller answers are not compressed: they are a packet or so as they are.
_LEAST_CODED_BYTES = 1_000

# After larger bodies memory is given back to the system, as after answers that are streamed.
_LARGE_BODY_BYTES = 1_000_000


@dataclass(frozen=True)
class Context:
    """What all calls share."""

    models: Models
    max_client_batch_size: int
    answer_limit: int
    answers: AnswerMemory
    compresses: bool = False
    memory: MemoryRelease = field(default_factory=MemoryRelease)


class Call:
    """One request on its way through a handler: the served models, its urgency, and what it was admitted for.

    What it was admitted for is held until ``close``, when the last byte of the answer is rendered. ``any_model``: a
    name that no model has is passed over. ``timing``: gets the times of what is admitted.
    """

    def __init__(
        self,
        context: Context,
        urgency: Urgency,
        *,
        any_model: bool = False,
        has_report: bool = False,
        timing: Timing | None = None,
    ) -> None:
        self.models = context.models
        self.has_report = has_report  # the answer is to say of each input what became of it
        self._any_model = any_model
        self._max_inputs = context.max_client_batch_size
        self._answer_limit = context.answer_limit
        self._answers = context.answers
        self._answer_bytes = 0  # counted there
        self._urgency = urgency
        self._tickets: list[Ticket] = []
        self._whole: Ticket | None = None
        self.timing = timing
        self.warnings: list[str] = []  # for the client, in a header

    def able(self, task: str, name: str | None) -> InferenceService:
        """The model that is called ``name`` and can do ``task``. Raises what ``Models.able`` raises."""
        return self._noted(self.models.able(task, self._known(name)), name)

    def named(self, name: str | None) -> InferenceService:
        """The model that is called ``name``. Raises what ``Models.named`` raises."""
        return self._noted(self.models.named(self._known(name)), name)

    def _known(self, name: str | None) -> str | None:
        return None if self._any_model and name not in self.models else name

    def _noted(self, service: InferenceService, name: str | None) -> InferenceService:
        """Tell the client where a model answers that has another name."""
        if name != service.name and name not in UNNAMED:
            self.warn(f"no model is called {str(name)[:_SHOWN_CHARS]}: {service.name} has answered")
        return service

    def warn(self, text: str) -> None:
        """Tell the client, in a header, once."""
        if text not in self.warnings:
            self.warnings.append(text)

    @property
    def max_inputs(self) -> int:
        """Most inputs of one request."""
        return self._max_inputs

    def check_inputs(self, inputs: Seq[object], param: str) -> None:
        """Reject an empty list, too many inputs, or an empty text. Raises InvalidRequestError that blames ``param``."""
        self.check_count(inputs, param)
        if "" in inputs:
            raise empty_text(inputs.index(""), param)

    def check_count(self, inputs: Seq[object], param: str) -> None:
        """Reject an empty list, or too many inputs. Raises InvalidRequestError that blames ``param``."""
        if not inputs:
            raise EmptyInputError(f"{param} is an empty list: send at least one input.", param)
        if len(inputs) > self._max_inputs:
            raise too_many_inputs(len(inputs), self._max_inputs, param)

    def check_answer(self, num_bytes: int) -> None:
        """Reject an answer of about ``num_bytes``, as early as they are known.

        Raises AnswerTooLargeError, and OverloadedError where large answers take all memory that they may; of an
        accepted request only the first.
        """
        if num_bytes > self._answer_limit:
            raise AnswerTooLargeError(
                f"The answer would have about {num_bytes} bytes, the limit is {self._answer_limit}: send fewer or "
                "shorter inputs at a time, or start the server with a larger --answer-limit."
            )
        self._hold(num_bytes)

    def _hold(self, num_bytes: int) -> None:
        if num_bytes > max(INLINE_BYTES, self._answer_bytes):
            self._answers.take(num_bytes - self._answer_bytes, may_exceed=bool(self._tickets))
            self._answer_bytes = num_bytes

    def admit(self, service: InferenceService, inputs: Seq[ModelInput], *, bytes_per_token: int = 0) -> Ticket:
        """Accept the request with all of its inputs. Raises what ``InferenceService.admit`` raises.

        ``bytes_per_token``: what the answer grows by with every token; it is checked while the inputs are tokenized.
        """
        ticket = self._admitted(service, inputs) if self._whole is None else self._whole
        if bytes_per_token:
            try:
                self._hold(min(ticket.admitted.num_tokens * bytes_per_token, self._answer_limit))
            except OverloadedError:
                ticket.close()
                raise
            ticket.check_tokens = lambda num_tokens: self.check_answer(num_tokens * bytes_per_token)
        self._tickets.append(ticket)
        return ticket

    def admit_whole(self, service: InferenceService, inputs: Seq[ModelInput]) -> None:
        """Accept the inputs of all parts of the request: what its parts ``admit`` later is of this ticket."""
        self._whole = self._admitted(service, inputs)

    def _admitted(self, service: InferenceService, inputs: Seq[ModelInput]) -> Ticket:
        ticket = service.admit(inputs, lane=self._urgency.lane, deadline_s=self._urgency.deadline_s)
        if self.timing is not None:
            self.timing.admitted(inputs, service.manifest.target)
            ticket.timing = self.timing
        return ticket

    def close(self) -> None:
        """Give back what was admitted."""
        for ticket in self._tickets if self._whole is None else [self._whole]:
            ticket.close()
        self._answers.give_back(self._answer_bytes)
        self._answer_bytes = 0


@dataclass(frozen=True)
class Reply:
    """``content`` is what orjson writes, numpy arrays included; lists that may be large are ``Items``, on top or in
    objects. ``truncated`` lists the inputs that were cut, ``octets`` makes bytes of the answer's vectors, where it is
    nothing else, and ``report`` says what became of each input."""

    content: object
    truncated: Seq[int] = ()
    octets: Callable[[], Octets] | None = None
    report: Items | None = None

    def written_in(self, media_types: Seq[str]) -> tuple[object, Notation, str]:
        """What is written, how, and its media type: the first of ``media_types`` that the answer can have.

        Raises NotAcceptableError where there is none.
        """
        for media_type in media_types:
            if media_type in _NOTATIONS:
                return self._with_report(), _NOTATIONS[media_type], media_type
            if self.octets is not None and self.report is None:
                return self.octets(), IN_JSON, media_type
        raise NotAcceptableError(
            f"This answer is no {' or '.join(media_types)}, which is for vectors alone: accept {JSON} or {MSGPACK}.",
            "accept",
        )

    def _with_report(self) -> object:
        if self.report is None:
            return self.content
        fields = self.content if isinstance(self.content, dict) else {"embeddings": self.content}
        return {**fields, "report": self.report}


_NOTATIONS = {notation.media_type: notation for notation in (IN_JSON, IN_MSGPACK)}


@dataclass(frozen=True)
class Route(Generic[RequestT]):
    """``request`` and ``response`` are the bodies' types (or tuples of alternatives) for /openapi.json; ``summary`` and
    ``handle``'s docstring describe the route there. ``parse`` and ``handle`` raise BeiError. ``has_report``: the
    handler can say of each input what became of it. ``timing_headers``: what a good answer says about its time.
    """

    path: str
    summary: str
    request: Any
    response: Any
    parse: Callable[[bytes], RequestT]
    handle: Callable[[RequestT, Call], Awaitable[Reply]]
    has_report: bool = False
    timing_headers: Callable[[Timing], Mapping[str, str]] | None = None


class Endpoint:
    """A route, bound to the served models."""

    def __init__(
        self,
        route: Route[Any],
        context: Context,
        payload_limit: int,
        *,
        any_model: bool = False,
    ) -> None:
        self.path = route.path
        self._any_model = any_model
        self._route = route
        self._context = context
        self._payload_limit = payload_limit
        self._memory = context.memory

    def add_to(self, app: FastAPI) -> None:
        """Register the route; ``bei.server.openapi`` describes its bodies."""
        app.add_api_route(
            self.path,
            self.answer,
            methods=["POST"],
            response_class=Response,
            summary=self._route.summary,
            description=inspect.getdoc(self._route.handle) or "",
        )

    async def answer(self, request: Request) -> Response:
        """From bytes to bytes. Raises BeiError, ClientDisconnect."""
        urgency, form = urgency_of(request.scope["headers"]), answer_form(request.scope["headers"])
        if form.has_report and not self._route.has_report:
            raise _no_report()
        content = await read_body(request, self._payload_limit)
        is_large = len(content) > _LARGE_BODY_BYTES
        body = await self._parsed(content)
        del content
        timing = None if self._route.timing_headers is None else Timing()
        call = Call(self._context, urgency, any_model=self._any_model, has_report=form.has_report, timing=timing)
        is_answered = True
        try:
            reply = await unless_disconnected(request, self._route.handle(body, call))
            del body
            if form.has_report and reply.report is None:
                raise _no_report()
            written, notation, media_type = reply.written_in(form.media_types)
            headers = _headers(reply, call, written)
            if timing is not None and self._route.timing_headers is not None:
                headers.update(self._route.timing_headers(timing))
            coding = self._coding(form.codings, headers)
            if num_bytes_of(written) <= INLINE_BYTES:
                content = whole(written, notation)
                if coding is not None and len(content) >= _LEAST_CODED_BYTES:
                    headers["content-encoding"] = coding
                    content = await unless_disconnected(request, off_loop(b"".join, coded([content], coding)))
                return WholeResponse(content, headers, media_type)
            is_large = True
            pieces = pieces_of(written, notation)
            if coding is not None:
                headers["content-encoding"] = coding
                pieces = coded(pieces, coding)
            del reply, written
            if request.scope.get("http_version") == "1.0":  # knows no body without a length
                content = await unless_disconnected(request, off_loop(b"".join, pieces))
                return WholeResponse(content, headers, media_type)
            first = await unless_disconnected(request, off_loop(next, pieces))  # fails before anything is sent
            is_answered = False
            return StreamedResponse(first, pieces, headers, media_type, partial(self._end, call, is_large))
        finally:
            if is_answered:
                self._end(call, is_large)

    def _coding(self, accepted: Seq[str], headers: dict[str, str]) -> str | None:
        """The coding for an answer's bytes, if the server compresses; its ``headers`` then say what they depend on."""
        if not self._context.compresses:
            return None
        headers["vary"] = "accept-encoding"
        return next(iter(accepted), None)

    def _end(self, call: Call, is_large: bool) -> None:
        call.close()
        if is_large:
            self._memory.soon()

    async def _parsed(self, body: bytes) -> Any:
        if len(body) <= INLINE_BODY_BYTES:
            return self._route.parse(body)
        return await off_loop(self._route.parse, body)


def _no_report() -> InvalidRequestError:
    return InvalidRequestError(
        "The header x-bei-report is for routes that embed texts, each by itself: leave it out.", "x-bei-report"
    )


def empty_text(index: int, param: str) -> EmptyInputError:
    """The error of input ``index`` of ``param``."""
    return EmptyInputError(f"{param} {index} is an empty text: leave it out.", param)


def _headers(reply: Reply, call: Call, written: object) -> dict[str, str]:
    headers = {TRUNCATED_HEADER: index_ranges(reply.truncated)} if reply.truncated else {}
    if isinstance(written, Octets):
        headers |= written.headers
    if call.warnings:
        headers[WARNING_HEADER] = ascii("; ".join(call.warnings))[1:-1]  # no control characters either
    return headers
