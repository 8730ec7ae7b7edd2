"""A line for every request: what it says, and what it never does."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bei.config.settings import ServeConfig
from bei.engine.fake import FakeEngine
from bei.metrics.registry import Metrics
from bei.server.http.connections import Connections
from bei.server.telemetry.access_log import request_log_of
from bei.utils.log_format import FIELDS
from tests.bei.server.app import ROUTE, App
from tests.bei.server.conftest import MakeApp
from tests.bei.server.kinds import post
from tests.support.artifacts import LIMITS

SECRET = "s3cr3t-0123456789abcdef"
TEXT = "the cat has a private thought"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[dict[str, Any]]]:
    """The fields of all lines, as they come."""
    found: list[dict[str, Any]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(getattr(record, FIELDS))

    logger = logging.getLogger("bei.server.telemetry.access_log")
    handler = Handler()
    caplog.set_level("INFO", logger.name)
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def ask(app: App, method: str = "POST", path: str = ROUTE, body: object = None, **headers: str) -> httpx.Response:
    content = None if body is None else json.dumps(body).encode()
    response: httpx.Response = app.run(app.client.request(method, path, headers=headers, content=content))
    return response


def test_a_line_says_what_was_asked_of_whom_and_what_it_took(make_app: MakeApp, lines: list[dict[str, Any]]) -> None:
    app = make_app(FakeEngine(LIMITS), access_log=True, api_keys=(f"search:{SECRET}",))
    body = {"input": [[1, 2], [3]]}
    response = ask(app, body=body, **{"X-Api-Key": SECRET, "X-Request-Id": "mine", "X-Bei-Lane": "bulk"})
    assert response.status_code == 200
    (line,) = lines
    duration_ms = line.pop("duration_ms")
    assert 0 < duration_ms < 10_000
    (service,) = app.models
    assert line == {
        **{"message": "request", "method": "POST", "route": ROUTE, "status": 200},
        **{"request_id": "mine", "key": "search", "lane": "bulk", "model": service.name},
        **{"inputs": 2, "tokens": 3, "bytes_in": len(json.dumps(body)), "bytes_out": len(response.content)},
    }


@pytest.mark.parametrize(
    ("method", "path", "headers", "route", "status"),
    [
        ("GET", "/health", {}, "/health", 200),
        ("GET", f"/no/such/{TEXT.replace(' ', '-')}", {"X-Api-Key": SECRET}, "unmatched", 404),
        ("POST", ROUTE, {}, ROUTE, 401),
        ("POST", ROUTE, {"X-Api-Key": SECRET}, ROUTE, 400),
        ("GET", f"/v1/models/{TEXT.replace(' ', '-')}", {"X-Api-Key": SECRET}, "/v1/models/{name:path}", 404),
    ],
)
def test_requests_without_work_have_a_line_too_with_the_route_and_not_the_path(
    make_app: MakeApp,
    lines: list[dict[str, Any]],
    method: str,
    path: str,
    headers: dict[str, str],
    route: str,
    status: int,
) -> None:
    app = make_app(FakeEngine(LIMITS), access_log=True, api_keys=(f"search:{SECRET}",))
    assert ask(app, method, path, **headers).status_code == status
    (line,) = lines
    assert (line["route"], line["status"], line["model"], line["inputs"], line["tokens"]) == (
        *(route, status),
        *(None, None, None),
    )
    assert line["key"] == ("search" if headers else None)


def test_texts_are_in_it_only_where_they_are_asked_for(
    make_app: MakeApp, lines: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    ask(make_app(FakeEngine(LIMITS), access_log=True), body={"input": [TEXT, "b"]})
    assert "thought" not in caplog.text
    assert "texts" not in lines[0]
    texts = [TEXT, "long " * 1000, *(str(number) for number in range(20))]
    app = make_app(FakeEngine(LIMITS), access_log=True, log_inputs=True)
    ask(app, body={"input": texts})
    assert lines[1]["texts"] == [TEXT, ("long " * 1000)[:500], *map(str, range(8))]
    assert lines[1]["inputs"] == 22
    assert "thought" in caplog.text
    assert all("\n" not in record.getMessage() for record in caplog.records)


def test_pairs_and_parts_of_a_request_are_counted_together(
    kinds: App, make_app: MakeApp, lines: list[dict[str, Any]]
) -> None:
    app = make_app(FakeEngine(LIMITS), access_log=True, log_inputs=True)
    assert ask(app, path="/vertex", body={"instances": [{"inputs": "a"}, {"inputs": ["b", "c"]}]}).status_code == 200
    assert (lines[0]["inputs"], lines[0]["texts"]) == (3, ["a", "b", "c"])
    assert post(kinds, "/rerank", model="reranker", query="a", texts=["b"]).status_code == 200
    assert len(lines) == 1  # a server that is not asked to has no lines


def test_a_large_answer_is_counted_to_its_end(make_app: MakeApp, lines: list[dict[str, Any]]) -> None:
    app = make_app(FakeEngine(LIMITS), access_log=True)
    response = ask(app, body={"input": [[number % 100 + 1] for number in range(12_000)]})
    assert lines[0]["bytes_out"] == len(response.content) > 256_000
    assert (lines[0]["inputs"], lines[0]["tokens"], lines[0]["lane"]) == (12_000, 12_000, "bulk")


def test_as_text_a_line_begins_with_method_route_and_status(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "bei.server.telemetry.access_log")
    ask(make_app(FakeEngine(LIMITS), access_log=True), body={"input": [[1]]}, **{"X-Request-Id": "mine"})
    (record,) = (one for one in caplog.records if one.name == "bei.server.telemetry.access_log")
    words = record.getMessage().split()
    assert words[:3] == ["POST", ROUTE, "200"]
    assert {"request_id=mine", "lane=interactive", "inputs=1", "tokens=1", "bytes_in=16"} <= set(words)
    assert not any(word.endswith("=null") for word in words)


def test_what_is_refused_before_there_is_a_route_has_a_line(lines: list[dict[str, Any]]) -> None:
    config = ServeConfig(access_log=True)
    Connections(config, Metrics(), 1, request_log_of(config)).count_refusal(431, b"mine")
    (line,) = lines
    assert (line["route"], line["status"], line["request_id"], line["key"]) == ("unmatched", 431, "mine", None)


def test_without_access_log_nothing_is_measured() -> None:
    assert request_log_of(ServeConfig()) is None


def test_a_path_that_no_route_has_is_escaped_and_cut(make_app: MakeApp, lines: list[dict[str, Any]]) -> None:
    app = make_app(FakeEngine(LIMITS), access_log=True)
    for path in ("/v1/v1/embeddings", "/a%20b%0Ac%C3%A9%22", "/" + "x" * 5_000):
        assert ask(app, path=path).status_code == 404
    paths = [line["path"] for line in lines]
    assert paths == ["/v1/v1/embeddings", "/a%20b%0Ac%C3%A9%22", "/" + "x" * 199 + "..."]
    assert ask(app, path="/health", method="PATCH").status_code == 405
    assert ask(app, path="/health", method="GET").status_code == 200
    assert all("path" not in line for line in lines[3:])
