"""LangChain's integrations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tests.clients.offline  # noqa: F401

# isort: split

import cohere
import huggingface_hub
import infinity_client
import langchain_cohere
import langchain_community.document_compressors
import langchain_community.embeddings
import langchain_huggingface
import langchain_nvidia_ai_endpoints
import langchain_openai
import langchain_voyageai
import litellm
import openai
import pytest
import voyageai.error
from langchain_core.documents import Document

from tests.clients.conftest import TOO_LONG, Expected, FullServer, run
from tests.e2e.kinds import QUERY, TEXTS
from tests.e2e.process import DEADLINE_S, Server

row = pytest.mark.client_call

DOCUMENTS = [Document(page_content=text, metadata={"place": place}) for place, text in enumerate(TEXTS)]


def check_embeds(client: Any, expected: Expected) -> None:
    """All four calls of an ``Embeddings``."""

    async def asynchronous() -> tuple[Any, Any]:  # on one loop: clients keep its connections
        return await client.aembed_documents(TEXTS), await client.aembed_query(TEXTS[0])

    documents, query = run(asynchronous())
    expected.check_vectors(documents)
    expected.check_vectors(client.embed_documents(TEXTS))
    expected.check_vectors([client.embed_query(text) for text in TEXTS])
    expected.check_vectors([query, *documents[1:]])


def check_ranks(client: Any, expected: Expected, top: int, *, raw: bool = False) -> None:
    """Both calls of a ``BaseDocumentCompressor``."""
    for found in (
        client.compress_documents(DOCUMENTS, QUERY),
        run(client.acompress_documents(DOCUMENTS, QUERY)),
    ):
        expected.check_ranking(
            [(one.metadata["place"], one.metadata["relevance_score"]) for one in found], top, raw=raw
        )
        assert all(one.page_content == TEXTS[one.metadata["place"]] for one in found)


# langchain-openai


def openai_embeddings(url: str, model: str = "embedder", **settings: Any) -> Any:
    settings = {"check_embedding_ctx_length": False, "max_retries": 0, "timeout": DEADLINE_S, **settings}
    return langchain_openai.OpenAIEmbeddings(model=model, base_url=f"{url}/v1", api_key="none", **settings)


@row("langchain-openai", "OpenAI", "/v1", "OpenAIEmbeddings(check_embedding_ctx_length=False): all four calls")
def test_openai_embeddings(server: Server, expected: Expected) -> None:
    check_embeds(openai_embeddings(server.url), expected)
    expected.check_vectors(openai_embeddings(server.url, dimensions=8).embed_documents(TEXTS), "short")
    expected.check_vectors(openai_embeddings(server.url).embed_documents([TOO_LONG]), "cut")


@row(
    "langchain-openai",
    "OpenAI",
    "/v1",
    "OpenAIEmbeddings(check_embedding_ctx_length=True), the default",
    fails="the client sends token ids of OpenAI's tokenizer, which are a 400 that names the setting",
)
def test_openai_embeddings_send_another_tokenizer_s_ids(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(Path(litellm.__file__).parent / "litellm_core_utils" / "tokenizers"))
    client = openai_embeddings(server.url, check_embedding_ctx_length=True)
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
        client.embed_query("hello")


@row("langchain-openai", "OpenAI", "/v1", "OpenAIEmbeddings: errors: unknown model, empty text")
def test_openai_embeddings_raise_openai_s_errors(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="Served: embedder"):
        openai_embeddings(server.url, "nobody").embed_query("a")
    with pytest.raises(openai.BadRequestError, match="empty text"):
        openai_embeddings(server.url).embed_documents(["a", ""])


@row("langchain-openai", "OpenAI", "/v1", "OpenAIEmbeddings: overload, sync and async")
@pytest.mark.parametrize("is_async", [False, True])
def test_openai_embeddings_come_back_to_a_full_queue(full: FullServer, is_async: bool) -> None:
    with pytest.raises(openai.RateLimitError, match="retry in"):
        openai_embeddings(full.url, "tiny").embed_query("hello")
    client = openai_embeddings(full.url, "tiny", max_retries=5)
    full.check_retried(lambda: run(client.aembed_query("hello")) if is_async else client.embed_query("hello"))


# langchain-huggingface


@pytest.fixture
def hugging_face(server: Server) -> Iterator[Callable[[str], Any]]:
    """``hugging_face(path)``: it takes names of the hub only, so the clients behind it are replaced."""

    def made(path: str) -> Any:
        embeddings = langchain_huggingface.HuggingFaceEndpointEmbeddings(
            model="any/name", huggingfacehub_api_token="none"
        )
        embeddings.client = huggingface_hub.InferenceClient(server.url + path, timeout=DEADLINE_S)
        embeddings.async_client = huggingface_hub.AsyncInferenceClient(server.url + path, timeout=DEADLINE_S)
        return embeddings

    yield made
    huggingface_hub.close_session()


@row(
    "langchain-huggingface", "TEI", "/tei/embed", "HuggingFaceEndpointEmbeddings, its clients replaced: all four calls"
)
def test_hugging_face_endpoint_embeddings(hugging_face: Callable[[str], Any], expected: Expected) -> None:
    check_embeds(hugging_face("/tei/embed"), expected)


@row(
    "langchain-huggingface",
    "TEI",
    "/tei",
    "HuggingFaceEndpointEmbeddings(model=URL)",
    fails="the client takes names of the hub only: replace its `client` and `async_client`",
)
def test_hugging_face_endpoint_embeddings_take_no_address(server: Server) -> None:
    with pytest.raises(ValueError, match="must be a HuggingFace repo ID, not a URL"):
        langchain_huggingface.HuggingFaceEndpointEmbeddings(model=f"{server.url}/tei", huggingfacehub_api_token="none")


@row("langchain-huggingface", "TEI", "/tei/embed", "HuggingFaceEndpointEmbeddings: errors: empty text")
def test_hugging_face_endpoint_embeddings_raise_the_hub_s_error(hugging_face: Callable[[str], Any]) -> None:
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="empty text"):
        hugging_face("/tei/embed").embed_documents(["a", ""])


@row("langchain-huggingface", "TEI", "/tei", "HuggingFaceEndpointEmbeddings: overload: error 429, then another call")
def test_hugging_face_endpoint_embeddings_and_a_full_queue(full: FullServer) -> None:
    embeddings = langchain_huggingface.HuggingFaceEndpointEmbeddings(model="any/name", huggingfacehub_api_token="none")
    embeddings.client = huggingface_hub.InferenceClient(f"{full.url}/tei", timeout=DEADLINE_S)
    try:
        with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="retry in") as caught:
            embeddings.embed_query("hello")
        assert caught.value.response.status_code == 429
        full.open()
        full.check_vector(embeddings.embed_query("hello"))
    finally:
        huggingface_hub.close_session()


# langchain-cohere


def cohere_embeddings(url: str, model: str = "embedder") -> Any:
    return langchain_cohere.CohereEmbeddings(
        model=model, base_url=url, cohere_api_key="none", request_timeout=DEADLINE_S, max_retries=1
    )


@row("langchain-cohere", "Cohere", "/", "CohereEmbeddings: all four calls")
@row("langchain-cohere", "Cohere", "/cohere", "CohereEmbeddings: all four calls")
@pytest.mark.parametrize("base", ["", "/cohere"])
def test_cohere_embeddings(server: Server, expected: Expected, base: str) -> None:
    check_embeds(cohere_embeddings(server.url + base), expected)
    expected.check_vectors(cohere_embeddings(server.url + base).embed_documents([TOO_LONG]), "cut")


def cohere_rerank(url: str, model: str = "reranker") -> Any:
    return langchain_cohere.CohereRerank(model=model, base_url=url, cohere_api_key="none", top_n=3)


@row("langchain-cohere", "Cohere", "/", "CohereRerank: compress_documents, acompress_documents, rerank")
@row("langchain-cohere", "Cohere", "/cohere", "CohereRerank: compress_documents, acompress_documents, rerank")
@pytest.mark.parametrize("base", ["", "/cohere"])
def test_cohere_rerank(server: Server, expected: Expected, base: str) -> None:
    client = cohere_rerank(server.url + base)
    check_ranks(client, expected, 3)
    found = client.rerank(TEXTS, QUERY, top_n=None)
    expected.check_ranking([(one["index"], one["relevance_score"]) for one in found])


@row("langchain-cohere", "Cohere", "/cohere", "errors: unknown model, empty text")
def test_cohere_s_errors(server: Server) -> None:
    with pytest.raises(cohere.NotFoundError, match="Served: embedder"):
        cohere_embeddings(f"{server.url}/cohere", "nobody").embed_query("a")
    with pytest.raises(cohere.BadRequestError, match="empty text"):
        cohere_embeddings(f"{server.url}/cohere").embed_documents(["a", ""])
    with pytest.raises(cohere.NotFoundError, match="Served: "):
        cohere_rerank(f"{server.url}/cohere", "nobody").compress_documents(DOCUMENTS, QUERY)


@row("langchain-cohere", "Cohere", "/cohere", "CohereEmbeddings: overload, sync and async")
@pytest.mark.parametrize("is_async", [False, True])
def test_cohere_embeddings_come_back_to_a_full_queue(full: FullServer, is_async: bool) -> None:
    client = cohere_embeddings(f"{full.url}/cohere", "tiny")
    full.check_retried(lambda: run(client.aembed_query("hello")) if is_async else client.embed_query("hello"))


# langchain-community: Infinity


@row("langchain-community", "Infinity", "/v1", "InfinityEmbeddings: all four calls")
@row("langchain-community", "Infinity", "/infinity", "InfinityEmbeddings: all four calls")
@pytest.mark.parametrize("base", ["/v1", "/infinity"])
def test_infinity_embeddings(server: Server, expected: Expected, base: str) -> None:
    client = langchain_community.embeddings.InfinityEmbeddings(model="embedder", infinity_api_url=server.url + base)
    check_embeds(client, expected)
    expected.check_vectors(client.embed_documents([TOO_LONG]), "cut")
    many = client.embed_documents(TEXTS * 60)  # in batches of 128, sorted by length
    expected.check_vectors(many[-len(TEXTS) :])


@row("langchain-community", "Infinity", "/infinity", "InfinityEmbeddings: errors: unknown model, empty text, overload")
def test_infinity_embeddings_raise_the_answer_s_text(server: Server, full: FullServer) -> None:
    def client(url: str, model: str) -> Any:
        return langchain_community.embeddings.InfinityEmbeddings(model=model, infinity_api_url=f"{url}/infinity")

    with pytest.raises(Exception, match=r"status 400: .*Served: embedder"):
        client(server.url, "nobody").embed_query("a")
    with pytest.raises(Exception, match=r"status 400: .*empty text"):
        client(server.url, "embedder").embed_documents(["a", ""])
    tiny = client(full.url, "tiny")
    with pytest.raises(Exception, match=r"status 429: .*retry in"):
        tiny.embed_query("hello")
    full.open()
    full.check_vector(tiny.embed_query("hello"))


@row("langchain-community", "Infinity", "/", "InfinityRerank: compress_documents, acompress_documents")
@row("langchain-community", "Infinity", "/infinity", "InfinityRerank: compress_documents, acompress_documents")
@pytest.mark.parametrize("base", ["", "/infinity"])
def test_infinity_rerank(server: Server, expected: Expected, base: str) -> None:
    client = infinity_client.Client(base_url=server.url + base, timeout=DEADLINE_S)
    check_ranks(langchain_community.document_compressors.InfinityRerank(client=client, model="reranker"), expected, 3)


# langchain-voyageai


@row("langchain-voyageai", "Voyage", "/voyage/v1", "VoyageAIRerank: compress_documents, acompress_documents")
def test_voyage_rerank(server: Server, expected: Expected) -> None:
    client = langchain_voyageai.VoyageAIRerank(
        model="reranker", api_key="none", base_url=f"{server.url}/voyage/v1", top_k=3
    )
    check_ranks(client, expected, 3)


@row("langchain-voyageai", "Voyage", "/voyage/v1", "VoyageAIRerank: errors: unknown model; an empty document is ranked")
def test_voyage_rerank_raises_voyage_s_errors(server: Server) -> None:
    def client(model: str) -> Any:
        return langchain_voyageai.VoyageAIRerank(model=model, api_key="none", base_url=f"{server.url}/voyage/v1")

    with pytest.raises(voyageai.error.InvalidRequestError, match="Served: "):
        client("nobody").compress_documents(DOCUMENTS, QUERY)
    given = [Document(page_content=""), *DOCUMENTS]
    assert len(client("reranker").compress_documents(given, QUERY)) == len(given)


def voyage_embeddings(server: Server) -> Any:
    return langchain_voyageai.VoyageAIEmbeddings(
        model="embedder", api_key="none", base_url=f"{server.url}/voyage/v1", batch_size=3
    )


@row(
    "langchain-voyageai",
    "Voyage",
    "/voyage/v1",
    "VoyageAIEmbeddings",
    fails="before each request the client counts tokens with voyageai/NAME's tokenizer from the hub; "
    "a name that is not there fails in the client. Replace `_client.tokenize`",
)
def test_voyage_embeddings_ask_the_hub_for_a_tokenizer(server: Server) -> None:
    with pytest.raises(Exception, match="on the Hub"):
        voyage_embeddings(server).embed_documents(TEXTS)


@row("langchain-voyageai", "Voyage", "/voyage/v1", "VoyageAIEmbeddings, its tokenizer replaced: all four calls")
def test_voyage_embeddings(server: Server, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    client = voyage_embeddings(server)
    monkeypatch.setattr(client._client, "tokenize", lambda texts, model: [text.split() for text in texts])
    check_embeds(client, expected)


@row("langchain-community", "Voyage", "/voyage/v1/embeddings", "VoyageEmbeddings(voyage_api_base=...): all four calls")
def test_community_voyage_embeddings(server: Server, expected: Expected) -> None:
    client = langchain_community.embeddings.VoyageEmbeddings(
        model="embedder", voyage_api_key="none", voyage_api_base=f"{server.url}/voyage/v1/embeddings", batch_size=2
    )
    check_embeds(client, expected)


# langchain-nvidia-ai-endpoints


@row("langchain-nvidia-ai-endpoints", "NIM", "/nim/v1", "NVIDIAEmbeddings: all four calls")
def test_nvidia_embeddings(server: Server, expected: Expected) -> None:
    def client(**settings: Any) -> Any:
        return langchain_nvidia_ai_endpoints.NVIDIAEmbeddings(
            model="embedder", base_url=f"{server.url}/nim/v1", truncate="END", **settings
        )

    check_embeds(client(), expected)
    expected.check_vectors(client(dimensions=8).embed_documents(TEXTS), "short")
    expected.check_vectors(client().embed_documents([TOO_LONG]), "cut")


@row("langchain-nvidia-ai-endpoints", "NIM", "/nim/v1", "NVIDIAEmbeddings: errors: text too long, unknown model")
def test_nvidia_embeddings_raise_the_answer_s_text(server: Server) -> None:
    def client(model: str) -> Any:
        return langchain_nvidia_ai_endpoints.NVIDIAEmbeddings(model=model, base_url=f"{server.url}/nim/v1")

    with pytest.raises(Exception, match="48"):
        client("embedder").embed_documents([TOO_LONG])
    with pytest.raises(Exception, match="empty text"):
        client("embedder").embed_documents(["a", ""])
    with pytest.raises(Exception, match="nobody"):
        client("nobody").embed_query("a")


@row("langchain-nvidia-ai-endpoints", "NIM", "/nim/v1", "NVIDIAEmbeddings: overload: error 503, then another call")
def test_nvidia_embeddings_and_a_full_queue(full: FullServer) -> None:
    client = langchain_nvidia_ai_endpoints.NVIDIAEmbeddings(model="tiny", base_url=f"{full.url}/nim/v1")
    with pytest.raises(Exception, match=r"503(.|\n)*retry in"):
        client.embed_query("hello")
    full.open()
    full.check_vector(client.embed_query("hello"))


@row("langchain-nvidia-ai-endpoints", "NIM", "/nim/v1", "NVIDIARerank: compress_documents, acompress_documents")
def test_nvidia_rerank(server: Server, expected: Expected) -> None:
    client = langchain_nvidia_ai_endpoints.NVIDIARerank(
        model="reranker", base_url=f"{server.url}/nim/v1", truncate="END", top_n=3
    )
    check_ranks(client, expected, 3, raw=True)
