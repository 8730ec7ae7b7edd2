"""Fields that contradict each other, and fields that another form of the same request has: none of them is passed
over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from bei.artifact.manifest import OutputInfo
from bei.errors import InvalidRequestError
from bei.tokenizer.prompts import prompt_of
from tests.bei.server.app import App, check_error
from tests.bei.server.kinds import ROLES, TOKEN_DIMENSION, KindEngine
from tests.support.artifacts import save_artifact

TEXTS = {"query": "a", "texts": ["b"], "model": "reranker"}
DOCUMENTS = {"query": "a", "documents": ["b"], "model": "reranker"}
OPENAI = {"input": ["a"], "model": "embedder"}


def post(app: App, path: str, body: dict[str, Any]) -> httpx.Response:
    return app.request("POST", path, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        ("/v1/embeddings", OPENAI, {"truncation_direction": "left", "truncation_side": "right"}),
        ("/predict", {"inputs": "a", "model": "classifier"}, {"raw_scores": True, "use_activation": True}),
        ("/classify", {"input": "a", "model": "classifier"}, {"raw_scores": False, "use_activation": False}),
        ("/rerank", TEXTS, {"raw_scores": True, "use_activation": True}),
        ("/rerank", DOCUMENTS, {"instruction": "judge", "instruct": "rate"}),
        ("/v1/embeddings", OPENAI, {"prompt_name": "cats", "input_type": "query"}),
        ("/tokenize", {"inputs": "a", "model": "embedder"}, {"prompt_name": "cats", "input_type": "document"}),
    ],
)
def test_two_fields_that_contradict_each_other_are_refused(
    kinds: App, path: str, body: dict[str, Any], fields: dict[str, Any]
) -> None:
    first, second = fields
    said = check_error(post(kinds, path, {**body, **fields}), 400, "contradict each other: send one")
    assert first in said
    assert second in said


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        ("/v1/embeddings", OPENAI, {"truncation_direction": "Left", "truncation_side": "left"}),
        ("/predict", {"inputs": "a", "model": "classifier"}, {"raw_scores": True, "use_activation": False}),
        ("/classify", {"input": "a", "model": "classifier"}, {"raw_scores": False, "use_activation": True}),
        ("/v1/embeddings", OPENAI, {"prompt_name": "query", "input_type": "query"}),
        ("/rerank", TEXTS, {"top_n": 0, "return_documents": False, "rank_fields": []}),
        ("/rerank", DOCUMENTS, {"return_text": False}),
    ],
)
def test_two_that_agree_are_accepted(kinds: App, path: str, body: dict[str, Any], fields: dict[str, Any]) -> None:
    assert post(kinds, path, {**body, **fields}).status_code == 200


@pytest.mark.parametrize(
    ("body", "field", "value", "remedy"),
    [
        (TEXTS, "return_documents", True, "send return_text"),
        (TEXTS, "rank_fields", ["title"], "documents in the place of texts"),
        (TEXTS, "max_tokens_per_doc", 5, "documents in the place of texts"),
        (DOCUMENTS, "return_text", True, "send return_documents"),
    ],
)
@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_what_the_other_form_of_a_rerank_has_is_not_passed_over(
    kinds: App, path: str, body: dict[str, Any], field: str, value: object, remedy: str
) -> None:
    check_error(post(kinds, path, {**body, field: value}), 400, remedy, param=field)


@pytest.mark.parametrize(("path", "model"), [("/embed_all", "colbert"), ("/embed_sparse", "splade"), ("/", "splade")])
@pytest.mark.parametrize(("field", "value"), [("dimensions", 2), ("output_dtype", "int8")])
def test_vectors_that_are_neither_cut_nor_written_otherwise_say_so(
    kinds: App, path: str, model: str, field: str, value: object
) -> None:
    body = {"inputs": ["a"], "model": model}
    check_error(post(kinds, path, {**body, field: value}), 400, "these vectors", param=field)
    assert post(kinds, path, {**body, "output_dtype": "float"}).status_code == 200


@pytest.mark.parametrize(("field", "value"), [("output_dimension", 3), ("max_tokens", 5), ("inputs", [])])
def test_what_cohere_s_second_version_has_more_is_refused_of_the_first(kinds: App, field: str, value: object) -> None:
    body = {"texts": ["a"], "model": "embedder", "input_type": "query"}
    for path in ("/v1/embed", "/cohere/v1/embed"):
        response = post(kinds, path, {**body, field: value})
        assert response.status_code == 400, response.text
        assert f"{field} {value} is not supported here: send it to /v2/embed" in response.text
        assert post(kinds, path, body).status_code == 200


@pytest.mark.parametrize(("field", "value"), [("raw_scores", True), ("use_activation", False)])
def test_labels_of_the_request_have_no_logits(kinds: App, field: str, value: object) -> None:
    body = {"input": "a", "labels": ["sad"], "model": "classifier", field: value}
    check_error(post(kinds, "/v1/classify", body), 400, "have probabilities", param=field)


def test_controls_of_a_comparison_stand_in_one_place(kinds: App) -> None:
    """Those beside parameters were passed over."""
    body = {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "model": "embedder", "prompt": ""}
    inside = {**body, "parameters": {"prompt": ""}}
    check_error(post(kinds, "/similarity", inside), 400, "prompt stands beside parameters", param="prompt")
    del inside["prompt"]
    assert [post(kinds, "/similarity", one).status_code for one in (body, inside)] == [200, 200]


@pytest.mark.parametrize("path", ["/rerank", "/tei/rerank", "/v1/rerank"])
def test_only_the_best_texts_are_ranked_where_that_is_asked(kinds: App, path: str) -> None:
    """All of them were: LiteLLM's provider for TEI sends ``top_n`` with texts."""
    body = {**TEXTS, "texts": ["b", "cat", "the"], "return_text": True}
    everything = post(kinds, path, body).json()
    for top_n, count in ((None, 3), (0, 3), (1, 1), (2, 2), (9, 3)):
        assert post(kinds, path, {**body, "top_n": top_n}).json() == everything[:count]


