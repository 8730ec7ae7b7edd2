"""LlamaIndex's integrations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tests.clients.offline  # noqa: F401

# isort: split

import cohere
import httpx
import numpy as np
import openai
import pytest
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.cohere import CohereEmbedding
from llama_index.embeddings.huggingface_api import HuggingFaceInferenceAPIEmbedding
from llama_index.embeddings.jinaai import JinaEmbedding
from llama_index.embeddings.nvidia import NVIDIAEmbedding
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.embeddings.voyageai import VoyageEmbedding
from llama_index.postprocessor.cohere_rerank import CohereRerank
from llama_index.postprocessor.jinaai_rerank import JinaRerank
from llama_index.postprocessor.nvidia_rerank import NVIDIARerank
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference
from llama_index.postprocessor.voyageai_rerank import VoyageAIRerank

from tests.clients.conftest import TOO_LONG, Expected, FullServer, run
from tests.e2e.kinds import MODELS, QUERY, TEXTS, TOLERANCE
from tests.e2e.process import DEADLINE_S, Server, serve
from tests.support.builds import build_artifact
from tests.support.zoo import save_case

row = pytest.mark.client_call


def check_embeds(client: Any, expected: Expected) -> None:
    """The six calls of a ``BaseEmbedding``."""

    async def asynchronous() -> tuple[Any, Any, Any]:  # on one loop: clients keep its connections
        texts = await client.aget_text_embedding_batch(TEXTS)
        return texts, await client.aget_text_embedding(TEXTS[0]), await client.aget_query_embedding(TEXTS[0])

    texts, text, query = run(asynchronous())
    expected.check_vectors(texts)
    expected.check_vectors([text, *texts[1:]])
    expected.check_vectors([query, *texts[1:]])
    expected.check_vectors(client.get_text_embedding_batch(TEXTS))
    expected.check_vectors([client.get_text_embedding(TEXTS[0]), *texts[1:]])
    expected.check_vectors([client.get_query_embedding(TEXTS[0]), *texts[1:]])


def nodes() -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=text, id_=str(place)), score=0.0) for place, text in enumerate(TEXTS)]


def check_ranks(client: Any, expected: Expected, top: int, *, raw: bool = False) -> None:
    """Both calls of a ``BaseNodePostprocessor``."""
    for found in (
        client.postprocess_nodes(nodes(), query_str=QUERY),
        run(client.apostprocess_nodes(nodes(), query_str=QUERY)),
    ):
        expected.check_ranking([(int(one.node.id_), one.score) for one in found], top, raw=raw)


# OpenAI


def openai_like(url: str, model: str = "embedder", **settings: Any) -> Any:
    settings = {"max_retries": 0, "timeout": DEADLINE_S, **settings}
    return OpenAILikeEmbedding(model_name=model, api_base=f"{url}/v1", api_key="none", **settings)


@row("llama-index-embeddings-openai-like", "OpenAI", "/v1", "OpenAILikeEmbedding: all six calls")
def test_openai_like(server: Server, expected: Expected) -> None:
    check_embeds(openai_like(server.url), expected)
    expected.check_vectors(openai_like(server.url, dimensions=8).get_text_embedding_batch(TEXTS), "short")
    expected.check_vectors([openai_like(server.url).get_text_embedding(TOO_LONG)], "cut")


@row("llama-index-embeddings-openai", "OpenAI", "/v1", "OpenAIEmbedding(model_name=...): all six calls")
def test_openai(server: Server, expected: Expected) -> None:
    client = OpenAIEmbedding(
        model_name="embedder", api_base=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
    )
    check_embeds(client, expected)


@row("llama-index-embeddings-openai-like", "OpenAI", "/v1", "OpenAILikeEmbedding: errors: unknown model, empty text")
def test_openai_like_raises_openai_s_errors(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="Served: embedder"):
        openai_like(server.url, "nobody").get_text_embedding("a")
    with pytest.raises(openai.BadRequestError, match="empty text"):
        openai_like(server.url).get_text_embedding_batch(["a", ""])


@row("llama-index-embeddings-openai-like", "OpenAI", "/v1", "OpenAILikeEmbedding: overload, sync and async")
@pytest.mark.parametrize("is_async", [False, True])
def test_openai_like_comes_back_to_a_full_queue(full: FullServer, is_async: bool) -> None:
    with pytest.raises(openai.RateLimitError, match="retry in"):
        openai_like(full.url, "tiny").get_text_embedding("hello")
    client = openai_like(full.url, "tiny", max_retries=5)
    full.check_retried(
        lambda: run(client.aget_text_embedding("hello")) if is_async else client.get_text_embedding("hello")
    )


# text-embeddings-inference


def tei(url: str, model: str = "embedder", **settings: Any) -> Any:
    return TextEmbeddingsInference(model_name=model, base_url=url, timeout=DEADLINE_S, **settings)


@row("llama-index-embeddings-text-embeddings-inference", "TEI", "/", "TextEmbeddingsInference: all six calls")
@row("llama-index-embeddings-text-embeddings-inference", "TEI", "/tei", "TextEmbeddingsInference: all six calls")
@pytest.mark.parametrize("base", ["", "/tei"])
def test_tei(server: Server, expected: Expected, base: str) -> None:
    check_embeds(tei(server.url + base), expected)
    expected.check_vectors([tei(server.url + base).get_text_embedding(TOO_LONG)], "cut")


@row(
    "llama-index-embeddings-text-embeddings-inference",
    "TEI",
    "/tei",
    "TextEmbeddingsInference: errors",
    fails="the client does not look at the status: an error ends in a KeyError, an overload is not retried",
)
def test_tei_s_client_reads_errors_as_vectors(server: Server, full: FullServer) -> None:
    with pytest.raises(KeyError):
        tei(f"{server.url}/tei", truncate_text=False).get_text_embedding(TOO_LONG)
    client = tei(f"{full.url}/tei", "tiny")
    with pytest.raises(KeyError):
        client.get_text_embedding("hello")
    full.open()
    full.check_vector(client.get_text_embedding("hello"))


@row("llama-index-postprocessor-tei-rerank", "TEI", "/", "TextEmbeddingInference: both calls")
@row("llama-index-postprocessor-tei-rerank", "TEI", "/tei", "TextEmbeddingInference: both calls")
@pytest.mark.parametrize("base", ["", "/tei"])
def test_tei_rerank(server: Server, expected: Expected, base: str) -> None:
    check_ranks(TextEmbeddingInference(base_url=server.url + base, top_n=3, timeout=DEADLINE_S), expected, 3)


# Cohere

COHERE_S_NAME = "embed-english-v3.0"


@pytest.fixture(scope="module")
def cohere_s(tmp_path_factory: pytest.TempPathFactory, env: Mapping[str, str], home: Path) -> Iterator[Server]:
    """The embedder under a name of Cohere's: the client takes no others."""
    folder = tmp_path_factory.mktemp("cohere")
    checkpoint = save_case(folder / "embedder", MODELS["embedder"])
    artifact = build_artifact(checkpoint, folder / "built", name=COHERE_S_NAME, reference="engine")
    with serve([artifact.path], env, home) as server:
        yield server


