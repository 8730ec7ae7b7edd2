"""X-Request-Id: the client's own where it can be one, on every answer."""

from __future__ import annotations

import re

import httpx
import pytest

from bei.server.http.request_id import request_id_of
from tests.bei.server.app import ROUTE, App

NEW = re.compile(r"[0-9a-f]{32}")


def ask(app: App, path: str, method: str, headers: dict[str, str], content: bytes | None = None) -> httpx.Response:
    response: httpx.Response = app.run(app.client.request(method, path, headers=headers, content=content))
    return response


@pytest.mark.parametrize(
    "given",
    [
        "1",
        "6b3f2a3e-6f0c-4f5e-9d59-0f6d6f3c9a10",
        "01ARZ3NDEKTSV4RRFFQ69G5FAV",
        "Root=1-67891233-abcdef",
        "a" * 128,
        "a+/==",
    ],
)
def test_an_id_that_can_be_one_is_kept(given: str) -> None:
    assert request_id_of([(b"host", b"x"), (b"x-request-id", given.encode())]) == given.encode()


@pytest.mark.parametrize(
    "given", ["", " ", "a b", "a" * 129, "a\tb", "a\x1b[31m", "\xe9", '"', "<script>", "a;b", "a,b", "${jndi}", "a\nb"]
)
def test_any_other_is_replaced(given: str) -> None:
    found = request_id_of([(b"x-request-id", given.encode("latin-1"))]).decode()
    assert NEW.fullmatch(found)


def test_new_ids_differ() -> None:
    assert len({request_id_of([]) for _ in range(1000)}) == 1000


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", ROUTE, b'{"input": "a"}', 200),
        ("POST", ROUTE, b"{", 400),
        ("POST", ROUTE, b" " * 100_001, 413),
        ("POST", "/tei/embed", b'{"inputs": ""}', 400),
        ("GET", "/health", None, 200),
        ("HEAD", "/ready", None, 200),
        ("GET", "/openapi.json", None, 200),
        ("GET", "/no/such/route", None, 404),
        ("DELETE", ROUTE, None, 405),
    ],
)
def test_every_answer_has_the_id_of_its_request(
    app: App, method: str, path: str, content: bytes | None, status: int
) -> None:
    response = ask(app, path, method, {"X-Request-Id": "mine-1"}, content)
    assert (response.status_code, response.headers.get_list("x-request-id")) == (status, ["mine-1"])
    response = ask(app, path, method, {}, content)
    assert NEW.fullmatch(response.headers["x-request-id"])


def test_a_request_for_a_dialect_that_there_is_not_has_its_id_too(app: App) -> None:
    response = ask(app, ROUTE, "POST", {"X-Bei-Dialect": "none", "X-Request-Id": "mine-2"}, b"{}")
    assert (response.status_code, response.headers["x-request-id"]) == (400, "mine-2")
