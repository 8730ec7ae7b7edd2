"""What would make an answer mean something else is refused by name: fields of other servers, other tokenizers' ids."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bei.config.settings import ServeConfig
from bei.engine.fake import DIMENSION, FakeEngine
from bei.server.endpoint.refused_fields import rules_of
from bei.server.endpoint.shared_fields import EmbeddingControls, PairControls
from tests.bei.server.app import App, check_error
from tests.bei.server.conftest import MakeApp
from tests.support.artifacts import LIMITS, save_artifact

REFUSED_OF_EMBEDDINGS: list[tuple[str, Any]] = [
    ("output_dtype", "int4"),
    ("embedding_types", ["int4"]),
    ("embed_dtype", "bfloat16"),
    ("endianness", "big"),
    ("late_chunking_params", {"chunk_size": 8}),
    ("padding", "max_length"),
    ("mm_processor_kwargs", {"size": 8}),
]
REFUSED_OF_RERANK: list[tuple[str, Any]] = [
    ("top_k", 1),
    ("max_chunks_per_doc", 3),
    ("max_doc_length", 8),
    ("max_query_length", 8),
    ("max_tokens_per_query", 8),
    ("return_embeddings", True),
    ("chat_template_kwargs", {"enable_thinking": True}),
    ("padding", "max_length"),
    ("mm_processor_kwargs", {"size": 8}),
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


@pytest.mark.parametrize(("value", "shown"), [([1] * 1000, "(a list)"), ({"a": "b" * 1000}, "(an object)")])
def test_of_a_list_or_an_object_the_error_says_no_more_than_that(value: object, shown: str, app: App) -> None:
    response = app.embed(input="cats", endianness=value)
    check_error(response, 400, f"endianness {shown} is not supported here: ", param="endianness")


@pytest.mark.parametrize("value", ["audio", ["audio"]])
def test_other_modalities_are_refused(value: object, app: App) -> None:
    check_error(app.embed(input="cats", modality=value), 400, param="modality")


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
    of_forms = {"output_dtype", "embedding_types", "embed_dtype"}
    assert {field for field, _ in REFUSED_OF_EMBEDDINGS} == set(rules_of(EmbeddingControls)) | of_forms
    assert {field for field, _ in REFUSED_OF_RERANK} == set(rules_of(PairControls))


OTHER_WORDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"output_dimension": 3}, {"dimensions": 3}),
    ({"normalized": False}, {"normalize": False}),
    ({"use_activation": False}, {"normalize": False}),
    ({"truncation": True}, {"truncate": True}),
    ({"task": "document"}, {"input_type": "document"}),
    ({"embedding_type": "base64"}, {"encoding_format": "base64"}),
    ({"embedding_type": ["ubinary"]}, {"output_dtype": "ubinary"}),
    ({"embedding_types": ["int8"]}, {"output_dtype": "int8"}),
    ({"embed_dtype": "float16"}, {"output_dtype": "float16"}),
    ({"encoding_type": "ubinary"}, {"output_dtype": "ubinary"}),
]


@pytest.mark.parametrize(("other", "own"), OTHER_WORDS)
def test_other_servers_words_mean_what_ours_do(other: dict[str, Any], own: dict[str, Any], app: App) -> None:
    text = "the cats " * 20
    found, expected = (app.embed(input=text, **fields).json() for fields in (other, own))
    assert found == expected
    assert found != app.embed(input=text).json() or set(own) <= {"truncate", "input_type"}


@pytest.mark.parametrize(
    "fields",
    [
        {"dimensions": 4, "output_dimension": 3},
        {"normalize": True, "normalized": False},
        {"truncate": False, "truncation": True},
        {"input_type": "query", "task": "document"},
        {"output_dtype": "binary", "embedding_type": "float"},
    ],
)
def test_words_that_contradict_each_other_are_refused(fields: dict[str, Any], app: App) -> None:
    check_error(app.embed(input="cats", **fields), 400, param=list(fields)[1])


def test_bits_are_the_signs_eight_to_a_byte(app: App) -> None:
    vectors = np.array([one["embedding"] for one in app.embed(input=["cats", "hello"]).json()["data"]])
    for dtype, offset in (("ubinary", 0), ("binary", 128)):
        found = [one["embedding"] for one in app.embed(input=["cats", "hello"], output_dtype=dtype).json()["data"]]
        assert found == [[int("".join("01"[bool(value > 0)] for value in row), 2) - offset] for row in vectors]
    check_error(app.embed(input="cats", output_dtype="binary", dimensions=3), 400, "no multiple of 8")


def test_bytes_are_steps_of_the_largest_component_that_the_build_saw(app: App) -> None:
    texts = ["cats", "hello"]
    for fields, largest in (({}, 1.0), ({"dimensions": 4}, 1.0)):
        vectors = np.array([one["embedding"] for one in app.embed(input=texts, **fields).json()["data"]])
        expected = np.rint(vectors * 127 / largest)
        for dtype, offset in (("int8", 0), ("uint8", 128)):
            body = app.embed(input=texts, output_dtype=dtype, **fields).json()
            assert [one["embedding"] for one in body["data"]] == (expected + offset).tolist()
        coded = app.embed(input=texts, output_dtype="int8", encoding_format="base64", **fields).json()["data"]
        found = [np.frombuffer(base64.b64decode(one["embedding"]), np.int8).tolist() for one in coded]
        assert found == expected.tolist()


def test_float16_is_float_rounded(app: App) -> None:
    vectors = [one["embedding"] for one in app.embed(input=["cats", "hello"]).json()["data"]]
    asked = {"input": ["cats", "hello"], "embed_dtype": "float16"}
    numbers = [one["embedding"] for one in app.embed(**asked).json()["data"]]
    coded = [one["embedding"] for one in app.embed(**asked, encoding_format="base64").json()["data"]]
    expected = np.array(vectors, np.float16)
    assert np.array_equal(np.array(numbers, np.float16), expected)
    assert [np.frombuffer(base64.b64decode(one), "<f2").tolist() for one in coded] == expected.tolist()


def test_bytes_of_vectors_of_other_lengths_or_of_an_unverified_build_are_refused(tmp_path: Path) -> None:
    unverified = save_artifact(tmp_path / "unverified", name="unverified", embedding={"int8_largest": None})
    longer = save_artifact(tmp_path / "longer", name="longer", embedding={"normalize": False})
    app = App((unverified, FakeEngine(LIMITS)), (longer, FakeEngine(LIMITS)))
    asked = {"input": "cats", "output_dtype": "int8"}
    check_error(app.embed(**asked, model="unverified"), 400, "built with --no-verify", param="output_dtype")
    check_error(app.embed(**asked, model="longer"), 400, "set normalize to true", param="output_dtype")
    assert app.embed(**asked, model="longer", normalize=True).status_code == 200
    app.close()


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
