"""What a line of a batch gets is what a client would get: every route and dialect, and bei's errors as they are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from bei.engine.fake import FakeEngine
from bei.server.auth.key_file import KeySpec
from bei.server.auth.keys import Key
from bei.server.batches.in_process import BatchClient, LineAnswer, post
from tests.bei.server.app import App
from tests.bei.server.conftest import MakeApp
from tests.support.artifacts import LIMITS
from tests.support.services import run_async

ANYBODY = BatchClient(flow=7)
JSON_TYPE = (b"content-type", b"application/json")


def ask(app: App, url: str, body: object, client: BatchClient = ANYBODY) -> LineAnswer:
    found: LineAnswer = app.run(post(app.asgi, url, json.dumps(body).encode(), client))
    return found


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/embeddings", {"input": ["a text", "another"]}),
        ("/embed", {"inputs": "a text"}),
        ("/tei/embed", {"inputs": "a text"}),
        ("/cohere/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/tokenize", {"inputs": "a text"}),
        ("/v1/embeddings", {"input": ""}),
        ("/v1/embeddings", {"input": "a text", "model": "other"}),
        ("/tei/embed", {"inputs": []}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/openai/deployments/%74iny/embeddings", {"input": "a text"}),
        ("/nothing", {}),
        ("/health", {}),
    ],
)
def test_a_line_gets_what_a_client_gets(app: App, url: str, body: Any) -> None:
    answer = ask(app, url, body)
    same = app.run(app.client.post(url, json=body))
    assert (answer.status, json.loads(answer.body)) == (same.status_code, same.json())
    assert len(answer.request_id) == 32
    assert answer.retry_after_s == 0
    assert b"\n" not in answer.body


def test_an_answer_that_is_sent_in_pieces_is_whole(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS))
    answer = ask(app, "/v1/embeddings", {"input": ["hello"] * 4_000})
    assert answer.status == 200
    assert len(answer.body) > 256_000
    assert len(json.loads(answer.body)["data"]) == 4_000


def test_a_line_is_bulk_work_of_its_client(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS))
    assert ask(app, "/v1/embeddings", {"input": "hello"}).status == 200
    assert 'lane="bulk"' in app.get("/metrics").text


def test_a_line_that_asks_for_another_lane_is_told_that_it_is_of_a_batch(app: App) -> None:
    answer = ask(app, "/v1/embeddings", {"input": "a", "service_tier": "priority"})
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["param"]) == (400, "service_tier")
    assert error["message"].endswith("lines of a batch are bulk: leave service_tier out.")
    assert ask(app, "/v1/embeddings", {"input": "a", "service_tier": "flex"}).status == 200


def test_half_a_character_is_an_error_of_its_line(app: App) -> None:
    answer = ask(app, "/v1/embeddings", {"input": "caf\u00e9 \ud83d"})
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (400, "invalid_text")


def test_a_line_has_the_rights_of_its_key_and_no_secret(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), api_keys=("0123456789abcdef",))
    body = {"input": "hello"}
    assert ask(app, "/v1/embeddings", body).status == 401
    spec = KeySpec("backfill", (), requests_per_second=1.0)
    client = BatchClient(7, Key(spec, "backfill"))
    assert ask(app, "/v1/embeddings", body, client).status == 200
    limited = ask(app, "/v1/embeddings", body, client)
    assert limited.status == 429
    assert 0.5 < limited.retry_after_s <= 1.1


def test_an_answer_of_bytes_is_an_error_of_its_line(app: App) -> None:
    answer = ask(app, "/pooling", {"input": "hello", "encoding_format": "bytes"})
    assert answer.status == 406
    assert json.loads(answer.body)["error"]["code"] == "not_acceptable"


def test_a_refusal_is_known_by_its_header_whatever_status_its_dialect_gives_it() -> None:
    """NIM's is the status of a dead engine."""

    async def answer(headers: list[tuple[bytes, bytes]]) -> LineAnswer:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            start = {"type": "http.response.start", "status": 503, "headers": [*headers, JSON_TYPE]}
            await send(start)
            await send({"type": "http.response.body", "body": b"{}"})

        return await post(app, "/nim/v1/embeddings", b"{}", ANYBODY)

    async def test() -> None:
        assert (await answer([(b"retry-after", b"1"), (b"retry-after-ms", b"250")])).retry_after_s == 0.25
        assert (await answer([])).retry_after_s == 0

    run_async(test)


def test_a_bug_costs_its_own_line_the_answer() -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("a bug")

    async def halved(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"[1,", "more_body": True})

    async def test() -> None:
        answer = await post(broken, "/embed", b"{}", ANYBODY)
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (500, "bei_error")
        ended = await post(halved, "/embed", b"{}", ANYBODY)
        assert (ended.status, ended.retry_after_s) == (429, 1.0)

    run_async(test)
