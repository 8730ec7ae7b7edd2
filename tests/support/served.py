"""The application over one artifact, on an event loop of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from bei.artifact.manifest import Artifact
from bei.config.settings import ServeConfig
from bei.server.make_app import make_app


class Served:
    """Answers requests until ``close``."""

    def __init__(self, artifact: Artifact, **settings: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._app = self._run(make_app([artifact], ServeConfig(tune="off", **settings)))
        transport = httpx.ASGITransport(self._app.app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://bei.test")

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(work, 60))

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        """The answer to ``body`` as JSON."""
        found: httpx.Response = self._run(self._client.post(path, json=body, headers=headers))
        return found

    def get(self, path: str) -> httpx.Response:
        """The answer to a request without a body."""
        found: httpx.Response = self._run(self._client.get(path))
        return found

    def close(self) -> None:
        """End the application and its loop."""
        self._run(self._client.aclose())
        self._run(self._app.aclose())
        self._loop.close()
