"""The vendors' own clients: the calls and the overloads that tests/e2e does not have."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import tests.clients.offline  # noqa: F401

# isort: split

import baseten_performance_client
import cohere
import httpx
import huggingface_hub
import numpy as np
import openai
import pytest
import voyageai.client
import voyageai.client_async
import voyageai.error

from tests.clients.conftest import TOO_LONG, Expected, FullServer, post, run
from tests.e2e.kinds import LABELS, QUERY, TEXTS, TOLERANCE
from tests.e2e.process import DEADLINE_S, Server

row = pytest.mark.client_call

BOTH = pytest.mark.parametrize("is_async", [False, True])


def ranking_of(results: Any) -> list[tuple[int, float]]:
    return [(one.index, one.relevance_score) for one in results]


# openai


@row("openai", "OpenAI", "/v1", "embeddings.create: overload, then the client's retry gets through; sync and async")
@BOTH
def test_openai_comes_back_to_a_full_queue(full: FullServer, is_async: bool) -> None:
    options: dict[str, Any] = {"base_url": f"{full.url}/v1", "api_key": "none", "max_retries": 5}

    async def call() -> Any:
        async with openai.AsyncOpenAI(**options) as client:
            return await client.embeddings.create(model="tiny", input="hello")

    def created() -> Any:
        with openai.OpenAI(**options) as client:
            return client.embeddings.create(model="tiny", input="hello")

    full.check_retried(lambda: (run(call()) if is_async else created()).data[0].embedding)


@row("openai", "vLLM", "/vllm/v1", "embeddings.create: errors: text too long; cut with truncate_prompt_tokens")
def test_openai_gets_vllm_s_error(server: Server, expected: Expected) -> None:
    with openai.OpenAI(base_url=f"{server.url}/vllm/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="48"):
            client.embeddings.create(model="embedder", input=TOO_LONG)
        cut = client.embeddings.create(model="embedder", input=TOO_LONG, extra_body={"truncate_prompt_tokens": -1})
    expected.check_vectors([cut.data[0].embedding], "cut")


# cohere


@asynccontextmanager
async def cohere_async(url: str, kind: Any) -> AsyncIterator[Any]:
    async with httpx.AsyncClient(timeout=DEADLINE_S) as http:
        yield kind(api_key="none", base_url=url, httpx_client=http)


@row("cohere", "Cohere", "/", "AsyncClient.embed, .rerank; AsyncClientV2.embed, .rerank")
@row("cohere", "Cohere", "/cohere", "AsyncClient.embed, .rerank; AsyncClientV2.embed, .rerank")
@pytest.mark.parametrize("base", ["", "/cohere"])
def test_cohere_s_async_clients(server: Server, expected: Expected, base: str) -> None:
    async def call(kind: Any, **fields: Any) -> Any:
        async with cohere_async(server.url + base, kind) as client:
            embedded = await client.embed(texts=TEXTS, model="embedder", input_type="search_document", **fields)
            return embedded, await client.rerank(model="reranker", query=QUERY, documents=TEXTS, top_n=3)

    first, ranked = run(call(cohere.AsyncClient))
    expected.check_vectors(first.embeddings)
    expected.check_ranking(ranking_of(ranked.results), 3)
    second, ranked = run(call(cohere.AsyncClientV2, embedding_types=["float"]))
    expected.check_vectors(second.embeddings.float_)
    expected.check_ranking(ranking_of(ranked.results), 3)


@row("cohere", "Cohere", "/cohere", "Client.embed of more than 96 texts, in several requests")
def test_cohere_s_client_joins_batches(server: Server, expected: Expected) -> None:
    with httpx.Client(timeout=DEADLINE_S) as http:
        client = cohere.Client(api_key="none", base_url=f"{server.url}/cohere", httpx_client=http)
        found: Any = client.embed(texts=TEXTS * 50, model="embedder", input_type="search_document")
    np.testing.assert_allclose(found.embeddings, np.tile(expected.vectors, (50, 1)), atol=TOLERANCE)


@row("cohere", "Cohere", "/cohere", "ClientV2.embed: inputs, truncate NONE; errors: text too long, unknown model")
def test_cohere_s_second_client(server: Server, expected: Expected) -> None:
    with httpx.Client(timeout=DEADLINE_S) as http:
        client: Any = cohere.ClientV2(api_key="none", base_url=f"{server.url}/cohere", httpx_client=http)
        asked = {"model": "embedder", "input_type": "search_query", "embedding_types": ["float"]}
        inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
        expected.check_vectors(client.embed(**asked, inputs=inputs).embeddings.float_)
        expected.check_vectors(client.embed(**asked, texts=[TOO_LONG]).embeddings.float_, "cut")
        with pytest.raises(cohere.BadRequestError, match="48"):
            client.embed(**asked, texts=[TOO_LONG], truncate="NONE")
        with pytest.raises(cohere.NotFoundError, match="Served: embedder"):
            client.embed(**{**asked, "model": "nobody"}, texts=["a"])


@row("cohere", "Cohere", "/cohere", "Client.embed, AsyncClient.embed: overload, then the client's retry gets through")
@BOTH
def test_cohere_comes_back_to_a_full_queue(full: FullServer, is_async: bool) -> None:
    asked: dict[str, Any] = {"texts": ["hello"], "model": "tiny", "input_type": "search_query"}
    url = f"{full.url}/cohere"

    async def call() -> Any:
        async with cohere_async(url, cohere.AsyncClient) as client:
            return await client.embed(**asked)

    def called() -> Any:
        with httpx.Client(timeout=DEADLINE_S) as http:
            client: Any = cohere.Client(api_key="none", base_url=url, httpx_client=http)
            with pytest.raises(cohere.TooManyRequestsError, match="retry in"):
                client.embed(**asked, request_options={"max_retries": 0})
            return client.embed(**asked)

    full.check_retried(lambda: (run(call()) if is_async else called()).embeddings[0])


@row(
    "cohere",
    "Cohere",
    "/cohere",
    "Client.classify",
    fails="bei has no such route under /cohere: 404. Ask /predict",
)
def test_cohere_s_classify(server: Server) -> None:
    with httpx.Client(timeout=DEADLINE_S) as http:
        client: Any = cohere.Client(api_key="none", base_url=f"{server.url}/cohere", httpx_client=http)
        with pytest.raises(cohere.NotFoundError, match="no route"):
            client.classify(inputs=["hello"], model="classifier", examples=[])


@row("cohere", "Cohere", "/cohere", "Client.tokenize, .detokenize; errors: unknown model")
@pytest.mark.parametrize("offline", [False, True])  # True: the client asks for a tokenizer's file, then the server
def test_cohere_s_tokens(server: Server, offline: bool) -> None:
    with httpx.Client(timeout=DEADLINE_S) as http:
        client: Any = cohere.Client(api_key="none", base_url=f"{server.url}/cohere", httpx_client=http)
        found = client.tokenize(text=TEXTS[0], model="embedder", offline=offline)
        plain = post(server, "/tokenize", prompt=TEXTS[0], model="embedder", add_special_tokens=False)
        assert found.tokens == plain["tokens"]
        assert len(found.token_strings) == len(found.tokens)
        assert found.meta.api_version.version == "1"
        text = client.detokenize(tokens=found.tokens, model="embedder", offline=offline).text
        assert text == post(server, "/detokenize", tokens=found.tokens, model="embedder")["prompt"]
        with pytest.raises(cohere.NotFoundError, match="Served: "):
            client.tokenize(text="hello", model="nobody", offline=offline)


# voyageai


@row("voyageai", "Voyage", "/voyage/v1", "AsyncClient.embed, .rerank")
def test_voyage_s_async_client(server: Server, expected: Expected) -> None:
    async def call() -> tuple[Any, Any]:
        client = voyageai.client_async.AsyncClient(
            api_key="none", base_url=f"{server.url}/voyage/v1", timeout=DEADLINE_S
        )
        embedded = await client.embed(TEXTS, model="embedder", input_type="query", output_dimension=8)
        return embedded, await client.rerank(QUERY, TEXTS, model="reranker", top_k=3)

    embedded, ranked = run(call())
    expected.check_vectors(embedded.embeddings, "short")
    assert embedded.total_tokens == expected.num_tokens
    expected.check_ranking(ranking_of(ranked.results), 3)


@row("voyageai", "Voyage", "/voyage/v1", "embed: text too long: cut, or an error with truncation=False")
def test_voyage_s_truncation(server: Server, expected: Expected) -> None:
    client = voyageai.client.Client(api_key="none", base_url=f"{server.url}/voyage/v1", timeout=DEADLINE_S)
    expected.check_vectors(client.embed([TOO_LONG], model="embedder").embeddings, "cut")
    with pytest.raises(voyageai.error.InvalidRequestError, match="48"):
        client.embed([TOO_LONG], model="embedder", truncation=False)


@row("voyageai", "Voyage", "/voyage/v1", "Client.embed, AsyncClient.embed: overload, then max_retries gets through")
@BOTH
def test_voyage_comes_back_to_a_full_queue(full: FullServer, is_async: bool) -> None:
    options: dict[str, Any] = {"api_key": "none", "base_url": f"{full.url}/voyage/v1", "timeout": DEADLINE_S}
    with pytest.raises(voyageai.error.RateLimitError, match="retry in"):
        voyageai.client.Client(**options).embed(["hello"], model="tiny")

    async def call() -> Any:
        return await voyageai.client_async.AsyncClient(**options, max_retries=5).embed(["hello"], model="tiny")

    def called() -> Any:
        return voyageai.client.Client(**options, max_retries=5).embed(["hello"], model="tiny")

    full.check_retried(lambda: (run(call()) if is_async else called()).embeddings[0])


@row(
    "voyageai",
    "Voyage",
    "/voyage/v1",
    "contextualized_embed by a model that cannot",
    fails="contextualized_embed needs a model built with --token-embeddings",
)
def test_voyage_s_embeddings_in_context(server: Server) -> None:
    client: Any = voyageai.client.Client(api_key="none", base_url=f"{server.url}/voyage/v1", timeout=DEADLINE_S)
    with pytest.raises(voyageai.error.VoyageError, match="build it with --token-embeddings"):
        client.contextualized_embed(inputs=[TEXTS], model="embedder", input_type="document")


@row("voyageai", "Voyage", "/voyage/v1", "multimodal_embed of texts")
def test_voyage_s_multimodal_call(server: Server, expected: Expected) -> None:
    client: Any = voyageai.client.Client(api_key="none", base_url=f"{server.url}/voyage/v1", timeout=DEADLINE_S)
    expected.check_vectors(client.multimodal_embed(inputs=[[text] for text in TEXTS], model="embedder").embeddings)


# huggingface_hub


@pytest.fixture
def hub() -> Iterator[None]:
    """Closes the client's connections."""
    yield
    huggingface_hub.close_session()


