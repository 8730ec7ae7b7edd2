"""``/v1/extract/{model}``: SIE's form, in JSON and MessagePack."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bei.artifact.manifest import Classification, OutputInfo
from bei.core import Limits
from bei.server.routes import sie_extract
from bei.server.routes.extract import PER_SPAN
from tests.bei.server.app import App, check_error
from tests.bei.server.kinds import KindEngine, answer, post
from tests.support.artifacts import save_artifact

PATH = "/v1/extract/spans"
PACKED = "application/msgpack"
ITEMS: list[dict[str, Any]] = [{"text": "the cat, hello world", "id": "first"}, {"text": "cat", "metadata": {"a": 1}}]
BODY: dict[str, Any] = {"items": ITEMS, "params": {"labels": ["cat", "the"], "options": {"threshold": 0.2}}}
NLI = ["contradiction", "neutral", "entailment"]


@pytest.fixture(scope="module")
def nli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    artifact = save_artifact(
        tmp_path_factory.mktemp("nli") / "nli",
        name="nli",
        tasks=["classify"],
        outputs=[OutputInfo(name="logits", dimension=3)],
        classification=Classification(labels=NLI, function="softmax"),
        embedding=None,
    )
    app = App((artifact, KindEngine({"logits": 3}, Limits(256, 8, 64))), max_client_batch_size=8)
    yield app
    app.close()


def send(app: App, path: str, content: bytes, content_type: str, accept: str = PACKED) -> httpx.Response:
    headers = {"Content-Type": content_type, "Accept": accept}
    response: httpx.Response = app.run(app.client.post(path, content=content, headers=headers))
    return response


def test_spans_of_large_answers_are_measured_off_the_event_loop(kinds: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million of them held it for most of a second."""
    noted: list[int] = []

    async def recorded(work: Any, num_numbers: int) -> Any:
        noted.append(num_numbers)
        return work()

    monkeypatch.setattr(sie_extract, "off_loop_if_large", recorded)
    found = answer(kinds, PATH, **BODY)
    count = sum(len(one["entities"]) for one in found["items"])
    assert count
    assert noted == [PER_SPAN * count]


@pytest.mark.parametrize("options", [{}, {"flat_ner": False}, {"multi_label": True, "flat_ner": None}])
def test_spans_are_those_of_the_other_form(options: dict[str, Any], kinds: App) -> None:
    params = {"labels": BODY["params"]["labels"], "options": {"threshold": 0.2, **options}}
    found = answer(kinds, PATH, items=ITEMS, params=params)
    asked: dict[str, Any] = {"input": [one["text"] for one in ITEMS], "labels": params["labels"], "threshold": 0.2}
    asked |= {"flat": options.get("flat_ner") is not False, "multi_label": options.get("multi_label", False)}
    expected = answer(kinds, "/v1/extract", model="spans", **asked)
    assert found["model"] == "spans"
    assert [one["id"] for one in found["items"]] == ["first", "item-1"]
    for one, wanted in zip(found["items"], expected["data"], strict=True):
        assert [*one] == ["id", "entities", "relations", "classifications", "objects", "data"]
        assert (one["relations"], one["classifications"], one["objects"], one["data"]) == ([], [], [], {})
        assert one["entities"] == [{**span, "bbox": None} for span in wanted["spans"]]
    assert found["items"][0]["entities"]


def test_the_threshold_is_a_half_where_it_is_not_said(kinds: App) -> None:
    bare = answer(kinds, PATH, items=ITEMS, params={"labels": ["cat"]})
    assert bare == answer(kinds, PATH, items=ITEMS, params={"labels": ["cat"], "options": {"threshold": 0.5}})
    assert bare != answer(kinds, PATH, items=ITEMS, params={"labels": ["cat"], "options": {"threshold": 0.0}})


@pytest.mark.parametrize("content_type", [PACKED, "application/x-msgpack", f"{PACKED}; charset=binary"])
def test_messagepack_is_read_and_answered(content_type: str, kinds: App) -> None:
    response = send(kinds, PATH, msgspec.msgpack.encode(BODY), content_type)
    assert response.status_code == 200
    assert response.headers["content-type"] == PACKED
    expected = answer(kinds, PATH, **BODY)
    for span in [span for one in expected["items"] for span in one["entities"]]:
        span["score"] = float(np.float32(span["score"]))  # which JSON has in fewer digits
    assert msgspec.msgpack.decode(response.content) == expected


