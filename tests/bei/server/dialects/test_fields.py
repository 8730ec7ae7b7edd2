"""Every field of other servers' requests is honoured or refused by name on their routes, or one that no answer depends
on. Of vLLM's see test_vllm_fields.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bei.engine.fake import FakeEngine
from tests.bei.server.app import App
from tests.bei.server.kinds import post
from tests.support.artifacts import LIMITS, save_artifact

_CUT = "truncate truncation_direction "
_TEI: dict[str, str] = {  # text-embeddings-inference 1.9, ``router/src/http/types.rs``
    "/embed": "inputs prompt_name normalize dimensions " + _CUT,
    "/embed_all": "inputs prompt_name " + _CUT,
    "/embed_sparse": "inputs prompt_name " + _CUT,
    "/predict": "inputs raw_scores " + _CUT,
    "/rerank": "query texts raw_scores return_text " + _CUT,
    "/similarity": "inputs parameters",
    "/tokenize": "inputs add_special_tokens prompt_name",
    "/decode": "ids skip_special_tokens",
    "/v1/embeddings": "input model encoding_format dimensions user",
}
# The fields of each request, by path: of the reference of each API, and of its Python client.
FIELDS: dict[str, str] = {
    **_TEI,
    **{f"/tei{path}": fields for path, fields in _TEI.items()},
    "/cohere/v1/embed": "texts images model input_type embedding_types truncate",
    "/cohere/v2/embed": (
        "texts images inputs model input_type embedding_types truncate max_tokens output_dimension priority"
    ),
    "/cohere/v1/rerank": "model query documents top_n rank_fields return_documents max_chunks_per_doc",
    "/cohere/v2/rerank": "model query documents top_n max_tokens_per_doc priority",
    "/cohere/v1/tokenize": "text model",
    "/cohere/v1/detokenize": "tokens model",
    "/jina/v1/embeddings": (
        "model input task embedding_type encoding_type dimensions normalized late_chunking truncate "
        "return_multivector return_tokenized_input"
    ),
    "/jina/v1/multi-vector": "model input input_type embedding_type dimensions truncate",
    "/jina/v1/rerank": (
        "model query documents top_n return_documents truncation max_doc_length max_query_length return_embeddings"
    ),
    "/jina/v1/classify": "model input labels classifier_id",
    "/voyage/v1/embeddings": "input model input_type truncation output_dimension output_dtype encoding_format",
    "/voyage/v1/contextualizedembeddings": (
        "inputs model input_type output_dimension output_dtype encoding_format enable_auto_chunking chunk_size "
        "chunk_overlap"
    ),
    "/voyage/v1/multimodalembeddings": (
        "inputs model input_type truncation output_encoding output_dimension output_dtype"
    ),
    "/voyage/v1/rerank": "query documents model top_k return_documents truncation",
    "/nim/v1/embeddings": "input model input_type encoding_format truncate user embedding_type dimensions modality",
    "/nim/v1/ranking": "model query passages truncate",
    "/infinity/embeddings": "model encoding_format user dimensions input modality",
    "/infinity/rerank": "query documents return_documents raw_scores model top_n",
    "/infinity/classify": "input model raw_scores",
    "/ollama/api/embed": "model input truncate options keep_alive dimensions",
    "/ollama/api/embeddings": "model prompt options keep_alive",
    # Mistral's, Voyage's, Cohere's and Jina's words on our own paths.
    "/v1/embeddings ": "output_dimension output_dtype truncation embedding_types task normalized late_chunking",
    "/v1/rerank": "top_k max_chunks_per_doc max_tokens_per_doc max_doc_length max_query_length return_embeddings",
    # SGLang 0.5, ``srt/entrypoints/openai/protocol.py``.
    "/v1/embeddings  ": (
        "input model encoding_format dimensions user rid priority lora_path embed_override_token_id embed_overrides"
    ),
    "/v1/classify": "model input user rid priority",
    "/v1/rerank ": "query documents instruct top_n return_documents",
}
# A label for the provider's own accounts, the order of requests there, and SGLang's name of a request.
NO_EFFECT = {"user", "priority", "rid"}


@pytest.fixture(scope="module")
def schemas(kinds: App) -> dict[str, Any]:
    found: dict[str, Any] = kinds.request("GET", "/openapi.json").json()
    return found


def properties(schemas: dict[str, Any], path: str) -> dict[str, Any]:
    """The fields of a request's body, of all its forms."""
    (content,) = (
        one for kind, one in schemas["paths"][path]["post"]["requestBody"]["content"].items() if "json" in kind
    )
    found: dict[str, Any] = {}
    todo = [content["schema"]]
    while todo:
        schema = todo.pop()
        if "$ref" in schema:
            schema = schemas["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        found |= schema.get("properties", {})
        todo += [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]
    return found


@pytest.mark.parametrize("path", FIELDS)
def test_every_field_of_a_peer_is_known_on_its_route(path: str, schemas: dict[str, Any]) -> None:
    assert {*FIELDS[path].split()} - NO_EFFECT <= properties(schemas, path.strip()).keys()


RERANK = {"model": "reranker", "query": "a", "documents": ["b"]}
CHUNKS = {"model": "embedder", "inputs": [["a"]]}
EMBED = {"model": "embedder", "input": ["a"]}
# A field that is not honoured, a value that asks for it, and those that ask for what is done anyway.
REFUSED: list[tuple[str, dict[str, Any], str, Any, list[Any]]] = [
    ("/jina/v1/rerank", RERANK, "max_query_length", 8, [None]),
    ("/jina/v1/rerank", RERANK, "return_embeddings", True, [None, False]),
    ("/jina/v1/embeddings", EMBED, "return_multivector", True, [None, False]),
    ("/jina/v1/embeddings", EMBED, "return_tokenized_input", True, [None, False]),
    ("/voyage/v1/contextualizedembeddings", CHUNKS, "enable_auto_chunking", True, [None, False]),
    ("/voyage/v1/contextualizedembeddings", CHUNKS, "chunk_size", 128, [None]),
    ("/voyage/v1/contextualizedembeddings", CHUNKS, "chunk_overlap", 8, [None]),
    ("/v1/embeddings", EMBED, "embed_overrides", [[[0.5, 0.25]]], [None, []]),
    ("/v1/embeddings", EMBED, "embed_override_token_id", 5, [None]),
    ("/v1/rerank", RERANK, "max_query_length", 8, [None]),
    ("/v1/rerank", RERANK, "max_chunks_per_doc", 8, [None, 1]),
    ("/v1/rerank", RERANK, "top_k", 8, [None]),
]


@pytest.mark.parametrize(("path", "body", "field", "value", "accepted"), REFUSED)
def test_what_is_not_honoured_is_refused_by_name(
    path: str, body: dict[str, Any], field: str, value: Any, accepted: list[Any], kinds: App
) -> None:
    for same in accepted:
        answer = post(kinds, path, **body, **{field: same})
        assert field not in answer.text, same
        assert answer.status_code == 200 or "late_chunking" in answer.text, answer.text  # no kind reads chunks
    response = post(kinds, path, **body, **{field: value})
    assert response.status_code in (400, 422), response.text
    assert f"{field} " in response.text


def test_the_form_of_vectors_of_texts_and_images_is_that_of_texts(kinds: App) -> None:
    parts = [{"content": [{"type": "text", "text": "a"}]}]
    for dtype in ("int8", "ubinary", "float"):
        expected = post(kinds, "/voyage/v1/embeddings", **EMBED, output_dtype=dtype).json()["data"]
        found = post(kinds, "/voyage/v1/multimodalembeddings", model="embedder", inputs=parts, output_dtype=dtype)
        assert found.json()["data"] == expected


OF_COHERE = {"texts": ["a"], "embedding_types": ["float"]}
# Fields that say what the texts are: a body, the field, and words for it that the dialect's server knows.
KINDS_OF_TEXTS: list[tuple[str, dict[str, Any], str, str]] = [
    ("/cohere/v1/embed", OF_COHERE, "input_type", "search_document search_query classification clustering"),
    ("/cohere/v2/embed", OF_COHERE, "input_type", "search_document search_query classification clustering"),
    ("/jina/v1/embeddings", {"input": ["a"]}, "input_type", "query document"),
    (
        "/jina/v1/embeddings",
        {"input": ["a"]},
        "task",
        "retrieval.query retrieval.passage text-matching classification clustering separation code.query code.passage "
        "nl2code.query code2completion.passage qa.query",
    ),
    ("/voyage/v1/embeddings", {"input": ["a"]}, "input_type", "query document"),
    (
        "/voyage/v1/multimodalembeddings",
        {"inputs": [{"content": [{"type": "text", "text": "a"}]}]},
        "input_type",
        "query",
    ),
    ("/nim/v1/embeddings", {"input": ["a"]}, "input_type", "query passage"),
    ("/v1/embeddings", {"input": ["a"]}, "input_type", "query document passage search_query"),
    ("/v1/embeddings", {"input": ["a"]}, "task", "retrieval.query"),
    ("/embed", {"inputs": ["a"]}, "input_type", "query document"),
]


@pytest.mark.parametrize(("path", "body", "field", "known"), KINDS_OF_TEXTS)
def test_a_kind_of_text_is_one_that_the_dialect_knows_or_refused_by_name(
    path: str, body: dict[str, Any], field: str, known: str, plain: App
) -> None:
    """Where a model has no prompts, any word was accepted."""
    for value in known.split():
        answer = post(plain, path, **body, **{field: value})
        assert answer.status_code == 200, (value, answer.text)
    response = post(plain, path, **body, **{field: "querry"})
    assert response.status_code in (400, 422), response.text
    assert "input_type" in response.text


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """A model without prompts."""
    app = App((save_artifact(tmp_path_factory.mktemp("plain") / "tiny"), FakeEngine(LIMITS)))
    yield app
    app.close()
