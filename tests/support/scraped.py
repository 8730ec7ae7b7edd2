"""``/metrics`` of an application that has answered something of every kind: all metrics have values and labels."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

from tests.bei.server.app import App
from tests.bei.server.kinds import save_kind
from tests.support.artifacts import LIMITS
from tests.support.engines import PickyEngine

KEY = "0123456789abcdef"
POISON = 7


@cache
def scraped() -> str:
    """The exposition text."""
    with tempfile.TemporaryDirectory() as folder:
        artifact, _ = save_kind(Path(folder) / "embedder", "embedder")
        engine = PickyEngine(LIMITS, lambda sequence: POISON in sequence)
        app = App(
            (artifact, engine), save_kind(Path(folder) / "reranker", "reranker"), api_keys=(KEY,), cache_megabytes=1
        )
        for service in app.models:
            app.metrics.artifact(service.name, service.manifest.digest)
        app.metrics.restarted("front-0")
        app.metrics.hung("front-0")
        try:
            for path, body in (
                ("/v1/embeddings", {"input": [[1, 2], [3]], "model": "embedder"}),
                ("/v1/embeddings", {"input": [[number] for number in range(10, 40)], "model": "embedder"}),
                ("/v1/embeddings", {"input": [[1, 2]], "model": "embedder"}),
                ("/v1/embeddings", {"input": [[POISON]], "model": "embedder"}),
                ("/v1/embeddings", {"input": []}),
                ("/embed", {"inputs": "the cat " * 20}),
                ("/rerank", {"query": "cat", "texts": ["the", "world"]}),
                ("/tokenize", {"inputs": "cat", "model": "embedder"}),
                ("/no/such/route", {}),
            ):
                content, headers = json.dumps(body).encode(), {"X-Api-Key": KEY}
                app.run(app.client.post(path, content=content, headers=headers))
            return app.get("/metrics").text
        finally:
            app.close()
