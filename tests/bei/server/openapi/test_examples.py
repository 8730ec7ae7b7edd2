"""Examples of /openapi.json: a server with a model of the kind accepts each request, and its answer has that form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from bei.artifact.manifest import Classification
from bei.core import Limits
from bei.engine.fake import FakeEngine
from bei.server.batches import worker
from bei.server.batches.files_routes import JSON_LINES
from bei.server.batches.form_data import MULTIPART
from bei.server.http.errors import JSON
from tests.api_docs import page
from tests.bei.server.app import App
from tests.bei.server.batches.served import Clients
from tests.bei.server.dialects.test_voyage_context import MEAN, OUTPUTS, StatesEngine
from tests.bei.server.kinds import KINDS, KindEngine, save_kind
from tests.support.artifacts import VOCAB_SIZE

LIMITS = Limits(max_num_tokens=512, max_batch_size=8, max_seq_len=128)
PAGE = page()
OPERATIONS = [(method, path) for path, item in PAGE["paths"].items() for method in item]
# The model of natural language inference, and what a model without prompts, MiniLM, has.
NLI = Classification(labels=["contradiction", "neutral", "entailment"], function="softmax")
LATE = {"prompts": {}, "outputs": OUTPUTS, "embedding": MEAN}
FIELDS: Mapping[str, Mapping[str, Any]] = {"embedder": {"prompts": {}}, "nli": {"classification": NLI}, "late": LATE}
# Objects whose names are data: labels of entities, statuses, facts of a family.
BY_NAME = {"results", "answered", "model_info"}
# Routes that make what an id, of a path or of a body, stands for.
MAKERS = {"file_id": "/v1/files", "input_file_id": "/v1/files", "batch_id": "/v1/batches"}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, App]]:
    """One with each kind of model alone."""
    folder = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "_POLL_S", 0.01)
        apps = {kind: _app(folder / kind, kind) for kind in (*KINDS, "nli", "late")}
        yield apps
        for app in apps.values():
            app.close()


def _app(folder: Path, kind: str) -> App:
    base = {"nli": "classifier", "late": "embedder"}.get(kind, kind)
    limits = {"max_num_tokens": LIMITS.max_num_tokens, "max_seq_len": LIMITS.max_seq_len}
    artifact, _ = save_kind(folder, base, **limits, **FIELDS.get(kind, {}))
    engine = FakeEngine(LIMITS) if base == "embedder" else KindEngine(KINDS[base][1], LIMITS)
    engine = StatesEngine(LIMITS) if kind == "late" else engine
    return App((artifact, engine), openai_token_ids="refuse", batch_dir=str(folder / "batches"))


def operation_of(method: str, path: str) -> Any:
    return PAGE["paths"][path][method]


def request_of(operation: Any) -> tuple[str, Any]:
    """The media type of the body and its content; an empty one: the route reads none."""
    if "requestBody" not in operation:
        return "", {}
    content = operation["requestBody"]["content"]
    media_type = JSON if JSON in content else MULTIPART
    return media_type, content[media_type]


def known_ids(node: Any) -> Any:
    """``node`` with token ids that the tiny tokenizer has."""
    if isinstance(node, dict):
        return {name: known_ids(value) for name, value in node.items()}
    if isinstance(node, list):
        return [known_ids(value) for value in node]
    return node % VOCAB_SIZE % 80 if type(node) is int else node


def asked(app: App, method: str, path: str) -> httpx.Response:
    """The answer to the example of a route. What its ids stand for is made before, and an entry of its list."""
    media_type, content = request_of(operation_of(method, path))
    if method == "get" and path in MAKERS.values():
        made(app, path)
    named = re.sub(r"{(\w+)}", lambda found: meant(app, found[1], path), path)
    given: dict[str, Any] = {}
    if media_type == MULTIPART:
        fields = {**content["example"]}
        given = {"files": {"file": ("in.jsonl", fields.pop("file"))}, "data": fields}
    elif media_type:
        body = known_ids(content["example"])
        ids = {name: made(app, MAKERS[name]) for name in MAKERS.keys() & body}
        given = {"content": json.dumps({**body, **ids}).encode()}
    return Clients(app).ask(method.upper(), named, **given)


def made(app: App, path: str) -> str:
    """The id of what the example of a route makes."""
    return str(asked(app, "post", path).json()["id"])


def meant(app: App, name: str, path: str) -> str:
    """What a parameter of a path stands for."""
    if name == "task":
        return "feature-extraction"
    if path.endswith("/content"):
        return str(Clients(app).ended(made(app, MAKERS["batch_id"]))["output_file_id"])
    (service,) = app.models
    return made(app, MAKERS[name]) if name in MAKERS else service.name


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
    (_, request), documented = request_of(operation), operation["responses"]["200"].get("content", {})
    answers = {kind: asked(app, method, path) for kind, app in servers.items()}
    accepted = {kind: answer for kind, answer in answers.items() if answer.status_code == 200}
    assert accepted, {kind: answer.text for kind, answer in answers.items()}
    answer = next(iter(accepted.values()))
    if not documented:
        assert answer.content == b""
        return
    media_type, content = next(iter(documented.items()))
    assert answer.headers["content-type"] == media_type
    check_schema(content["schema"], content["example"])
    if request:
        check_schema(request["schema"], request["example"])
    if media_type == JSON:
        check_schema(content["schema"], answer.json())
        assert is_alike(content["example"], answer.json()), answer.json()
    elif media_type == JSON_LINES:
        example, lines = ([json.loads(one) for one in text.splitlines()] for text in (content["example"], answer.text))
        assert is_alike(example, lines), answer.text
    else:
        assert answer.text.startswith(content["example"].split()[0])