@row("llama-index-embeddings-cohere", "Cohere", "/", "CohereEmbedding(model_name=a name of Cohere's): all six calls")
@row(
    "llama-index-embeddings-cohere",
    "Cohere",
    "/cohere",
    "CohereEmbedding(model_name=a name of Cohere's): all six calls",
)
@pytest.mark.parametrize("base", ["", "/cohere"])
def test_cohere(cohere_s: Server, expected: Expected, base: str) -> None:
    client = CohereEmbedding(
        model_name=COHERE_S_NAME, api_key="none", base_url=cohere_s.url + base, timeout=DEADLINE_S, max_retries=1
    )
    check_embeds(client, expected)
    expected.check_vectors([client.get_text_embedding(TOO_LONG)], "cut")
    with pytest.raises(cohere.BadRequestError, match="empty text"):
        client.get_text_embedding_batch(["a", ""])


@row(
    "llama-index-embeddings-cohere",
    "Cohere",
    "/cohere",
    "CohereEmbedding(model_name=any other)",
    fails="the client knows Cohere's names only: build the model with such a --name",
)
def test_cohere_takes_no_other_names(server: Server) -> None:
    with pytest.raises(ValueError, match="embedder is not a valid model name"):
        CohereEmbedding(model_name="embedder", api_key="none", base_url=f"{server.url}/cohere")


