"""The table from errors to HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import orjson
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from bei import errors
from bei.server.http.errors import error_response, on_http_error


def _tree(root: type[errors.BeiError]) -> Iterator[type[errors.BeiError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


def _make(kind: type[errors.BeiError]) -> errors.BeiError:
    if issubclass(kind, errors.OverloadedError):
        return kind("a message", retry_after_s=0.25)
    if issubclass(kind, errors.MissingDependencyError):
        return kind("package", "extra", "A message")
    if issubclass(kind, errors.BrokenDependencyError):
        return kind("package", "extra", "A message", "its words")
    return kind("a message")


@pytest.mark.parametrize("kind", sorted(set(_tree(errors.BeiError)), key=str))
def test_every_error_of_the_tree_has_a_status_and_openai_s_body(kind: type[errors.BeiError]) -> None:
    response = error_response(_make(kind))
    assert 400 <= response.status_code < 600
    assert (response.status_code < 500) == issubclass(kind, (errors.RequestError, errors.OverloadedError))
    error = orjson.loads(response.body)["error"]
    assert error["message"].startswith(("a message", "A message"))
    assert error["type"] in {"invalid_request_error", "rate_limit_error", "server_error"}
    assert error["code"] == kind.code


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.InvalidRequestError, 400),
        (errors.UnauthorizedError, 401),
        (errors.ForbiddenError, 403),
        (errors.ModelNotFoundError, 404),
        (errors.MethodNotAllowedError, 405),
        (errors.RequestTimeoutError, 408),
        (errors.PayloadTooLargeError, 413),
        (errors.EncodingNotSupportedError, 415),
        (errors.OverloadedError, 429),
        (errors.RateLimitedError, 429),
        (errors.HeadersTooLargeError, 431),
        (errors.NonFiniteOutputError, 500),
        (errors.ShuttingDownError, 503),
        (errors.TooManyConnectionsError, 503),
    ],
)
def test_the_statuses_clients_rely_on(kind: type[errors.BeiError], status: int) -> None:
    assert error_response(_make(kind)).status_code == status


def test_codes_are_distinct_where_remedies_are() -> None:
    children = (errors.MalformedRequestError, errors.EmptyInputError, errors.InputTooLongError)
    same = (errors.InvalidRequestError, *children)
    known = [kind for kind in _tree(errors.BeiError) if kind.__module__ == errors.__name__]  # others' are their base's
    codes = [kind.code for kind in known if kind not in same]
    assert len(codes) == len(set(codes))


def test_retry_after_is_rounded_up_and_given_in_milliseconds_too() -> None:
    headers = error_response(errors.OverloadedError("full", retry_after_s=1.2341)).headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("2", "1235")


def test_a_401_says_how_keys_are_sent_and_nothing_else_does() -> None:
    assert error_response(errors.UnauthorizedError("who?")).headers["www-authenticate"] == "Bearer"
    assert "www-authenticate" not in error_response(errors.ForbiddenError("no")).headers


def test_other_errors_of_the_framework_have_our_body() -> None:
    request = Request({"type": "http", "path": "/x", "headers": [], "server": ("bei.test", 80), "query_string": b""})
    response = asyncio.run(on_http_error(request, HTTPException(415, "no such media")))
    assert response.status_code == 400
    assert orjson.loads(response.body)["error"]["message"] == "no such media"
