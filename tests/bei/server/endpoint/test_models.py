"""``GET /v1/models`` and the table of served models."""

from __future__ import annotations

import pytest

from bei.artifact.manifest import Artifact
from bei.engine.fake import FakeEngine
from bei.errors import ConfigError
from bei.server.endpoint.models import Models
from tests.bei.server.app import App, check_error
from tests.bei.server.conftest import MakeApp
from tests.support.artifacts import LIMITS


def test_models_are_listed_in_openai_form(make_app: MakeApp, second_artifact: Artifact) -> None:
    app = make_app(FakeEngine(LIMITS), (second_artifact, FakeEngine(LIMITS)))
    content = app.get("/v1/models").json()
    assert content["object"] == "list"
    assert [model["id"] for model in content["data"]] == ["tiny", "org/second"]
    first = content["data"][0]
    assert isinstance(first.pop("created"), int)
    assert first == {
        "id": "tiny",
        "object": "model",
        "owned_by": "bei",
        "max_model_len": 16,
        "embedding_dimension": 8,
        "tasks": ["embed"],
        "prompts": [],
        "labels": None,
        "target": "fake",
        "precision": "fp32",
    }


@pytest.mark.parametrize("name", ["tiny", "org/second"])
def test_one_model_is_described_by_its_name_even_with_a_slash(
    make_app: MakeApp, second_artifact: Artifact, name: str
) -> None:
    app = make_app(FakeEngine(LIMITS), (second_artifact, FakeEngine(LIMITS)))
    assert app.get(f"/v1/models/{name}").json()["id"] == name


@pytest.mark.parametrize("name", ["nobody", "tiny/", "%ff", "%00", "☃"])
def test_an_unknown_model_is_404_and_names_those_that_are_served(app: App, name: str) -> None:
    check_error(app.get(f"/v1/models/{name}"), 404, "Served: tiny", param="model", code="model_not_found")


def test_two_models_of_one_name_are_a_configuration_error_that_names_the_way_out(
    make_app: MakeApp,
) -> None:
    (service,) = make_app(FakeEngine(LIMITS)).models
    with pytest.raises(ConfigError, match="Two models are called 'tiny': build one of them with another --name"):
        Models([service, service])
