"""The one table from errors to HTTP: status, OpenAI error type, body, headers."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypedDict

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from bei import errors
from bei.server.http.compression import CODINGS
from bei.server.scope import SCOPE_ASKED_PATH
from bei.server.telemetry.middleware import with_answer_headers

JSON = "application/json"

# Those that routes have.
_METHODS = ("DELETE", "GET", "HEAD", "POST")

# Of a path, to be looked at.
_MOST_PARTS = 12

# Of an unknown path, and of a route's: as /v1/embedding is like /v1/embeddings.
_MOST_PATH_CHARS = 100
_LIKENESS = 0.85

# Nearest class along the error's ancestry wins. The types are those that OpenAI clients know.
_STATUS: dict[type[errors.BeiError], tuple[int, str]] = {
    errors.InvalidRequestError: (400, "invalid_request_error"),
    errors.RequestError: (400, "invalid_request_error"),
    errors.UnauthorizedError: (401, "invalid_request_error"),
    errors.ForbiddenError: (403, "invalid_request_error"),
    errors.ModelNotFoundError: (404, "invalid_request_error"),
    errors.RouteNotFoundError: (404, "invalid_request_error"),
    errors.ObjectNotFoundError: (404, "invalid_request_error"),
    errors.ConflictError: (409, "invalid_request_error"),
    errors.QuotaExceededError: (403, "invalid_request_error"),  # a 429 would have clients try again at once
    errors.MethodNotAllowedError: (405, "invalid_request_error"),
    errors.NotAcceptableError: (406, "invalid_request_error"),
    errors.RequestTimeoutError: (408, "invalid_request_error"),
    errors.PayloadTooLargeError: (413, "invalid_request_error"),
    errors.AnswerTooLargeError: (413, "invalid_request_error"),  # the remedy is the same: ask for less at once
    errors.EncodingNotSupportedError: (415, "invalid_request_error"),
    errors.HeadersTooLargeError: (431, "invalid_request_error"),
    errors.OverloadedError: (429, "rate_limit_error"),
    errors.TooManyConnectionsError: (503, "server_error"),
    errors.ShuttingDownError: (503, "server_error"),
    errors.NotReadyError: (503, "server_error"),
    errors.DeadlineExceededError: (504, "server_error"),
    errors.EngineError: (500, "server_error"),
    errors.EngineDeadError: (503, "server_error"),
    errors.DiskFullError: (507, "server_error"),
    errors.BeiError: (500, "server_error"),
}


# A bug, to the client.
UNEXPECTED = errors.BeiError("The server met an unexpected error: please report it with its log.")


def stopped() -> errors.ShuttingDownError:
    """Of a request that has not arrived completely when the server has waited long enough for the rest of it."""
    return errors.ShuttingDownError("The server has stopped: send the request to another replica.")


class ErrorDetail(TypedDict):
    """What is wrong and what to do; ``param`` is the field to blame, ``code`` is stable."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(TypedDict):
    """The body of every error, on every route (docs/decisions.md, "One form of errors").

    ``detail`` is the message again, where Jina's clients look for it.
    """

    error: ErrorDetail
    detail: str


# An error as a dialect has it: status and body, of the error, the status that the table gives it, and the path.
ErrorForm: TypeAlias = Callable[[errors.BeiError, int, str], tuple[int, object]]

# Where an ASGI scope says in which form its request's errors are; none: in ours.
FORM_KEY = "bei.error_form"


def own_form(error: errors.BeiError, status: int, _: str) -> tuple[int, object]:
    """An ErrorBody, with the status of the table."""
    return status, ErrorBody(error=detail_of(error), detail=str(error))


def detail_of(error: errors.BeiError) -> ErrorDetail:
    """What a client is told of ``error``."""
    kind = _row_of(error)[1]
    return ErrorDetail(message=str(error), type=kind, param=getattr(error, "param", None), code=error.code)


def error_response(error: errors.BeiError, scope: Mapping[str, Any] | None = None) -> Response:
    """The answer to a request that ends with ``error``, in the form of its ``scope``."""
    scope = {} if scope is None else scope
    form: ErrorForm = scope.get(FORM_KEY, own_form)
    status, body = form(error, status_of(error), scope.get("path", ""))
    return Response(orjson.dumps(body), status, headers_of(error), JSON)