@pytest.mark.parametrize(("kind", "multi_label"), [("single-label", False), ("multi-label", True), (None, False)])
def test_models_that_classify_have_all_labels_best_first(kind: str | None, multi_label: bool, nli: App) -> None:
    labels = ["cat", "world", "hello"]
    params: dict[str, Any] = {"labels": labels, "options": {"classification_type": kind}}
    found = answer(nli, "/v1/extract/nli", items=[{"text": "the cat"}], params=params)["items"][0]
    assert found["entities"] == []
    scores = [one["score"] for one in found["classifications"]]
    assert scores == sorted(scores, reverse=True)
    assert {one["label"] for one in found["classifications"]} == {*labels}
    if multi_label:
        assert sum(scores) != pytest.approx(1)
        return
    (wanted,) = answer(nli, "/v1/classify", input=["the cat"], labels=labels)["data"]
    expected = {one["label"]: one["score"] for one in wanted["predictions"]}
    assert {one["label"]: one["score"] for one in found["classifications"]} == pytest.approx(expected)
    least = float(np.median(scores)) + 1e-3
    params["options"] |= {"threshold": least}
    (some,) = answer(nli, "/v1/extract/nli", items=[{"text": "the cat"}], params=params)["items"]
    assert some["classifications"] == [one for one in found["classifications"] if one["score"] >= least]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"items": []}, "items is an empty list"),
    ({"items": [{"text": "a"}, {"id": "b"}]}, "items 1 has no text"),
    ({"items": [{"text": ""}]}, "items 0"),
    ({"items": [{"text": "a", "images": [{"data": "aGk="}]}]}, "items 0 has images"),
    ({"items": [{"text": "a", "document": {"data": "aGk="}}]}, "items 0 has document"),
    ({"items": "a"}, "items"),
    ({"items": [{"text": "a"}] * 9}, "9 inputs, the limit is 8"),
    ({"params": None}, "params has no labels"),
    ({"params": {"labels": []}}, "params has no labels"),
    ({"params": {"labels": ["a", " "]}}, "labels 1 is empty"),
    ({"params": {"labels": ["a", "a"]}}, "labels 1 is the same as labels 0"),
    ({"params": {"labels": [f"label {place}" for place in range(4_000)]}}, "send fewer"),
    ({"params": {"labels": ["a"], "output_schema": {"type": "object"}}}, "params has output_schema"),
    ({"params": {"labels": ["a"], "instruction": "find"}}, "params has instruction"),
    ({"params": {"labels": ["a"], "options": {"threshold": 2}}}, "threshold"),
    ({"params": {"labels": ["a"], "options": {"merge_adjacent_entities": True}}}, "merge_adjacent_entities"),
    ({"params": {"labels": ["a"], "options": {"profile": "fast"}}}, "profile"),
    ({"params": {"labels": ["a"], "options": {"classification_type": "multi-label"}}}, "has classification_type"),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("fields", "said"), WRONG, ids=[said for _, said in WRONG])
def test_what_does_not_fit_is_refused_by_name(fields: dict[str, Any], said: str, packed: bool, kinds: App) -> None:
    body = {**BODY, **fields}
    content = msgspec.msgpack.encode(body) if packed else json.dumps(body).encode()
    check_error(send(kinds, PATH, content, PACKED if packed else "application/json"), 400, said)


def test_models_that_cannot_and_options_of_other_models_are_refused(kinds: App, nli: App) -> None:
    check_error(post(kinds, "/v1/extract/embedder", **BODY), 400, "embedder", param="model")
    check_error(post(kinds, "/v1/extract/nobody/here", **BODY), 404, "nobody/here")
    params = {"labels": ["cat"], "options": {"flat_ner": True}}
    check_error(post(nli, "/v1/extract/nli", items=ITEMS, params=params), 400, "options has flat_ner")
    many = {"items": ITEMS, "params": {"labels": [*"abcde"]}}
    check_error(post(nli, "/v1/extract/nli", **many), 400, "10 inputs, the limit is 8")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        b"\xdc",
        b"\x81\xa5items" + b"\x91" * 90_000 + b"\x01",
        b"\x81\xa5items\x91\x81\xa4text\xa2\xff\xff",
    ],
)
def test_what_is_no_messagepack_is_refused(content: bytes, kinds: App) -> None:
    check_error(send(kinds, PATH, content, PACKED), 400)


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=60) | st.recursive(st.none() | st.booleans() | st.text(max_size=5), st.lists))
def test_any_bytes_are_answered_or_refused(content: object, kinds: App) -> None:
    packed = content if isinstance(content, bytes) else msgspec.msgpack.encode({"items": content})
    for content_type in (PACKED, "application/json"):
        assert send(kinds, PATH, packed, content_type).status_code in (200, 400, 413)


def test_items_that_were_cut_are_named(nli: App) -> None:
    """They were cut, and nothing was said of it."""
    texts, labels = ["cat", "cat " * 100], ["a", "b"]
    found = post(nli, "/v1/extract/nli", items=[{"text": text} for text in texts], params={"labels": labels})
    assert found.status_code == 200, found.text
    expected = post(nli, "/v1/classify", input=texts, labels=labels)
    assert "1" in found.headers["x-truncated-inputs"]
    assert found.headers["x-truncated-inputs"] == expected.headers["x-truncated-inputs"]
