"""What every inference route shares: the way from a body's bytes to an answer's.

A route is a request Struct, a function that parses it, and a handler, which asks a model for a task and says what to
answer. Handlers know neither bytes nor HTTP; everything that is the same for all of them is here.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from bei.admission import Ticket
from bei.errors import InvalidRequestError
from bei.server.errors import JSON
from bei.server.http import TRUNCATED_HEADER, index_ranges, read_body, unless_disconnected
from bei.server.models import Models
from bei.server.openapi import operation
from bei.server.urgency import Urgency, urgency_of
from bei.service import InferenceService, ModelInput

RequestT = TypeVar("RequestT")


@dataclass(frozen=True)
class Context:
    """What all calls share."""

    models: Models
    max_client_batch_size: int


class Call:
    """One request on its way through a handler: the served models, its urgency, and what it was admitted for.

    What it was admitted for is held until ``close``, when the last byte of the answer is rendered.
    """

    def __init__(self, context: Context, urgency: Urgency) -> None:
        self.models = context.models
        self._max_inputs = context.max_client_batch_size
        self._urgency = urgency
        self._tickets: list[Ticket] = []

    def check_inputs(self, inputs: Seq[object], param: str) -> None:
        """Reject an empty list, too many inputs, or an empty text. Raises InvalidRequestError that blames ``param``."""
        if not inputs:
            raise InvalidRequestError(f"{param} is an empty list: send at least one input.", param)
        if len(inputs) > self._max_inputs:
            raise InvalidRequestError(
                f"The request has {len(inputs)} inputs, the limit is {self._max_inputs}: split it.",
                param,
            )
        if "" in inputs:
            raise InvalidRequestError(f"{param} {inputs.index('')} is an empty text: leave it out.", param)

    def admit(self, service: InferenceService, inputs: Seq[ModelInput]) -> Ticket:
        """Accept the request with all of its inputs. Raises what ``InferenceService.admit`` raises."""
        ticket = service.admit(inputs, lane=self._urgency.lane, deadline_s=self._urgency.deadline_s)
        self._tickets.append(ticket)
        return ticket

    def close(self) -> None:
        """Give back what was admitted."""
        for ticket in self._tickets:
            ticket.close()


@dataclass(frozen=True)
class Reply:
    """``content`` is what orjson writes, numpy arrays included. ``truncated`` lists the inputs that were cut."""

    content: object
    truncated: Seq[int] = ()


@dataclass(frozen=True)
class Route(Generic[RequestT]):
    """``request`` and ``response`` are the bodies' types (or tuples of alternatives) for /openapi.json; ``summary`` and
    ``handle``'s docstring describe the route there. ``parse`` and ``handle`` raise BeiError.
    """

    path: str
    summary: str
    request: Any
    response: Any
    parse: Callable[[bytes], RequestT]
    handle: Callable[[RequestT, Call], Awaitable[Reply]]


class Endpoint:
    """A route, bound to the served models."""

    def __init__(self, route: Route[Any], context: Context, payload_limit: int) -> None:
        self.path = route.path
        self._route = route
        self._context = context
        self._payload_limit = payload_limit

    def add_to(self, app: FastAPI) -> None:
        """Register the route, with its description for /openapi.json."""
        app.add_api_route(
            self.path,
            self.answer,
            methods=["POST"],
            response_class=Response,
            summary=self._route.summary,
            description=inspect.getdoc(self._route.handle) or "",
            openapi_extra=operation(self._route.request, self._route.response),
        )

    async def answer(self, request: Request) -> Response:
        """From bytes to bytes. Raises BeiError, ClientDisconnect."""
        urgency = urgency_of(request.scope["headers"])
        body = self._route.parse(await read_body(request, self._payload_limit))
        call = Call(self._context, urgency)
        try:
            reply = await unless_disconnected(request, self._route.handle(body, call))
            headers = {TRUNCATED_HEADER: index_ranges(reply.truncated)} if reply.truncated else None
            return Response(orjson.dumps(reply.content, option=orjson.OPT_SERIALIZE_NUMPY), 200, headers, JSON)
        finally:
            call.close()