def status_of(error: errors.BeiError) -> int:
    """The status of ``error`` in our own form; a dialect's form may change it."""
    return _row_of(error)[0]


def headers_of(error: errors.BeiError) -> dict[str, str]:
    """What the answer says beside its body, in every form."""
    headers = {}
    if isinstance(error, (errors.OverloadedError, errors.TooManyConnectionsError)):
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
        headers["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1000))
    if isinstance(error, (errors.ShuttingDownError, errors.EngineDeadError)):
        headers["connection"] = "close"
    if isinstance(error, errors.EncodingNotSupportedError):
        headers["accept-encoding"] = ", ".join(CODINGS)  # RFC 9110, section 12.5.3
    if isinstance(error, errors.UnauthorizedError):
        headers["www-authenticate"] = "Bearer"
    return headers


def _row_of(error: errors.BeiError) -> tuple[int, str]:
    return next(_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS)


class ErrorResponses:
    """Middleware: a BeiError of the layers below becomes an answer. They raise none once an answer has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except errors.BeiError as error:
            await error_response(error, scope)(scope, receive, with_answer_headers(scope, send))


async def on_bei_error(request: Request, error: Exception) -> Response:
    """Handler for our own errors."""
    assert isinstance(error, errors.BeiError)
    return error_response(error, request.scope)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Handler for the framework's errors (no such route, wrong method), in our body."""
    assert isinstance(error, HTTPException)
    path, scope = asked_path(request.scope), request.scope
    if error.status_code == 404:
        return error_response(errors.RouteNotFoundError(f"There is no route {path}: {_advice(request)}."), scope)
    if error.status_code == 405:
        methods = _methods_of(request)
        message = f"{path} does not take {request.method}: send {' or '.join(methods)}."
        response = error_response(errors.MethodNotAllowedError(message), scope)
        response.headers["allow"] = ", ".join(methods)
        return response
    return error_response(errors.InvalidRequestError(str(error.detail)), scope)


def asked_path(scope: Scope) -> str:
    """The path that the client has asked for, with the root path."""
    asked: str | None = scope.get(SCOPE_ASKED_PATH)
    path: str = scope["path"] if asked is None else scope.get("root_path", "") + asked
    return path


def _advice(request: Request) -> str:
    """What to do about a path without a route. Clients that append a prefix which their base URL has already are
    told so."""
    parts = request.scope["path"].split("/")[1:_MOST_PARTS]
    for size in range(1, len(parts) // 2 + 1):
        for first in range(len(parts) - 2 * size + 1):
            middle = first + size
            once = "/" + "/".join(parts[:first] + parts[middle:])
            if parts[first:middle] == parts[middle : middle + size] and _has_route(request, once):
                return f"/{'/'.join(parts[first:middle])} stands there twice. Give the client a base URL without it"
    nearest = _nearest(request)
    return f"{nearest} may be meant, else see /openapi.json" if nearest else "see /openapi.json"


def _nearest(request: Request) -> str | None:
    """The path of a route that is written much as the request's is."""
    root = request.scope.get("root_path", "")
    path = request.scope["path"][len(root) :][:_MOST_PATH_CHARS]
    paths = {route.path for route in request.app.router.routes if "{" not in route.path}
    found = difflib.get_close_matches(path, paths, 1, _LIKENESS)
    return root + found[0] if found else None


def _has_route(request: Request, path: str) -> bool:
    placed = {**request.scope, "path": path, "raw_path": path.encode()}
    return any(route.matches(placed)[0] is not Match.NONE for route in request.app.router.routes)


def _methods_of(request: Request) -> list[str]:
    """All that the path takes: the framework names those of one route, and a path may have several."""
    scopes = [{**request.scope, "method": method} for method in _METHODS]
    routes = request.app.router.routes
    return [scope["method"] for scope in scopes if any(route.matches(scope)[0] is Match.FULL for route in routes)]


async def on_disconnect(_: Request, __: Exception) -> Response:
    """The client left while it sent its body: nobody reads this."""
    return Response(status_code=499)


async def on_unexpected(request: Request, _: Exception) -> Response:
    """A bug; the framework raises the error again for the log. No traceback leaves."""
    return error_response(UNEXPECTED, request.scope)


HANDLERS = {
    errors.BeiError: on_bei_error,
    HTTPException: on_http_error,
    ClientDisconnect: on_disconnect,
    Exception: on_unexpected,
}
