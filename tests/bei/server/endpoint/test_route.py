"""What is true of every inference route: limits, errors, models by name or by task, its page in /openapi.json."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bei.artifact.manifest import Artifact
from bei.config.settings import ServeConfig
from bei.engine.fake import FakeEngine
from bei.server.app import inference_routes
from tests.bei.server.app import App, check_error
from tests.bei.server.conftest import MakeApp
from tests.bei.server.kinds import KINDS, post, save_kind
from tests.support.artifacts import LIMITS

# A good body, the field of its inputs, and the model that answers it, by route.
GOOD: dict[str, tuple[dict[str, Any], str, str]] = {
    "/v1/embeddings": ({"input": ["cat"]}, "input", "embedder"),
    "/embed": ({"inputs": ["cat"]}, "inputs", "embedder"),
    "/embed_all": ({"inputs": ["cat"]}, "inputs", "colbert"),
    "/embed_sparse": ({"inputs": ["cat"]}, "inputs", "splade"),
    "/similarity": ({"inputs": {"source_sentence": "a", "sentences": ["cat"]}}, "sentences", "embedder"),
    "/rerank": ({"query": "a", "texts": ["cat"]}, "texts", "reranker"),
    "/v1/rerank": ({"query": "a", "documents": ["cat"]}, "documents", "reranker"),
    "/v2/rerank": ({"query": "a", "documents": ["cat"]}, "documents", "reranker"),
    "/predict": ({"inputs": [["cat"]]}, "inputs", "classifier"),
    "/classify": ({"input": ["cat"]}, "input", "classifier"),
    "/predict_tokens": ({"inputs": [["cat"]]}, "inputs", "ner"),
    "/v1/extract": ({"input": ["cat"], "labels": ["a"]}, "input", "spans"),
    "/tokenize": ({"inputs": ["cat"]}, "inputs", "embedder"),
    "/": ({"inputs": ["cat"]}, "inputs", "embedder"),
    "/invocations": ({"inputs": ["cat"]}, "inputs", "embedder"),
    "/decode": ({"ids": [[5]]}, "ids", "embedder"),
    "/embeddings": ({"input": ["cat"]}, "input", "embedder"),
    "/v1/embed": ({"texts": ["cat"]}, "texts", "embedder"),
    "/v2/embed": ({"texts": ["cat"]}, "texts", "embedder"),
    **dict.fromkeys(("/score", "/v1/score"), ({"text_1": "a", "text_2": ["cat"]}, "text_2", "reranker")),
    "/pooling": ({"input": ["cat"]}, "input", "embedder"),
    "/vertex": ({"instances": [{"inputs": ["cat"]}]}, "instances", "embedder"),
    "/v1/classify": ({"input": ["cat"]}, "input", "classifier"),
    "/detokenize": ({"tokens": [5]}, "tokens", "embedder"),
    "/v1/decisions": ({"input": "cat", "questions": [{"type": "predicate", "instructions": "a"}]}, "input", "reranker"),
    "/v1/systemone": ({"state": "cat", "questions": {"q": {"type": "noul", "instructions": "a"}}}, "state", "reranker"),
    "/v1/ranking": ({"query": {"text": "a"}, "passages": [{"text": "cat"}], "truncate": "END"}, "passages", "reranker"),
}
# Models of several tasks decide.
OF_QUESTIONS = {"/v1/decisions", "/v1/systemone"}
NO_TASK = {"/tokenize", "/decode", "/detokenize", "/", "/invocations", "/vertex", "/score", "/v1/score", "/pooling"}
NO_TASK |= OF_QUESTIONS
NO_CONTROLS = {"/tokenize", "/decode", "/detokenize", "/vertex", "/v1/embed", "/v2/embed", "/v1/ranking", "/v1/extract"}
NO_CONTROLS |= OF_QUESTIONS
# Of one text: no list of inputs is too long or empty.
WITH_LISTS = sorted(set(GOOD) - {"/detokenize"} - OF_QUESTIONS)
WITH_TASK = sorted(set(GOOD) - NO_TASK)
WITH_CONTROLS = sorted(set(GOOD) - NO_CONTROLS)
NOT_JSON = [b"", b"{", b"hello", b'{"inputs": "\xff"}', b"[" * 90_000, b"null", b"[]"]


def filled(path: str, texts: list[Any]) -> dict[str, Any]:
    """The good body of ``path`` with other inputs."""
    body, field, _ = GOOD[path]
    if path == "/similarity":
        return {"inputs": {"source_sentence": "a", "sentences": texts}}
    if path == "/detokenize":
        return {"tokens": [5] * sum(map(len, texts))}
    in_lists = ("/predict", "/predict_tokens")

    def form(text: Any) -> Any:
        if path == "/decode":
            return [5] if text else []
        if path == "/vertex":
            return {"inputs": text}
        return {"text": text} if path == "/v1/ranking" else [text] if path in in_lists else text

    return {**body, field: [form(text) for text in texts]}


def test_every_route_is_tested_here() -> None:
    of_models = ("/openai/", "/models/", "/pipeline/", "/v1/extract/")  # test_azure, test_hub_paths, test_sie_extract
    paths = {route.path for route in inference_routes(ServeConfig())}
    assert {path for path in paths if not path.startswith(of_models)} == set(GOOD)


@pytest.mark.parametrize("path", [*sorted(GOOD), "/info"])
def test_every_route_is_documented(path: str) -> None:
    reference = (Path(__file__).parents[4] / "docs" / "reference.md").read_text()
    assert re.search(rf"`(POST |GET )?{path}`", reference.split("## Routes\n")[1].split("\n## ")[0])


@pytest.mark.parametrize("path", sorted(GOOD))
def test_a_good_request_is_answered_and_counted_under_its_route(kinds: App, path: str) -> None:
    body, _, model = GOOD[path]
    before = kinds.metrics.requests.labels(path, "200").value
    assert post(kinds, path, **body, model=model, unknown={"field": [1]}).status_code == 200
    assert kinds.metrics.requests.labels(path, "200").value == before + 1


@pytest.mark.parametrize("path", WITH_TASK)
@pytest.mark.parametrize("model", [None, "default/not-specified"], ids=["no name", "Infinity's client"])
def test_a_model_need_not_be_named_where_one_is_made_for_the_task(kinds: App, path: str, model: str | None) -> None:
    body, _, named = GOOD[path]
    found, expected = (post(kinds, path, **body, model=name).json() for name in (model, named))
    if isinstance(found, dict):
        assert found.get("model", named) == named
        expected.update({key: found[key] for key in ("id", "created") if key in found})
    assert found == expected


@pytest.mark.parametrize("path", WITH_TASK)
def test_a_model_of_another_kind_says_what_it_can_do(kinds: App, path: str) -> None:
    body, _, model = GOOD[path]
    other = "embedder" if model != "embedder" else "reranker"
    can = ", ".join(KINDS[other][0])
    message = f"{other} cannot "
    found = check_error(post(kinds, path, **body, model=other), 400, message, code="task_not_supported", param="model")
    assert f"it can do: {can}." in found
    assert ('with score_mode "dense" compares its vectors.' in found) is (other == "embedder" and "rank" in path)


@pytest.mark.parametrize("path", [path for path in WITH_TASK if GOOD[path][2] != "embedder"])
def test_a_server_without_such_a_model_says_what_it_can_do(app: App, path: str) -> None:
    check_error(post(app, path, **GOOD[path][0]), 400, "tiny cannot ", code="task_not_supported")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., App]]:
    """``serve(*kinds)``: an application that serves these."""
    apps: list[App] = []

    def start(*names: str) -> App:
        apps.append(App(*(save_kind(tmp_path / name, name) for name in names)))
        return apps[-1]

    yield start
    for app in apps:
        app.close()


def test_of_several_models_without_the_task_all_are_named(serve: Callable[..., App]) -> None:
    response = post(serve("splade", "reranker"), "/embed", inputs="a")
    message = "No served model can embed. They can do: splade: embed_sparse; reranker: rerank, classify."
    check_error(response, 400, message, code="task_not_supported")


def test_the_only_model_that_can_is_asked_even_if_it_is_made_for_another_task(serve: Callable[..., App]) -> None:
    assert post(serve("splade", "reranker"), "/predict", inputs="a").json()[0]["label"] == "LABEL_0"


def test_of_several_models_made_for_the_task_one_must_be_named(make_app: MakeApp, second_artifact: Artifact) -> None:
    app = make_app(FakeEngine(LIMITS), (second_artifact, FakeEngine(LIMITS)))
    response = post(app, "/embed", inputs="a")
    check_error(response, 400, "Several served models can embed; set model to one of tiny, org/second", param="model")
    assert post(app, "/embed", inputs="a", model="org/second").status_code == 200


@pytest.mark.parametrize("path", sorted(GOOD))
def test_an_unknown_model_is_404_and_names_those_that_are_served(kinds: App, path: str) -> None:
    response = post(kinds, path, **GOOD[path][0], model="nobody")
    check_error(response, 404, "Served: embedder", code="model_not_found", param="model")


OF_PAIRS = {"/rerank", "/v1/rerank", "/v2/rerank", "/v1/ranking", "/score", "/v1/score"}


@pytest.mark.parametrize("path", WITH_LISTS)
def test_empty_lists_empty_texts_and_too_many_of_them_are_refused(kinds: App, path: str) -> None:
    def send(texts: list[str]) -> Any:
        return post(kinds, path, **filled(path, texts), model=GOOD[path][2])

    check_error(send([]), 400, "is an empty list: send at least one input")
    if path in OF_PAIRS:
        assert send(["a", ""]).status_code == 200  # tests/bei/server/test_pairs_with_an_empty_side.py
    else:
        check_error(send(["a", ""]), 400, "empty: leave it out" if path == "/decode" else "empty text: leave it out")
    check_error(send(["a"] * 9), 400, "has 9 inputs, the limit is 8: split it")
    assert send(["a"] * 8).status_code == 200


@pytest.mark.parametrize("path", sorted(GOOD))
def test_a_body_that_is_no_request_is_refused(kinds: App, path: str) -> None:
    for content in NOT_JSON:
        check_error(kinds.request("POST", path, content), 400, code="invalid_request")
    check_error(kinds.request("POST", path, b"{}"), 400)
    check_error(kinds.request("POST", path, b"x" * 100_001), 413, "send fewer", code="payload_too_large")
    if path != "/":
        check_error(kinds.get(path), 405, "does not take GET")


@pytest.mark.parametrize("path", WITH_CONTROLS)
def test_controls_that_contradict_each_other_are_refused(kinds: App, path: str) -> None:
    body = {**GOOD[path][0], "model": GOOD[path][2]}
    check_error(
        post(kinds, path, **body, truncate=False, truncate_prompt_tokens=3), 400, param="truncate_prompt_tokens"
    )
    check_error(post(kinds, path, **body, truncate="START", truncation_direction="Left"), 400, param="truncate")
    check_error(post(kinds, path, **body, truncate="MIDDLE"), 400, param="truncate")
    check_error(post(kinds, path, **body, truncation_direction="up"), 400, param="truncation_direction")


@pytest.mark.parametrize("path", sorted(GOOD))
def test_a_draining_server_answers_503_on_every_route(serve: Callable[..., App], path: str) -> None:
    app = serve(GOOD[path][2])
    app.models.begin_drain()
    check_error(post(app, path, **GOOD[path][0]), 503, "another replica", code="shutting_down")


# Anything at all

_scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(exclude_categories=[]), max_size=6)
)
_json = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
_near_inputs = st.one_of(
    _texts, st.lists(_texts), st.lists(st.lists(_texts, max_size=3)), st.lists(st.integers(0, 200)), _json
)
_FIELDS = [
    *("inputs", "input", "texts", "documents", "query", "prompt", "model", "parameters", "top_n", "rank_fields"),
    *("raw_scores", "return_text", "return_documents", "max_tokens_per_doc", "truncate", "truncation_direction"),
    *("prompt_name", "input_type", "dimensions", "normalize", "aggregation_strategy", "truncate_prompt_tokens"),
    *("add_special_tokens", "use_activation", "instruction", "encoding_format"),
]


@settings(max_examples=300, deadline=None)
@given(
    path=st.sampled_from(sorted(GOOD)),
    near=st.dictionaries(
        st.sampled_from(["inputs", "input", "texts", "documents", "prompt"]), _near_inputs, max_size=2
    ),
    more=st.dictionaries(st.sampled_from(_FIELDS), _json, max_size=3),
    query=_texts,
)
def test_json_like_bodies_never_give_a_5xx(
    kinds: App, path: str, near: dict[str, Any], more: dict[str, Any], query: str
) -> None:
    body = {"query": query, "model": GOOD[path][2], **near, **more}
    response = kinds.request("POST", path, json.dumps(body).encode())
    assert response.status_code in (200, 400, 404), (body, response.text)
    if response.status_code != 200:
        assert len(check_error(response, response.status_code)) > 10


def test_after_all_of_the_above_the_server_is_alive(kinds: App) -> None:
    assert kinds.get("/health").status_code == 200
    assert post(kinds, "/embed", inputs="cat").status_code == 200
