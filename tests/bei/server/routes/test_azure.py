"""Azure OpenAI's paths: OpenAI's answers, for the model that the path or the body names."""

from __future__ import annotations

from typing import Any

import pytest

from bei.artifact.manifest import Artifact
from bei.engine.fake import FakeEngine
from tests.bei.server.app import App, check_error
from tests.bei.server.conftest import MakeApp
from tests.bei.server.kinds import post
from tests.support.artifacts import LIMITS

QUERY = "?api-version=2024-10-21"
KEY = "0123456789abcdef"


@pytest.mark.parametrize("query", ["", QUERY])
@pytest.mark.parametrize("given", [None, "tiny", "nobody"])
def test_the_deployment_is_the_model(
    make_app: MakeApp, second_artifact: Artifact, query: str, given: str | None
) -> None:
    app = make_app(FakeEngine(LIMITS), (second_artifact, FakeEngine(LIMITS)))
    body = {"input": ["cat", "the cat"], "encoding_format": "base64"}
    expected = post(app, "/v1/embeddings", **body, model="org/second").json()
    asked = body if given is None else {**body, "model": given}
    for deployment in ("org/second", "second", "org%2Fsecond"):
        found = post(app, f"/openai/deployments/{deployment}/embeddings{query}", **asked)
        assert (found.status_code, found.json()) == (200, expected)


def test_the_newer_paths_are_openai_s(app: App) -> None:
    body = {"input": "cat", "model": "tiny"}
    assert post(app, f"/openai/v1/embeddings{QUERY}", **body).json() == post(app, "/v1/embeddings", **body).json()
    for path in ("/models", "/v1/models", "/v1/models/tiny"):
        assert app.get(f"/openai{path}{QUERY}").json() == app.get(path).json()


def test_errors_are_openai_s(app: App) -> None:
    missing = post(app, "/openai/deployments/nobody/embeddings", input="cat")
    check_error(missing, 404, "Served: tiny", code="model_not_found", param="model")
    check_error(post(app, "/openai/deployments/tiny/embeddings", input=""), 400, "empty text", param="input")
    check_error(app.get("/openai/deployments/tiny/embeddings"), 405)
    check_error(post(app, "/openai/deployments/tiny/chat/completions"), 404, code="route_not_found")


def test_the_key_is_azure_s(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), api_keys=(KEY,))

    def status(**headers: str) -> Any:
        path = "/openai/deployments/tiny/embeddings"
        return app.run(app.client.post(path, json={"input": "cat"}, headers=headers)).status_code

    assert (status(**{"api-key": KEY}), status(**{"api-key": "another"}), status()) == (200, 401, 401)


def test_service_tier_is_read_and_answered(app: App) -> None:
    found = post(app, "/openai/deployments/tiny/embeddings", input="cat", service_tier="flex").json()
    assert found["service_tier"] == "flex"
