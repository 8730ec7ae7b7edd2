"""The framework's routes: a request that ends with the server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from bei.engine.fake import FakeEngine
from tests.bei.server.conftest import MakeApp
from tests.support.artifacts import LIMITS


@pytest.mark.parametrize(
    "path",
    ["/v1/embeddings", "/openai/deployments/tiny/embeddings", "/v1/extract/org/tiny", "/v1/files", "/v1/batches"],
)
def test_a_request_that_has_not_arrived_when_the_server_ends_is_told_so_on_every_route(
    path: str, make_app: MakeApp, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(FakeEngine(LIMITS), batch_dir=str(tmp_path / "batches"))
    headers = [(b"content-type", b"multipart/form-data; boundary=edge"), (b"content-length", b"100")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    sent: list[Message] = []

    async def run() -> None:
        waits = asyncio.Event()

        async def receive() -> Message:
            waits.set()
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

        async def send(message: Message) -> None:
            sent.append(message)

        task = asyncio.ensure_future(app.asgi(scope, receive, send))
        await waits.wait()
        task.cancel()  # as uvicorn does
        await task

    app.run(run())
    start, body = sent
    error: dict[str, Any] = json.loads(body["body"])["error"]
    assert (start["status"], error["code"]) == (503, "shutting_down")
    assert "another replica" in error["message"]
    assert (b"connection", b"close") in start["headers"]
    assert "Traceback" not in caplog.text