@row("llama-index-postprocessor-cohere-rerank", "Cohere", "/", "CohereRerank: both calls")
@row("llama-index-postprocessor-cohere-rerank", "Cohere", "/cohere", "CohereRerank: both calls")
@pytest.mark.parametrize("base", ["", "/cohere"])
def test_cohere_rerank(server: Server, expected: Expected, base: str) -> None:
    def client(model: str) -> Any:
        return CohereRerank(top_n=3, model=model, api_key="none", base_url=server.url + base, max_retries=1)

    check_ranks(client("reranker"), expected, 3)
    with pytest.raises(cohere.NotFoundError, match="Served: "):
        client("nobody").postprocess_nodes(nodes(), query_str=QUERY)


# Hugging Face


def hugging_face(server: Server) -> Any:
    return HuggingFaceInferenceAPIEmbedding(model_name=f"{server.url}/tei/embed", timeout=DEADLINE_S)


@row("llama-index-embeddings-huggingface-api", "TEI", "/tei/embed", "HuggingFaceInferenceAPIEmbedding: all six calls")
def test_hugging_face(server: Server, expected: Expected) -> None:
    async def asynchronous(client: Any) -> list[Any]:
        texts = await client.aget_text_embedding_batch(TEXTS)
        return [*texts, await client.aget_text_embedding(TEXTS[0]), await client.aget_query_embedding(TEXTS[0])]

    *texts, text, query = run(asynchronous(hugging_face(server)))
    for first in (
        *(texts[0], text, query),
        hugging_face(server).get_text_embedding(TEXTS[0]),
        hugging_face(server).get_query_embedding(TEXTS[0]),
    ):
        expected.check_vectors([first, *texts[1:]])
    expected.check_vectors(hugging_face(server).get_text_embedding_batch(TEXTS))


@row(
    "llama-index-embeddings-huggingface-api",
    "TEI",
    "/tei/embed",
    "HuggingFaceInferenceAPIEmbedding: a second synchronous call",
    fails="the client keeps a connection of an event loop that it has closed: make a new client for each call",
)
def test_hugging_face_fails_at_the_second_call(server: Server) -> None:
    client = hugging_face(server)
    client.get_text_embedding(TEXTS[0])
    with pytest.raises(RuntimeError, match="Event loop is closed"):
        client.get_text_embedding(TEXTS[0])


# NVIDIA


@row("llama-index-embeddings-nvidia", "NIM", "/nim/v1", "NVIDIAEmbedding: all six calls")
def test_nvidia(server: Server, expected: Expected) -> None:
    def client(**settings: Any) -> Any:
        return NVIDIAEmbedding(
            model="embedder", base_url=f"{server.url}/nim/v1", timeout=DEADLINE_S, max_retries=0, **settings
        )

    check_embeds(client(truncate="END"), expected)
    expected.check_vectors([client(truncate="END").get_text_embedding(TOO_LONG)], "cut")
    with pytest.raises(openai.BadRequestError, match="48"):
        client(truncate="NONE").get_text_embedding(TOO_LONG)


@row("llama-index-embeddings-nvidia", "NIM", "/nim/v1", "NVIDIAEmbedding: overload (503), sync and async")
@pytest.mark.parametrize("is_async", [False, True])
def test_nvidia_comes_back_to_a_full_queue(full: FullServer, is_async: bool) -> None:
    client = NVIDIAEmbedding(model="tiny", base_url=f"{full.url}/nim/v1", max_retries=5)
    full.check_retried(
        lambda: run(client.aget_text_embedding("hello")) if is_async else client.get_text_embedding("hello"), 503
    )


