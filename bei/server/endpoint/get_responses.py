"""Responses of routes of the framework, for /openapi.json, declared beside the handler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, get_type_hints

from bei.errors import BeiError
from bei.server.http.errors import JSON

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class RequestBody(NamedTuple):
    """The type of a body that the function itself reads."""

    type: Any
    media_type: str = JSON
    example: Any = None


class GetResponses(NamedTuple):
    """``bodies``: the type of the body by status; None: an empty one. ``errors``: those that the route raises.
    ``example``: the body of a successful answer; None: it is empty. ``or_json``: the type of one that is JSON, beside
    one of ``media_type``."""

    bodies: Mapping[int, Any]
    example: Any = None
    errors: tuple[type[BeiError], ...] = ()
    media_type: str = JSON
    request: RequestBody | None = None
    or_json: Any = None


def answers(
    *errors: type[BeiError],
    example: Any = None,
    bodies: Mapping[int, Any] | None = None,
    media_type: str = JSON,
    request: RequestBody | None = None,
    or_json: Any = None,
) -> Callable[[FunctionT], FunctionT]:
    """Note what a function answers; without ``bodies`` it is 200 with what its annotation says it returns."""

    def noted(function: FunctionT) -> FunctionT:
        found = {200: get_type_hints(function)["return"]} if bodies is None else bodies
        setattr(function, _ATTRIBUTE, GetResponses(found, example, errors, media_type, request, or_json))
        return function

    return noted


def answers_of(function: Callable[..., Any]) -> GetResponses:
    """The responses that ``answers`` declared, or else the annotation."""
    noted: GetResponses | None = getattr(function, _ATTRIBUTE, None)
    return GetResponses({200: get_type_hints(function)["return"]}) if noted is None else noted


_ATTRIBUTE = "bei_answers"
