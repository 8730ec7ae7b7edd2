"""What would make an answer mean something else is refused by name: fields of other servers, other tokenizers' ids."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from bei.config import ServeConfig
from bei.engine.fake import DIMENSION, FakeEngine
from bei.server.controls import PromptControls, ScoreControls
from bei.server.unsupported import EmbeddingControls, PairControls
from tests.artifacts import LIMITS
from tests.bei.server.app import App, check_error
from tests.bei.server.conftest import MakeApp

REFUSED_OF_EMBEDDINGS: list[tuple[str, Any]] = [
    ("output_dtype", "int8"),
    ("embedding_type", "binary"),
    ("embedding_types", ["float", "int8"]),
    ("embed_dtype", "float16"),
    ("endianness", "big"),
    ("output_dimension", 3),
    ("task", "retrieval.query"),
    ("modality", "image"),
    ("truncation", False),
    ("normalized", False),
    ("use_activation", False),
    ("late_chunking_params", {"chunk_size": 8}),
]
REFUSED_OF_RERANK: list[tuple[str, Any]] = [
    ("top_k", 1),
    ("truncation", False),
    ("max_chunks_per_doc", 3),
    ("max_doc_length", 8),
    ("max_query_length", 8),
    ("max_tokens_per_query", 8),
    ("return_embeddings", True),
    ("chat_template_kwargs", {"enable_thinking": True}),
]
# What clients send though nobody asked: as we do anyway.
HARMLESS_OF_EMBEDDINGS: list[dict[str, Any]] = [
    {"encoding_format": "base64", "user": "x"},  # openai
    {"modality": "text", "encoding_format": "float"},  # Infinity
    {"truncation": True, "output_dtype": None, "output_dimension": None, "input_type": None},  # Voyage
    {"embedding_type": "float", "normalized": True, "task": None, "late_chunking": False},  # Jina
    {"output_dimension": DIMENSION, "embedding_types": ["float"], "truncate": "END"},  # Cohere
    {"use_activation": True, "embed_dtype": "float32", "endianness": "native", "priority": 0, "padding": True},  # vLLM
    {"dimensions": 3, "output_dimension": 3},
    {"normalize": False, "normalized": False},
]
HARMLESS_OF_RERANK: list[dict[str, Any]] = [
    {"truncation": True, "top_k": None},
    {"max_tokens_per_doc": 4096, "priority": 0},
    {"raw_scores": False, "return_documents": False, "top_n": None},
    {"return_embeddings": False, "max_tokens_per_query": 0, "chat_template_kwargs": {}},
]


@pytest.mark.parametrize(("field", "value"), REFUSED_OF_EMBEDDINGS)
def test_a_field_that_changes_what_vectors_mean_is_refused_by_name(field: str, value: Any, app: App) -> None:
    check_error(app.embed(input="cats", **{field: value}), 400, "is not supported here: ", param=field)


@pytest.mark.parametrize("fields", HARMLESS_OF_EMBEDDINGS)
def test_what_is_done_anyway_may_be_asked_for(fields: dict[str, Any], app: App) -> None:
    assert app.embed(input="cats", **fields).status_code == 200


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize(("field", "value"), REFUSED_OF_RERANK)
def test_a_field_that_changes_what_scores_mean_is_refused_by_name(
    field: str, value: Any, path: str, kinds: App
) -> None:
    body = {"model": "reranker", "query": "a", "documents": ["b"], field: value}
    response = kinds.request("POST", path, json.dumps(body).encode())
    check_error(response, 400, "is not supported here: ", param=field)


@pytest.mark.parametrize("fields", HARMLESS_OF_RERANK)
def test_a_reranker_may_be_asked_for_what_it_does_anyway(fields: dict[str, Any], kinds: App) -> None:
    body = {"model": "reranker", "query": "a", "documents": ["b"], **fields}
    assert kinds.request("POST", "/v1/rerank", json.dumps(body).encode()).status_code == 200


def test_every_such_field_is_tried_here() -> None:
    def own(controls: type[msgspec.Struct], base: type[msgspec.Struct]) -> set[str]:
        return set(controls.__struct_fields__) - set(base.__struct_fields__)

    assert {field for field, _ in REFUSED_OF_EMBEDDINGS} == own(EmbeddingControls, PromptControls)
    assert {field for field, _ in REFUSED_OF_RERANK} == own(PairControls, ScoreControls)


@pytest.mark.parametrize("given", [[2, 9, 3], [[2, 9], [3]]])
def test_token_ids_on_openais_route_are_refused_with_both_remedies(given: object, make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), openai_token_ids=ServeConfig().openai_token_ids)
    message = check_error(app.embed(input=given), 400, "check_embedding_ctx_length=False", param="input")
    assert "--openai-token-ids accept" in message
    assert app.embed(input=["2", "9"]).status_code == 200
    response = app.request("POST", "/embed", json.dumps({"inputs": [[2, 9, 3]]}).encode())  # TEI's clients mean ids
    assert response.status_code == 200


def test_token_ids_are_accepted_where_the_server_says_so(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS), openai_token_ids="accept")
    assert np.array(app.embed(input=[[2, 9, 3]]).json()["data"][0]["embedding"]).shape == (DIMENSION,)
