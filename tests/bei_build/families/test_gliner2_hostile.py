"""Schemas of any form are answered, or refused by name: nested, in themselves, huge, or not to be told apart."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bei import Model
from bei.artifact.manifest import Artifact
from bei.errors import InvalidRequestError, MalformedRequestError
from tests.bei.server.app import App, check_error
from tests.bei_build.families.test_gliner2 import built
from tests.support.builds import open_engine

TEXT = "the cat sat on a mat"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return built(tmp_path_factory.mktemp("gliner2"), none=-20.0)


@pytest.fixture(scope="module")
def app(artifact: Artifact) -> Iterator[App]:
    found = App((artifact, open_engine(artifact.engine_dir, artifact.manifest)))
    yield found
    found.close()


@pytest.fixture(scope="module")
def model(artifact: Artifact) -> Iterator[Model]:
    with Model(artifact.path, tune="off") as found:
        yield found


names = st.sampled_from(["cat", "cat ", "a b", "", "\t", "[P]", "b::str", "head", "\u200b"]) | st.text(max_size=6)
numbers = st.floats(0, 1) | st.floats(allow_nan=False, allow_infinity=False) | st.integers()
anything: Any = st.recursive(
    st.none() | st.booleans() | numbers | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


def forms(**fields: Any) -> Any:
    """Objects with some of ``fields``, of which one may be of any form, and perhaps one that nobody knows."""
    some = st.fixed_dictionaries({}, optional={name: value | anything for name, value in fields.items()})
    whole = st.fixed_dictionaries({}, optional=fields)
    return whole | whole | some | st.dictionaries(names, anything, max_size=2)


labels = st.lists(names, max_size=4) | st.dictionaries(
    names, names | forms(description=names, threshold=numbers, dtype=st.sampled_from(["list", "str"])), max_size=3
)
fields = st.lists(
    names | forms(name=names, dtype=st.sampled_from(["list", "str"]), choices=st.lists(names, max_size=3)), max_size=3
)
structures = st.dictionaries(names, fields | forms(fields=fields), max_size=2)
relations = st.lists(names, max_size=3) | st.dictionaries(
    names, names | forms(description=names, threshold=numbers), max_size=3
)
classes = st.lists(
    forms(
        task=names,
        labels=st.lists(names, max_size=4) | st.dictionaries(names, names, max_size=3),
        multi_label=st.booleans(),
        cls_threshold=numbers,
        top_k=st.integers(),
        class_act=st.sampled_from(["auto", "sigmoid", "softmax"]),
        prompt=names,
        examples=st.lists(st.lists(names, min_size=2, max_size=2), max_size=2),
    ),
    max_size=2,
)
schemas = forms(labels=labels, structures=structures, relations=relations, classifications=classes, threshold=numbers)


@settings(max_examples=150, deadline=None)
@given(schema=schemas)
def test_any_schema_is_answered_or_refused_by_name(schema: dict[str, Any], app: App) -> None:
    body = json.dumps({**schema, "model": "gliner2", "input": TEXT}).encode("utf-8", "surrogatepass")
    response = app.request("POST", "/v1/extract", body)
    if response.status_code != 200:
        check_error(response, 400)
        return
    (found,) = response.json()["data"]
    asked = {name: schema.get(name) or () for name in ("structures", "relations")}
    assert all(found.get(name, {}).keys() == {*given} for name, given in asked.items())
    tasks = {one["task"] for one in schema.get("classifications") or ()}
    assert found.get("classifications", {}).keys() == tasks
    assert all(span["text"] == TEXT[span["start"] : span["end"]] for span in found["spans"])


def test_a_schema_in_itself_is_refused(model: Model) -> None:
    """It was a RecursionError."""
    itself: dict[str, Any] = {}
    itself["a"] = itself
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for value in (itself, {"a": deep}):
        for one in ({"labels": value}, {"structures": value}, {"relations": value}, {"classifications": [value]}):
            with pytest.raises(MalformedRequestError, match="nested too deeply, or in itself"):
                model.extract_schema([TEXT], **one)


@pytest.mark.parametrize("name", ["labels", "structures", "relations", "classifications"])
def test_what_is_no_list_or_object_is_refused(name: str, model: Model) -> None:
    """It was a TypeError."""
    for value in (5, True, [5], *([["a"]] if name in ("structures", "classifications") else [])):
        schema: Any = {name: value}
        with pytest.raises(MalformedRequestError, match=name):
            model.extract_schema([TEXT], **schema)


def test_a_label_may_be_the_text(model: Model) -> None:
    classes = [{"task": TEXT, "labels": [TEXT, "another"]}]
    (found,) = model.extract_schema([TEXT], labels=[TEXT], relations=[TEXT], classifications=classes, threshold=0.0)
    assert {span.label for span in found.spans} == {TEXT}
    assert found.classifications.keys() == {TEXT}


HUGE: list[dict[str, Any]] = [
    {"labels": [f"label {place}" for place in range(10_000)]},
    {"labels": {f"label {place}": "what it means" for place in range(10_000)}},
    {"labels": {"a": "cat the " * 500_000}},
    {"structures": {f"a {place}": ["b"] for place in range(10_000)}},
    {"structures": {"a": [{"name": "b", "choices": [f"choice {place}" for place in range(10_000)]}]}},
    # For each structure the words of all were read, before there were too many of them.
    {"structures": {f"a {place}": [{"name": "b", "choices": ["c", "d"]}] for place in range(10_000)}},
    {"structures": {f"a {place}": [{"name": "b", "choices": ["c"] * 100}] for place in range(200)}},
    {"relations": [f"a {place}" for place in range(10_000)]},
    {"classifications": [{"task": "a", "labels": [f"label {place}" for place in range(10_000)]}]},
    {"classifications": [{"task": "a", "labels": ["b", "c"], "examples": [["cat the", "b"]] * 10_000}]},
    # Each example was looked for among all labels.
    {
        "classifications": [
            {"task": "a", "labels": [*map(str, range(100))], "examples": [["cat", "99"]] * 200_000},
        ]
    },
    {"labels": ["a"], "threshold": {f"label {place}": 0.5 for place in range(10_000)}},
]


@pytest.mark.parametrize("schema", HUGE, ids=[str(place) for place in range(len(HUGE))])
def test_a_huge_schema_is_refused_at_once(schema: Any, model: Model) -> None:
    size = len(json.dumps(schema))
    tracemalloc.start()
    began_s = time.process_time()
    try:
        with pytest.raises(InvalidRequestError) as refused:
            model.extract_schema([TEXT], **schema)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.process_time() - began_s < 10  # under tracemalloc; none may be quadratic
    assert most < 40 * size + 20_000_000
    assert len(str(refused.value)) < 300


def test_examples_of_labels_are_not_copied_for_each_text(app: App) -> None:
    """One example of 4 MB and 8,192 texts were 32 GB, and many of them were put together two by two."""
    for examples in ([["cat " * 10_000, "a"]], [["cat", "b"]] * 5_000):
        body = json.dumps({"input": ["a"] * 4_000, "labels": ["a", "b"], "examples": examples}).encode()
        tracemalloc.start()
        began_s = time.process_time()
        try:
            response = app.request("POST", "/v1/classify", body)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        check_error(response, 400, "read")
        assert most < 40_000_000
        assert time.process_time() - began_s < 5


@pytest.mark.parametrize("path", ["/", "/pipeline/zero-shot-classification/gliner2"])
def test_labels_of_a_pipeline_are_scored_by_a_model_that_finds_spans_too(path: str, app: App) -> None:
    """They were parameters to be written beside inputs."""
    body = {"inputs": TEXT, "parameters": {"candidate_labels": ["good", "bad"]}}
    found = app.request("POST", path, json.dumps(body).encode())
    asked = json.dumps({"input": TEXT, "labels": ["good", "bad"]}).encode()
    expected = app.request("POST", "/v1/classify", asked).json()["data"][0]["predictions"]
    assert found.json() == sorted(expected, key=lambda one: -one["score"])