@row(
    "huggingface_hub",
    "TEI",
    "/tei/embed, /tei/similarity, /tei/predict",
    "AsyncInferenceClient.feature_extraction, .sentence_similarity, .text_classification",
)
def test_the_hub_s_async_client(server: Server, expected: Expected) -> None:
    async def call() -> tuple[Any, Any, Any]:
        def client(path: str) -> Any:
            return huggingface_hub.AsyncInferenceClient(f"{server.url}/tei{path}", timeout=DEADLINE_S)

        vectors = await client("/embed").feature_extraction(TEXTS)
        similar = await client("/similarity").sentence_similarity(TEXTS[0], other_sentences=TEXTS[1:])
        return vectors, similar, await client("/predict").text_classification(TEXTS[0])

    vectors, similar, best = run(call())
    expected.check_vectors(vectors)
    np.testing.assert_allclose(similar, expected.vectors[1:] @ expected.vectors[0], atol=TOLERANCE)
    assert best["label"] == LABELS[int(expected.labels[0].argmax())]  # of a bare list it gives the first
    assert best["score"] == pytest.approx(expected.labels[0].max(), abs=TOLERANCE)


@row("huggingface_hub", "TEI", "/tei/embed", "InferenceClient.feature_extraction: text too long: cut, or an error")
@pytest.mark.usefixtures("hub")
def test_the_hub_s_client_and_long_texts(server: Server, expected: Expected) -> None:
    client = huggingface_hub.InferenceClient(f"{server.url}/tei/embed", timeout=DEADLINE_S)
    expected.check_vectors(client.feature_extraction([TOO_LONG], truncate=True), "cut")
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="48"):
        client.feature_extraction([TOO_LONG], truncate=False)


