"""infinity_client: the generated client and ``InfinityVisionAPI``, at the root and at ``/infinity``."""

from __future__ import annotations

from typing import Any

import tests.clients.offline  # noqa: F401

# isort: split

import infinity_client
import numpy as np
import pytest
from infinity_client.api.default import classify, embeddings, health, models, rerank
from infinity_client.models import (
    ClassifyInput,
    EmbeddingEncodingFormat,
    HTTPValidationError,
    OpenAIEmbeddingInputText,
    RerankInput,
)
from infinity_client.vision_client import InfinityVisionAPI

from tests.clients.conftest import SERVED, TOO_LONG, Expected, FullServer, run
from tests.e2e.kinds import LABELS, QUERY, TEXTS, TOLERANCE
from tests.e2e.process import DEADLINE_S, Server

row = pytest.mark.client_call

BASES = pytest.mark.parametrize("base", ["", "/infinity"])


def client_of(url: str, **settings: Any) -> Any:
    return infinity_client.Client(base_url=url, timeout=DEADLINE_S, raise_on_unexpected_status=True, **settings)


def both(module: Any, url: str, *body: Any) -> list[Any]:
    """The answers of a route's synchronous and asynchronous function."""
    fields = {"body": body[0]} if body else {}
    return [
        module.sync(client=client_of(url), **fields),
        run(module.asyncio(client=client_of(url), **fields)),
    ]


@row("infinity_client", "Infinity", "/infinity", "embeddings.sync, .asyncio: dimensions, text too long is cut")
def test_embeddings(server: Server, expected: Expected) -> None:
    def found(given: str | list[str], **fields: Any) -> list[list[Any]]:
        asked = OpenAIEmbeddingInputText(input_=given, model="embedder", **fields)
        answers = both(embeddings, f"{server.url}/infinity", asked)
        assert all(answer.usage.total_tokens > 0 for answer in answers)
        return [[entry.embedding for entry in answer.data] for answer in answers]

    for vectors in found(TEXTS):
        expected.check_vectors(vectors)
    for vectors in found(TEXTS, dimensions=8):
        expected.check_vectors(vectors, "short")
    for vectors in found(TOO_LONG):
        expected.check_vectors(vectors, "cut")


@row("infinity_client", "Infinity", "/", "embeddings.sync, .asyncio")
def test_embeddings_at_the_root(server: Server, expected: Expected) -> None:
    for answer in both(embeddings, server.url, OpenAIEmbeddingInputText(input_=TEXTS, model="embedder")):
        expected.check_vectors([entry.embedding for entry in answer.data])


@row(
    "infinity_client",
    "Infinity",
    "/infinity",
    "embeddings.sync_detailed: base64",
    fails="the client cannot parse an embedding that is a string: ask for floats, or use InfinityVisionAPI",
)
def test_base64(server: Server) -> None:
    asked = OpenAIEmbeddingInputText(input_=TEXTS, model="embedder", encoding_format=EmbeddingEncodingFormat.BASE64)
    with pytest.raises(TypeError):
        embeddings.sync_detailed(client=client_of(f"{server.url}/infinity"), body=asked)


@row("infinity_client", "Infinity", "/", "rerank.sync, .asyncio: top_n, raw_scores, return_documents")
@row("infinity_client", "Infinity", "/infinity", "rerank.sync, .asyncio: top_n, raw_scores, return_documents")
@BASES
def test_rerank(server: Server, expected: Expected, base: str) -> None:
    for raw in (False, True):
        asked = RerankInput(QUERY, TEXTS, model="reranker", top_n=3, raw_scores=raw, return_documents=True)
        for answer in both(rerank, server.url + base, asked):
            expected.check_ranking([(one.index, one.relevance_score) for one in answer.results], 3, raw=raw)
            assert [one.document for one in answer.results] == [TEXTS[index] for index in expected.order[:3]]
    for answer in both(rerank, server.url + base, RerankInput(QUERY, TEXTS)):  # the model is not specified
        expected.check_ranking([(one.index, one.relevance_score) for one in answer.results])


@row("infinity_client", "Infinity", "/", "classify.sync, .asyncio")
@row("infinity_client", "Infinity", "/infinity", "classify.sync, .asyncio")
@BASES
def test_classify(server: Server, expected: Expected, base: str) -> None:
    for answer in both(classify, server.url + base, ClassifyInput(TEXTS, model="classifier")):
        found = [{entry.label: entry.score for entry in entries} for entries in answer.data]
        np.testing.assert_allclose(
            [[scores[label] for label in LABELS] for scores in found], expected.labels, atol=TOLERANCE
        )


@row("infinity_client", "Infinity", "/infinity", "models.sync, health.sync, .asyncio")
def test_models_and_health(server: Server) -> None:
    for answer in both(models, f"{server.url}/infinity"):
        assert [model.id for model in answer.data] == list(SERVED)
        assert [model.capabilities for model in answer.data] == [["embed"], ["rerank", "classify"], ["classify"]]
    for answer in both(health, f"{server.url}/infinity"):
        assert answer["unix"] > 0


@row("infinity_client", "Infinity", "/infinity", "errors: unknown model, empty text, wrong form")
def test_errors(server: Server) -> None:
    url = f"{server.url}/infinity"
    with pytest.raises(infinity_client.errors.UnexpectedStatus, match=r"400(.|\n)*Served: embedder"):
        embeddings.sync(client=client_of(url), body=OpenAIEmbeddingInputText(input_="a", model="nobody"))
    with pytest.raises(infinity_client.errors.UnexpectedStatus, match=r"400(.|\n)*empty text"):
        embeddings.sync(client=client_of(url), body=OpenAIEmbeddingInputText(input_=["a", ""], model="embedder"))
    for answer in both(rerank, url, RerankInput(QUERY, TEXTS, model="reranker", top_n=0)):
        assert isinstance(answer, HTTPValidationError)
        assert answer.detail[0].loc == ["body", "top_n"]


@row("infinity_client", "Infinity", "/infinity", "overload: status 429 and Retry-After, then another call gets through")
def test_a_full_queue(full: FullServer) -> None:
    client = infinity_client.Client(base_url=f"{full.url}/infinity", timeout=DEADLINE_S)  # does not retry by itself
    asked = OpenAIEmbeddingInputText(input_="hello", model="tiny")
    refused = embeddings.sync_detailed(client=client, body=asked)
    assert (refused.status_code, refused.parsed) == (429, None)
    assert float(refused.headers["retry-after"]) > 0
    full.open()
    full.check_vector(embeddings.sync(client=client, body=asked).data[0].embedding)


@row("infinity_client", "Infinity", "/", "InfinityVisionAPI.embed of texts: float, base64")
@row("infinity_client", "Infinity", "/infinity", "InfinityVisionAPI.embed of texts: float, base64")
@pytest.mark.parametrize("form", ["float", "base64"])
@BASES
def test_the_vision_client_embeds_texts(server: Server, expected: Expected, base: str, form: Any) -> None:
    client = InfinityVisionAPI(server.url + base, form, "embedder")
    vectors, num_tokens = client.embed("embedder", TEXTS).result(DEADLINE_S)
    expected.check_vectors(np.vstack(vectors))
    assert num_tokens == expected.num_tokens
