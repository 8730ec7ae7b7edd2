"""Examples of /openapi.json: a server with a model of the kind accepts each request, and its answer has that form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from bei.artifact.manifest import Classification
from bei.core import Limits
from bei.engine.fake import FakeEngine
from bei.server.http.errors import JSON
from tests.api_docs import page
from tests.bei.server.app import App
from tests.bei.server.kinds import KINDS, KindEngine, save_kind
from tests.support.artifacts import VOCAB_SIZE

LIMITS = Limits(max_num_tokens=512, max_batch_size=8, max_seq_len=128)
PAGE = page()
OPERATIONS = [(method, path) for path, item in PAGE["paths"].items() for method in item]
# The model of natural language inference, and what a model without prompts, MiniLM, has.
NLI = Classification(labels=["contradiction", "neutral", "entailment"], function="softmax")
FIELDS: Mapping[str, Mapping[str, Any]] = {"embedder": {"prompts": {}}, "nli": {"classification": NLI}}
# Objects whose names are data: labels of entities, statuses.
BY_NAME = {"results", "answered"}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, App]]:
    """One with each kind of model alone."""
    folder = tmp_path_factory.mktemp("examples")
    apps = {kind: _app(folder / kind, kind) for kind in (*KINDS, "nli")}
    yield apps
    for app in apps.values():
        app.close()


def _app(folder: Path, kind: str) -> App:
    base = "classifier" if kind == "nli" else kind
    limits = {"max_num_tokens": LIMITS.max_num_tokens, "max_seq_len": LIMITS.max_seq_len}
    artifact, _ = save_kind(folder, base, **limits, **FIELDS.get(kind, {}))
    engine = FakeEngine(LIMITS) if base == "embedder" else KindEngine(KINDS[base][1], LIMITS)
    return App((artifact, engine), openai_token_ids="refuse")


def operation_of(method: str, path: str) -> Any:
    return PAGE["paths"][path][method]


def request_of(operation: Any) -> Any:
    """The example of the body; None: the route reads none."""
    if "requestBody" not in operation:
        return None
    return operation["requestBody"]["content"][JSON]["example"]


def known_ids(node: Any) -> Any:
    """``node`` with token ids that the tiny tokenizer has."""
    if isinstance(node, dict):
        return {name: known_ids(value) for name, value in node.items()}
    if isinstance(node, list):
        return [known_ids(value) for value in node]
    return node % VOCAB_SIZE % 80 if type(node) is int else node


def asked(app: App, method: str, path: str, body: Any) -> httpx.Response:
    (service,) = app.models
    path = path.replace("{name}", service.name).replace("{model}", service.name)
    return app.request(method.upper(), path, None if body is None else json.dumps(known_ids(body)).encode())


def is_alike(example: Any, answer: Any) -> bool:
    """True if both have the same fields, of the same types of JSON. null is like anything: what may be null is said by
    the schema."""
    if example is None or answer is None:
        return True
    if isinstance(example, dict) and isinstance(answer, dict):
        return example.keys() == answer.keys() and all(
            is_alike(_values(name, example[name]), _values(name, answer[name])) for name in example
        )
    if isinstance(example, list) and isinstance(answer, list):
        return all(
            any(is_alike(one, other) for other in others)
            for ones, others in ((example, answer), (answer, example))
            for one in ones
        )
    return kind_of(example) == kind_of(answer)


def _values(name: str, node: Any) -> Any:
    """``node``, or what stands in an object whose names are data; None: nothing."""
    return [*node.values()] or None if name in BY_NAME and isinstance(node, dict) else node


def kind_of(value: object) -> type:
    return float if type(value) is int else type(value)


def check_schema(schema: Any, body: Any) -> None:
    """Raise ValidationError unless ``body`` is as the page says."""
    Draft202012Validator({"allOf": [schema], "components": PAGE["components"]}).validate(body)


def test_the_example_of_an_error_has_its_form_and_says_what_is_wrong() -> None:
    without = []
    for response in PAGE["components"]["responses"].values():
        content = response["content"][JSON]
        if "example" in content:
            check_schema(content["schema"], content["example"])
            assert response["description"].partition(". ")[0].rstrip(".") in json.dumps(content["example"])
        else:
            without.append(content["schema"]["anyOf"][0]["$ref"].rpartition("/")[2])
    assert without == ["Dead", "NotReady"]  # the probes' own


def test_what_is_alike() -> None:
    assert is_alike([{"a": 1, "b": None}], [{"a": 2.5, "b": "x"}, {"a": 1, "b": "y"}])
    for other in ([{"a": 1}], [{"a": "1", "b": 1}], [{"a": True, "b": 1}], [], {"a": 1, "b": 1}):
        assert not is_alike([{"a": 1, "b": 1}], other)
    assert is_alike({"results": {"PER": 0.5}}, {"results": {"LOC": 1}})
    assert not is_alike({"results": {"PER": 0.5}}, {"results": {"LOC": "x"}})


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=[f"{method} {path}" for method, path in OPERATIONS])
def test_the_example_of_a_route_is_what_it_reads_and_answers(
    servers: Mapping[str, App], method: str, path: str
) -> None:
    operation = operation_of(method, path)
    body, documented = request_of(operation), operation["responses"]["200"].get("content", {})
    answers = {kind: asked(app, method, path, body) for kind, app in servers.items()}
    accepted = {kind: answer for kind, answer in answers.items() if answer.status_code == 200}
    assert accepted, {kind: answer.text for kind, answer in answers.items()}
    answer = next(iter(accepted.values()))
    if not documented:
        assert answer.content == b""
        return
    media_type, content = next(iter(documented.items()))
    assert answer.headers["content-type"] == media_type
    check_schema(content["schema"], content["example"])
    if body is not None:
        check_schema(operation["requestBody"]["content"][JSON]["schema"], body)
    if media_type == JSON:
        check_schema(content["schema"], answer.json())
        assert is_alike(content["example"], answer.json()), answer.json()
    else:
        assert answer.text.startswith(content["example"].split()[0])