@row("huggingface_hub", "TEI", "/tei", "InferenceClient.feature_extraction: overload: error 429, then another call")
@pytest.mark.usefixtures("hub")
def test_the_hub_s_client_and_a_full_queue(full: FullServer) -> None:
    client = huggingface_hub.InferenceClient(f"{full.url}/tei", timeout=DEADLINE_S)
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="retry in") as caught:
        client.feature_extraction("hello")
    assert caught.value.response.status_code == 429
    assert float(caught.value.response.headers["retry-after"]) > 0
    full.open()
    full.check_vector(client.feature_extraction("hello")[0])


# baseten-performance-client


@row(
    "baseten-performance-client", "BEI", "/", "async_embed, async_rerank, async_classify, batch_post, async_batch_post"
)
def test_baseten_s_other_calls(server: Server, expected: Expected) -> None:
    client: Any = baseten_performance_client.PerformanceClient(base_url=server.url, api_key="none")
    preference = baseten_performance_client.RequestProcessingPreference(batch_size=2)

    async def call() -> tuple[Any, ...]:
        payload = {"input": TEXTS, "model": "embedder"}
        return (
            await client.async_embed(TEXTS, model="embedder", preference=preference),
            await client.async_rerank(QUERY, TEXTS, truncate=True, preference=preference),
            await client.async_classify(TEXTS, model="classifier", truncate=True, preference=preference),
            await client.async_batch_post("/v1/embeddings", [payload]),
        )

    embedded, ranked, classified, posted = run(call())
    expected.check_vectors(embedded.numpy())
    scores = {entry.index: entry.score for entry in ranked.data}
    np.testing.assert_allclose([scores[index] for index in range(len(TEXTS))], expected.scores, atol=TOLERANCE)
    labels = [{entry.label: entry.score for entry in entries} for entries in classified.data]
    np.testing.assert_allclose([[one[name] for name in LABELS] for one in labels], expected.labels, atol=TOLERANCE)
    for answer in (posted, client.batch_post("/v1/embeddings", [{"input": TEXTS, "model": "embedder"}])):
        expected.check_vectors([entry["embedding"] for entry in answer.data[0]["data"]])


@row("baseten-performance-client", "BEI", "/", "embed: errors: unknown model, empty text")
def test_baseten_s_errors(server: Server) -> None:
    client: Any = baseten_performance_client.PerformanceClient(base_url=server.url, api_key="none")
    with pytest.raises(Exception, match="Served: embedder"):
        client.embed(["a"], model="nobody")
    with pytest.raises(Exception, match="empty text"):
        client.embed(["a", ""], model="embedder")


@row("baseten-performance-client", "BEI", "/", "embed, async_embed: overload, then the client's retry gets through")
@BOTH
def test_baseten_comes_back_to_a_full_queue(full: FullServer, is_async: bool) -> None:
    client: Any = baseten_performance_client.PerformanceClient(base_url=full.url, api_key="none")

    async def call() -> Any:
        return await client.async_embed(["hello"], model="tiny")

    made: Callable[[], Any] = lambda: run(call()) if is_async else client.embed(["hello"], model="tiny")  # noqa: E731
    full.check_retried(lambda: made().numpy()[0])