@row("llama-index-postprocessor-nvidia-rerank", "NIM", "/nim/v1", "NVIDIARerank: both calls")
def test_nvidia_rerank(server: Server, expected: Expected) -> None:
    client = NVIDIARerank(model="reranker", base_url=f"{server.url}/nim/v1", truncate="END", top_n=3)
    check_ranks(client, expected, 3, raw=True)
    uncut = NVIDIARerank(model="reranker", base_url=f"{server.url}/nim/v1", truncate="NONE")
    with pytest.raises(httpx.HTTPStatusError, match="400"):
        uncut.postprocess_nodes([NodeWithScore(node=TextNode(text=TOO_LONG))], query_str=QUERY)


# Jina


@row("llama-index-postprocessor-jinaai-rerank", "Jina", "/v1", "JinaRerank: both calls")
@row("llama-index-postprocessor-jinaai-rerank", "Jina", "/jina/v1", "JinaRerank: both calls")
@pytest.mark.parametrize("base", ["/v1", "/jina/v1"])
def test_jina_rerank(server: Server, expected: Expected, base: str) -> None:
    check_ranks(JinaRerank(top_n=3, model="reranker", base_url=server.url + base, api_key="none"), expected, 3)


@row("llama-index-postprocessor-jinaai-rerank", "Jina", "/v1", "JinaRerank: errors")
@row("llama-index-postprocessor-jinaai-rerank", "Jina", "/jina/v1", "JinaRerank: errors")
@pytest.mark.parametrize("base", ["/v1", "/jina/v1"])
def test_jina_rerank_raises_the_message(server: Server, base: str) -> None:
    client = JinaRerank(top_n=3, model="nobody", base_url=server.url + base, api_key="none")
    with pytest.raises(RuntimeError, match=r"is not served here\. Served: "):
        client.postprocess_nodes(nodes(), query_str=QUERY)


@row(
    "llama-index-embeddings-jinaai",
    "Jina",
    "/v1",
    "JinaEmbedding",
    fails="the client has no setting for the address (`_api.api_url` may be replaced)",
)
def test_jina_embedding_takes_no_address(server: Server, expected: Expected) -> None:
    client = JinaEmbedding(model="embedder", api_key="none", base_url=f"{server.url}/v1")
    assert client._api.api_url == "https://api.jina.ai/v1/embeddings"


@row("llama-index-embeddings-jinaai", "Jina", "/v1", "JinaEmbedding, its address replaced: all six calls")
def test_jina_embedding(server: Server, expected: Expected) -> None:
    client = JinaEmbedding(model="embedder", api_key="none")
    client._api.api_url = f"{server.url}/v1/embeddings"
    check_embeds(client, expected)


@row(
    "llama-index-embeddings-jinaai",
    "Jina",
    "/jina/v1",
    "JinaEmbedding, its address replaced: synchronous and asynchronous calls; errors: text too long",
)
def test_jina_embedding_under_its_mount_point(server: Server, expected: Expected) -> None:
    client = JinaEmbedding(model="embedder", api_key="none")
    client._api.api_url = f"{server.url}/jina/v1/embeddings"
    fitting = TEXTS[:4]  # the client does not say that texts may be cut
    for found in (client.get_text_embedding_batch(fitting), run(client.aget_text_embedding_batch(fitting))):
        np.testing.assert_allclose(found, expected.vectors[:4], atol=TOLERANCE)
    with pytest.raises(RuntimeError, match="more than the model's 48 tokens"):
        client.get_text_embedding(TOO_LONG)


# Voyage


@row("llama-index-postprocessor-voyageai-rerank", "Voyage", "/voyage/v1", "VoyageAIRerank, its address replaced")
def test_voyage_rerank(server: Server, expected: Expected) -> None:
    client = VoyageAIRerank(model="reranker", api_key="none", top_n=3)
    client._client._params["base_url"] = f"{server.url}/voyage/v1"
    check_ranks(client, expected, 3)


@row(
    "llama-index-embeddings-voyageai",
    "Voyage",
    "/voyage/v1",
    "VoyageEmbedding, its address and tokenizer replaced: all six calls",
)
def test_voyage(server: Server, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    client = VoyageEmbedding(model_name="embedder", voyage_api_key="none")
    for inner in (client._client, client._aclient):
        inner._params["base_url"] = f"{server.url}/voyage/v1"
    monkeypatch.setattr(client._client, "tokenize", lambda texts, model: [text.split() for text in texts])
    check_embeds(client, expected)
