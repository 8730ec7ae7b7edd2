"""A request is admitted once, as a whole: a drain that begins in the same moment, or a full queue, refuses no half."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bei.config.settings import ServeConfig
from bei.server.app import inference_routes
from tests.bei.server.app import App, check_error
from tests.bei.server.dialects.wire import has_path
from tests.bei.server.endpoint.test_route import GOOD
from tests.bei.server.kinds import KINDS, save_kind

# Requests that need more than one call of the service, and whatever else routes take.
BODIES: list[tuple[str, dict[str, Any], str]] = [
    *((path, body, model) for path, (body, _, model) in GOOD.items()),
    ("/embed", {"inputs": ["cat", [5, 6], "the cat", [7]]}, "embedder"),
    ("/v1/embeddings", {"input": ["cat", "hello"]}, "embedder"),
    ("/openai/v1/embeddings", {"input": ["cat"]}, "embedder"),
    ("/openai/deployments/embedder/embeddings", {"input": ["cat"]}, "embedder"),
    ("/models/embedder", {"inputs": ["cat"]}, "embedder"),
    ("/models/embedder/pipeline/feature-extraction", {"inputs": ["cat"]}, "embedder"),
    ("/pipeline/feature-extraction/embedder", {"inputs": ["cat"]}, "embedder"),
    ("/v1/extract/spans", {"items": [{"text": "cat"}], "params": {"labels": ["the"]}}, "spans"),
    ("/v2/rerank", {"query": "a", "documents": ["the cat s", "b"], "max_tokens_per_doc": 4}, "reranker"),
]


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    app = App(*(save_kind(tmp_path / kind, kind) for kind in KINDS))
    yield app
    app.close()


def send(app: App, path: str, body: dict[str, Any], model: str) -> Any:
    return app.request("POST", path, json.dumps({**body, "model": model}).encode())


def test_every_route_is_tested_here() -> None:
    untested = [
        route.path
        for route in inference_routes(ServeConfig())
        if not any(has_path(route.path, path) for path, _, _ in BODIES)
    ]
    assert untested == []


@pytest.mark.parametrize(("path", "body", "model"), BODIES)
def test_a_drain_that_begins_when_a_request_was_accepted_refuses_nothing_of_it(
    app: App, path: str, body: dict[str, Any], model: str
) -> None:
    service = app.models.named(model)
    admitted = []
    admit = service.admit

    def admit_and_drain(*args: Any, **options: Any) -> Any:
        admitted.append(admit(*args, **options))
        app.models.begin_drain()
        return admitted[-1]

    service.admit = admit_and_drain
    assert send(app, path, body, model).status_code == 200
    assert len(admitted) == 1
    check_error(send(app, path, body, model), 503, code="shutting_down")
    app.run(app.models.wait_drained())
    assert service._admission.num_open == service._admission.num_tokens == 0
