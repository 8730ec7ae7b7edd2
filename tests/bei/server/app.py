"""The application over fake engines, on an event loop of its own, called as if it were synchronous."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx

from bei.artifact.manifest import Artifact
from bei.config.settings import ServeConfig
from bei.core import Engine
from bei.metrics.registry import Metrics
from bei.server.app import create_app
from bei.server.batches.worker import BatchWorker, worker_of
from bei.server.dialects.table import all_dialects
from bei.server.endpoint.models import Models
from bei.server.server_parts import ServerParts
from bei.server.status.whole_server import WholeServer
from tests.support.engines import DEADLINE_S
from tests.support.services import make_service

if TYPE_CHECKING:
    from bei.server.telemetry.spans import Tracing

ROUTE = "/v1/embeddings"


class App:
    """``create_app`` with one model per pair of artifact and engine; ``settings`` are those of ServeConfig.

    ``tracing`` gets its requests.

    Token ids are accepted on every route unless a test says otherwise: they say exactly what an engine gets.
    """

    def __init__(self, *served: tuple[Artifact, Engine], tracing: Tracing | None = None, **settings: Any) -> None:
        settings = {"openai_token_ids": "accept", **settings}
        self.loop = asyncio.new_event_loop()
        self.metrics = Metrics()
        self.models = self.run(self._load(served, settings))
        config = ServeConfig(**settings)
        self.dialects = all_dialects(self.models, config, WholeServer(self.models, self.metrics))
        self.parts = replace(ServerParts.of(config, self.metrics), tracing=tracing)
        self.keys = self.parts.keys
        self.asgi = create_app(self.models, self.parts)
        self.batches = self.run(self._worker())
        transport = httpx.ASGITransport(self.asgi, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://bei.test")

    async def _worker(self) -> BatchWorker | None:
        return worker_of(self.parts.batches, self.asgi, self.keys, self.parts.config)

    async def _load(self, served: Sequence[tuple[Artifact, Engine]], settings: dict[str, Any]) -> Models:
        services = [make_service(artifact, engine, self.metrics, **settings) for artifact, engine in served]
        return Models(services, aliases=settings.get("alias", ()))

    def run(self, work: Any) -> Any:
        """Run a coroutine on the loop to its end."""
        return self.loop.run_until_complete(asyncio.wait_for(work, DEADLINE_S))

    def get(self, path: str) -> httpx.Response:
        """GET."""
        return self.request("GET", path)

    def request(self, method: str, path: str, content: bytes | None = None) -> httpx.Response:
        """Any method, with or without a body."""
        response: httpx.Response = self.run(self.client.request(method, path, content=content))
        return response

    def post(self, content: bytes | AsyncIterator[bytes]) -> httpx.Response:
        """POST a raw body to the embeddings route; an iterator is sent in chunks without a length."""
        response: httpx.Response = self.run(self.client.post(ROUTE, content=content))
        return response

    def embed(self, **body: object) -> httpx.Response:
        """POST a body of these fields."""
        return self.post(json.dumps(body).encode())

    def close(self) -> None:
        """End the services' threads and the loop."""
        self.run(self.client.aclose())
        if self.batches is not None:
            self.batches.begin_drain()
            self.run(self.batches.wait_drained())
            self.batches.close()
        self.models.close()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.run(asyncio.sleep(0))
        self.loop.close()


def check_error(response: httpx.Response, status: int, message: str = "", **fields: object) -> str:
    """Assert that ``response`` is an OpenAI error of ``status`` with ``message`` in its message, which is returned."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error", "detail"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.json()["detail"] == error["message"]
    assert message in error["message"], error["message"]
    assert "Traceback" not in response.text
    assert ".py" not in response.text
    assert {name: error[name] for name in fields} == fields
    return str(error["message"])