def test_late_chunking_of_token_ids_is_refused(kinds: App) -> None:
    """They were embedded one by one, whatever else was in the document."""
    for ids in ([[5, 6], [7]], ["a", [7]]):
        response = post(kinds, "/v1/embeddings", {"input": ids, "model": "embedder", "late_chunking": True})
        check_error(response, 400, "late_chunking works with texts only, not with token ids", param="late_chunking")


@pytest.mark.parametrize("normalized", [None, False, True])
@pytest.mark.parametrize("unit_length", [False, True])
def test_token_vectors_have_the_length_that_vllm_gives_them(
    unit_length: bool, normalized: bool | None, tmp_path: Path
) -> None:
    """What the request says, else what the checkpoint says of its dense vectors, else what late interaction has. Raw
    states were answered whatever the checkpoint said, and the other length was refused."""
    output = OutputInfo(name="token_embedding", dimension=TOKEN_DIMENSION, per_token=True, unit_length=unit_length)
    embedding = None if normalized is None else {"normalize": normalized}
    artifact = save_artifact(
        tmp_path / "tokens", tasks=["embed_tokens"], outputs=[output], embedding=embedding, output="token_embedding"
    )
    app = App((artifact, KindEngine({"token_embedding": TOKEN_DIMENSION})))
    try:
        for asked, is_unit in ((None, unit_length if normalized is None else normalized), (True, True), (False, False)):
            body = {"input": "a", "task": "token_embed", "use_activation": asked}
            response = post(app, "/pooling", body)
            assert response.status_code == 200, response.text
            lengths = np.linalg.norm(response.json()["data"][0]["data"], axis=1)
            assert np.allclose(lengths, 1, atol=1e-5) is is_unit, lengths
    finally:
        app.close()


def test_a_side_of_late_interaction_may_stand_beside_a_prompt_of_another_name(tmp_path: Path) -> None:
    manifest = save_artifact(
        tmp_path / "colbert", prompts={"query": "[Q]", "document": "[D]", "cats": "cats: "}, roles=ROLES
    ).manifest
    assert prompt_of(manifest, "cats", "query") == "cats: "
    assert prompt_of(manifest, "query", "search_query") == "[Q]"
    with pytest.raises(InvalidRequestError, match="prompt_name query and input_type document contradict"):
        prompt_of(manifest, "query", "document")
