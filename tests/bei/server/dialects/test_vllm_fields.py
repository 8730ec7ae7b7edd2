"""Every field of vLLM's pooling requests is honoured, refused by name, or one that no answer depends on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bei.artifact.manifest import RerankTemplate
from bei.server.dialects.vllm import ScoreRequest
from bei.server.dialects.vllm_pooling import PoolingRequest
from bei.server.endpoint.refused_fields import rules_of
from bei.server.routes.chat_embeddings import ChatEmbeddingRequest
from bei.server.routes.classify import ClassifyRequest
from bei.server.routes.openai_embeddings import EmbeddingRequest
from bei.server.routes.rerank import DocumentsRequest
from tests.bei.server.app import App, check_error
from tests.bei.server.kinds import save_kind

# vLLM 0.33, ``vllm/entrypoints/pooling/**/protocol.py``: the fields of each request, those of its mixins included.
_BASIC = (
    "model user truncate_prompt_tokens padding truncation_side request_id priority mm_processor_kwargs cache_salt "
    "use_activation "
)
_COMPLETION = _BASIC + "input add_special_tokens "
_CHAT = _BASIC + (
    "messages add_generation_prompt continue_final_message add_special_tokens chat_template chat_template_kwargs "
    "media_io_kwargs "
)
_EMBED = "encoding_format embed_dtype endianness dimensions "
_SCORING = _BASIC + "max_tokens_per_query max_tokens_per_doc instruction chat_template_kwargs "
FIELDS: list[tuple[type[msgspec.Struct], str]] = [
    (EmbeddingRequest, _COMPLETION + _EMBED),
    (ChatEmbeddingRequest, _CHAT + _EMBED),
    (PoolingRequest, _COMPLETION + _CHAT + _EMBED + "task data normalize"),
    (ClassifyRequest, _COMPLETION + _CHAT + "normalize"),
    (ScoreRequest, _SCORING + "data_1 data_2 queries documents items text_1 text_2"),
    (DocumentsRequest, _SCORING + "query documents top_n"),
]
NO_EFFECT = {"user", "request_id", "priority", "cache_salt"}

SCORE = {"model": "reranker", "text_1": "a", "text_2": ["b"]}
POOL = {"model": "embedder", "input": "a"}
CLASSIFY = {"model": "classifier", "input": "a"}
REFUSED: list[tuple[str, dict[str, Any], str, Any]] = [
    ("/score", SCORE, "max_tokens_per_query", 8),
    ("/score", SCORE, "max_tokens_per_doc", 8),
    ("/score", SCORE, "chat_template_kwargs", {"instruction": "x"}),
    ("/score", SCORE, "padding", "max_length"),
    ("/score", SCORE, "mm_processor_kwargs", {"size": 8}),
    *(
        (path, body, field, value)
        for path, body in (("/pooling", POOL), ("/classify", CLASSIFY))
        for field, value in (
            ("messages", [{"role": "user", "content": "a"}]),
            ("normalize", False),
            ("softmax", False),
            ("activation", False),
            ("padding", "max_length"),
            ("mm_processor_kwargs", {"size": 8}),
            ("media_io_kwargs", {"image": {}}),
            ("chat_template", "{{ messages }}"),
            ("chat_template_kwargs", {"a": 1}),
            ("add_generation_prompt", True),
            ("continue_final_message", True),
        )
        if (path, field) != ("/pooling", "messages")
    ),
    ("/pooling", POOL, "data", {"a": 1}),
]


@pytest.mark.parametrize(("request_type", "fields"), FIELDS)
def test_every_field_of_vllm_is_known(request_type: type[msgspec.Struct], fields: str) -> None:
    assert set(fields.split()) - NO_EFFECT <= set(request_type.__struct_fields__)


@pytest.mark.parametrize("request_type", [ScoreRequest, PoolingRequest, ClassifyRequest])
def test_every_refused_field_is_tried_here(request_type: type[msgspec.Struct]) -> None:
    path = {ScoreRequest: "/score", PoolingRequest: "/pooling", ClassifyRequest: "/classify"}[request_type]
    assert {field for at, _, field, _ in REFUSED if at == path} == set(rules_of(request_type))


@pytest.mark.parametrize("mount", ["", "/vllm"])
@pytest.mark.parametrize(("path", "body", "field", "value"), REFUSED)
def test_what_is_not_honoured_is_refused_by_name(
    mount: str, path: str, body: dict[str, Any], field: str, value: Any, kinds: App
) -> None:
    assert post(kinds, mount + path, body).status_code == 200
    response = post(kinds, mount + path, {**body, field: value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == field
    assert f"{field} " in error["message"]
    assert "is not supported here: " in error["message"]


@pytest.mark.parametrize("mount", ["", "/vllm"])
def test_pooling_reads_input_or_messages(mount: str, kinds: App) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    chat = {"messages": [{"role": "user", "content": [image]}]}
    for body, message in (
        ({"model": "embedder"}, "input or messages"),
        ({**POOL, **chat}, "input or messages"),
        ({"model": "embedder", **chat}, "reads no images"),
        ({"model": "classifier", **chat}, "reads no images"),
        ({"model": "embedder", "messages": [{"role": "user", "content": "a"}]}, "one message"),
    ):
        response = post(kinds, f"{mount}/pooling", body)
        assert response.status_code == 400, response.text
        assert message in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/score", "/v1/score", "/vllm/score", "/vllm/v1/score"])
def test_defaults_of_a_score_are_accepted(path: str, kinds: App) -> None:
    defaults = {"max_tokens_per_query": 0, "max_tokens_per_doc": 0, "chat_template_kwargs": None, "instruction": None}
    assert post(kinds, path, {**SCORE, **defaults}).status_code == 200


@pytest.mark.parametrize("path", ["/rerank", "/vllm/v1/rerank"])
def test_no_tokens_per_document_are_all_of_them(path: str, kinds: App) -> None:
    body = {"model": "reranker", "query": "a", "documents": ["the cats sat down", "cats"]}
    expected = post(kinds, path, body).json()["results"]
    assert post(kinds, path, {**body, "max_tokens_per_doc": 0}).json()["results"] == expected
    assert post(kinds, "/cohere/v2/rerank", {**body, "max_tokens_per_doc": 0}).status_code == 400


@pytest.mark.parametrize(("model", "reason"), [("reranker", "takes no instruction"), ("embedder", "compares vectors")])
def test_an_instruction_that_a_model_has_no_place_for_is_refused(model: str, reason: str, kinds: App) -> None:
    body = {**SCORE, "model": model, "instruction": "Find cats."}
    check_error(post(kinds, "/score", body), 400, reason, param="instruction")


def test_an_instruction_of_a_score_is_that_of_a_rerank(tmp_path: Path) -> None:
    template = RerankTemplate(prefix="", body="{instruction} {query} {document}", suffix="", instruction="hello")
    app = App(save_kind(tmp_path / "reranker", "reranker", rerank_template=template))
    try:
        scores = {}
        for instruction in ("the cat", "world"):
            found = post(app, "/score", {**SCORE, "instruction": instruction}).json()["data"][0]["score"]
            ranked = {"query": "a", "texts": ["b"], "instruction": instruction}
            assert found == post(app, "/rerank", ranked).json()[0]["score"]
            scores[instruction] = found
        assert len({*scores.values(), post(app, "/score", SCORE).json()["data"][0]["score"]}) == 3
    finally:
        app.close()


def post(app: App, path: str, body: dict[str, Any]) -> Any:
    return app.request("POST", path, json.dumps(body).encode())
