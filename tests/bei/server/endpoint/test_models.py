"""``GET /v1/models`` and the table of served models."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from bei.artifact.manifest import Artifact, CheckpointSource, Manifest
from bei.artifact.model_names import DEFAULT_MODEL
from bei.engine.fake import FakeEngine
from bei.errors import ConfigError
from bei.server.endpoint.aliases import alias_names
from bei.server.endpoint.models import Models
from tests.bei.artifact.test_model_names import SPELLINGS
from tests.bei.server.app import App, check_error
from tests.bei.server.conftest import MakeApp
from tests.bei.server.kinds import post
from tests.support.artifacts import LIMITS, save_artifact


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
        "alias_of": None,
        "adapter_of": None,
        "adapters": [],
        "max_model_len": 16,
        "max_entities": None,
        "embedding_dimension": 8,
        "tasks": ["embed"],
        "input_modalities": ["text"],
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


@pytest.mark.parametrize("name", ["nobody", "tiny/x", "%ff", "%00", "☃"])
def test_an_unknown_model_is_404_and_names_those_that_are_served(app: App, name: str) -> None:
    check_error(app.get(f"/v1/models/{name}"), 404, "Served: tiny", param="model", code="model_not_found")


def test_a_name_of_many_characters_is_no_model_s_and_is_not_kept(app: App) -> None:
    response = app.embed(input="a", model="a-" * 10_000)
    check_error(
        response,
        404,
        "a name of 20000 characters is not served here. Served: tiny",
        param="model",
        code="model_not_found",
    )
    assert len(response.content) < 1000


@pytest.mark.parametrize("called", SPELLINGS)
def test_a_request_may_call_a_model_by_each_of_its_names(tmp_path: Path, called: str) -> None:
    """Without a warning that no model is called so."""
    source = CheckpointSource(
        model=DEFAULT_MODEL.package, kind="package", revision=None, sha256="0" * 64, transformers="5.24.0"
    )
    artifact = save_artifact(tmp_path / "minilm", name=DEFAULT_MODEL.name, source=source)
    app = App((artifact, FakeEngine(LIMITS)))
    try:
        assert app.get(f"/v1/models/{called}").json()["id"] == DEFAULT_MODEL.name
        for path in ("/v1/embeddings", "/tei/v1/embeddings"):
            response = app.run(app.client.post(path, json={"model": called, "input": "cat"}))
            assert response.status_code == 200
            assert "x-bei-warning" not in response.headers
    finally:
        app.close()


def test_a_name_that_several_models_may_have_is_refused_with_theirs(
    make_app: MakeApp, second_artifact: Artifact, tmp_path: Path
) -> None:
    third = save_artifact(tmp_path / "third", name="other/second")
    app = make_app(FakeEngine(LIMITS), (second_artifact, FakeEngine(LIMITS)), (third, FakeEngine(LIMITS)))
    response = app.get("/v1/models/second")
    check_error(response, 400, "'second' means several served models; set model to one of org/second, other/second")
    assert app.get("/v1/models/other/second").json()["id"] == "other/second"


def test_the_end_of_a_name_is_enough_where_one_model_has_it(make_app: MakeApp, second_artifact: Artifact) -> None:
    app = make_app(FakeEngine(LIMITS), (second_artifact, FakeEngine(LIMITS)))
    assert app.get("/v1/models/second").json()["id"] == "org/second"


def test_two_models_of_one_name_are_a_configuration_error_that_names_the_way_out(
    make_app: MakeApp,
) -> None:
    (service,) = make_app(FakeEngine(LIMITS)).models
    with pytest.raises(ConfigError, match="Two models are called 'tiny': build one of them with another --name"):
        Models([service, service])


EMBED = {"input": "cat"}


def test_an_alias_is_another_name_of_the_model(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), alias=("text-embedding-ada-002",))
    found = app.embed(**EMBED, model="text-embedding-ada-002")
    assert found.json() == app.embed(**EMBED, model="tiny").json()
    assert "x-bei-warning" not in found.headers
    first, second = app.get("/v1/models").json()["data"]
    assert second == {**first, "id": "text-embedding-ada-002", "alias_of": "tiny"}
    assert app.get("/v1/models/text-embedding-ada-002").json() == second
    assert app.get("/v1/models/tiny").json() == first
    for path, field in (("/vllm/v1/models", "data"), ("/infinity/models", "data")):
        assert [model["id"] for model in app.get(path).json()[field]] == ["tiny", "text-embedding-ada-002"]
    message = check_error(app.embed(**EMBED, model="other"), 404, "Served: tiny, text-embedding-ada-002", param="model")
    assert message.endswith("Name one of them, or start the server with --alias or --any-model-name.")


def test_of_several_models_an_alias_names_one(make_app: MakeApp, second_artifact: Artifact) -> None:
    both = (second_artifact, FakeEngine(LIMITS))
    app = make_app(FakeEngine(LIMITS), both, alias=("a=second", "b/c=org/second", "d=tiny"))
    for alias, name in (("a", "org/second"), ("b/c", "org/second"), ("d", "tiny")):
        assert app.embed(**EMBED, model=alias).json()["model"] == name
        assert app.get(f"/v1/models/{alias}").json()["alias_of"] == name
    check_error(app.embed(**EMBED), 400, "set model to one of tiny, org/second.", param="model")


@pytest.mark.parametrize(
    ("alias", "message"),
    [
        ("a", "does not say of which model: write a=MODEL, with one of org/second, tiny"),
        ("a=other", "means no served model: name one of org/second, tiny"),
        ("tiny=org/second", "is the name of a served model"),
        ("=tiny", "must be a name, or ALIAS=MODEL"),
        ("a=", "must be a name, or ALIAS=MODEL"),
        ("a\nb=tiny", "must be a name, or ALIAS=MODEL"),
    ],
)
def test_a_wrong_alias_ends_the_start(second_artifact: Artifact, alias: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        alias_names((alias,), [second_artifact.manifest, called("tiny", second_artifact)])


def called(name: str, artifact: Artifact) -> Manifest:
    return msgspec.structs.replace(artifact.manifest, name=name)


def test_an_alias_of_two_models_is_refused(second_artifact: Artifact) -> None:
    served = [second_artifact.manifest, called("tiny", second_artifact)]
    with pytest.raises(ConfigError, match="given to tiny and to org/second: keep one"):
        alias_names(("a=tiny", "a=org/second"), served)
    assert alias_names(("a=tiny", "a=tiny"), served) == {"a": "tiny"}


def test_any_name_is_answered_only_where_the_operator_wants_it(make_app: MakeApp, second_artifact: Artifact) -> None:
    app = make_app(FakeEngine(LIMITS), any_model_name=True)
    for path in ("/v1/embeddings", "/jina/v1/embeddings"):
        found = post(app, path, **EMBED, model="text-embedding-3-small")
        assert (found.status_code, found.json()["model"]) == (200, "tiny")
        assert found.headers["x-bei-warning"] == "no model is called text-embedding-3-small: tiny has answered"
    assert app.get("/v1/models/text-embedding-3-small").status_code == 404
    two = make_app(FakeEngine(LIMITS), (second_artifact, FakeEngine(LIMITS)), any_model_name=True)
    check_error(two.embed(**EMBED, model="other"), 400, "set model to one of tiny, org/second.", param="model")
    check_error(make_app(FakeEngine(LIMITS)).embed(**EMBED, model="other"), 404, param="model")
