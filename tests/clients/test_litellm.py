"""litellm: every provider that embeds or ranks and takes an ``api_base``, each at the address its users would give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tests.clients.offline  # noqa: F401

# isort: split

import litellm
import pytest

from tests.clients.conftest import TOO_LONG, Expected, FullServer, run
from tests.e2e.kinds import QUERY, TEXTS, TOLERANCE
from tests.e2e.process import DEADLINE_S, Server

row = pytest.mark.client_call

Call = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def embedding(request: pytest.FixtureRequest) -> Call:
    if request.param == "sync":
        return lambda **fields: litellm.embedding(api_key="none", timeout=DEADLINE_S, **fields)
    return lambda **fields: run(litellm.aembedding(api_key="none", timeout=DEADLINE_S, **fields))


@pytest.fixture(params=["sync", "async"])
def rerank(request: pytest.FixtureRequest) -> Call:
    if request.param == "sync":
        return lambda **fields: litellm.rerank(api_key="none", timeout=DEADLINE_S, **fields)
    return lambda **fields: run(litellm.arerank(api_key="none", timeout=DEADLINE_S, **fields))


def vectors_of(response: Any) -> list[list[float]]:
    assert [entry["index"] for entry in response.data] == list(range(len(response.data)))
    return [entry["embedding"] for entry in response.data]


def ranking_of(response: Any) -> list[tuple[int, float]]:
    return [(entry["index"], entry["relevance_score"]) for entry in response.results]


EMBEDDING = [
    pytest.param("openai", "/v1", marks=row("litellm", "OpenAI", "/v1", "embedding, aembedding: openai/")),
    pytest.param(
        "openai_like",
        "/v1",
        marks=row("litellm", "OpenAI", "/v1", "embedding, aembedding: openai_like/ (it takes no dimensions)"),
    ),
    pytest.param("together_ai", "/v1", marks=row("litellm", "OpenAI", "/v1", "embedding, aembedding: together_ai/")),
    pytest.param("jina_ai", "/v1", marks=row("litellm", "Jina", "/v1", "embedding, aembedding: jina_ai/")),
    pytest.param("jina_ai", "/jina/v1", marks=row("litellm", "Jina", "/jina/v1", "embedding, aembedding: jina_ai/")),
    pytest.param("hosted_vllm", "/v1", marks=row("litellm", "vLLM", "/v1", "embedding, aembedding: hosted_vllm/")),
    pytest.param(
        "hosted_vllm", "/vllm/v1", marks=row("litellm", "vLLM", "/vllm/v1", "embedding, aembedding: hosted_vllm/")
    ),
    pytest.param("infinity", "/v1", marks=row("litellm", "Infinity", "/v1", "embedding, aembedding: infinity/")),
    pytest.param(
        "infinity", "/infinity", marks=row("litellm", "Infinity", "/infinity", "embedding, aembedding: infinity/")
    ),
    pytest.param("cohere", "/v2/embed", marks=row("litellm", "Cohere", "/v2/embed", "embedding, aembedding: cohere/")),
    pytest.param(
        "cohere",
        "/cohere/v2/embed",
        marks=row("litellm", "Cohere", "/cohere/v2/embed", "embedding, aembedding: cohere/"),
    ),
    pytest.param(
        "voyage", "/voyage/v1", marks=row("litellm", "Voyage", "/voyage/v1", "embedding, aembedding: voyage/")
    ),
    pytest.param("nvidia_nim", "/nim/v1", marks=row("litellm", "NIM", "/nim/v1", "embedding, aembedding: nvidia_nim/")),
]


@pytest.mark.parametrize(("provider", "base"), EMBEDDING)
def test_a_provider_embeds(server: Server, expected: Expected, embedding: Call, provider: str, base: str) -> None:
    asked: dict[str, Any] = {"model": f"{provider}/embedder", "api_base": server.url + base}
    if provider == "nvidia_nim":  # its texts are cut only if the request says so
        asked["truncate"] = "END"
    if base == "/vllm/v1":
        asked["truncate_prompt_tokens"] = -1
    if base == "/jina/v1":
        asked["truncate"] = True
    if provider == "openai":  # else it takes no dimensions of a model whose name it does not know
        asked["allowed_openai_params"] = ["dimensions"]
    response = embedding(**asked, input=TEXTS)
    expected.check_vectors(vectors_of(response))
    assert response.usage.prompt_tokens == expected.num_tokens
    if provider != "openai_like":
        expected.check_vectors(vectors_of(embedding(**asked, input=TEXTS, dimensions=8)), "short")


@row("litellm", "TEI", "/tei/embed", "embedding, aembedding: huggingface/ with input_type='embed'")
def test_hugging_face_s_provider_embeds(server: Server, expected: Expected, embedding: Call) -> None:
    asked = {"model": "huggingface/embedder", "api_base": f"{server.url}/tei/embed", "input_type": "embed"}
    expected.check_vectors(vectors_of(embedding(**asked, input=TEXTS)))


RERANK = [
    pytest.param("cohere", "", marks=row("litellm", "Cohere", "/", "rerank, arerank: cohere/")),
    pytest.param("cohere", "/cohere", marks=row("litellm", "Cohere", "/cohere", "rerank, arerank: cohere/")),
    pytest.param("jina_ai", "/v1", marks=row("litellm", "Jina", "/v1", "rerank, arerank: jina_ai/")),
    pytest.param("together_ai", "/v1", marks=row("litellm", "Cohere", "/v1", "rerank, arerank: together_ai/")),
    pytest.param("hosted_vllm", "/v1", marks=row("litellm", "vLLM", "/v1", "rerank, arerank: hosted_vllm/")),
    pytest.param("hosted_vllm", "/vllm", marks=row("litellm", "vLLM", "/vllm", "rerank, arerank: hosted_vllm/")),
    pytest.param("infinity", "/infinity", marks=row("litellm", "Infinity", "/infinity", "rerank, arerank: infinity/")),
    pytest.param("voyage", "/voyage/v1", marks=row("litellm", "Voyage", "/voyage/v1", "rerank, arerank: voyage/")),
    pytest.param("nvidia_nim", "/nim", marks=row("litellm", "NIM", "/nim", "rerank, arerank: nvidia_nim/")),
    pytest.param(
        "nvidia_nim/ranking", "/nim", marks=row("litellm", "NIM", "/nim", "rerank, arerank: nvidia_nim/ranking/")
    ),
]


@pytest.mark.parametrize(("provider", "base"), RERANK)
def test_a_provider_ranks(server: Server, expected: Expected, rerank: Call, provider: str, base: str) -> None:
    asked: dict[str, Any] = {"model": f"{provider}/reranker", "api_base": server.url + base, "query": QUERY}
    is_nim = provider.startswith("nvidia_nim")
    if is_nim:
        asked["truncate"] = "END"
    if base == "/vllm":
        asked["truncate_prompt_tokens"] = -1
    response = rerank(**asked, documents=TEXTS)
    expected.check_ranking(ranking_of(response), raw=is_nim)
    expected.check_ranking(ranking_of(rerank(**asked, documents=TEXTS, top_n=2)), 2, raw=is_nim)


@row("litellm", "TEI", "/", "rerank, arerank: huggingface/")
@row("litellm", "TEI", "/tei", "rerank, arerank: huggingface/")
@pytest.mark.parametrize(("base", "error"), [("", litellm.BadRequestError), ("/tei", litellm.APIError)])
def test_hugging_face_s_provider_ranks(
    server: Server, expected: Expected, rerank: Call, base: str, error: type[Exception]
) -> None:
    asked = {"model": "huggingface/reranker", "api_base": server.url + base, "query": QUERY}
    short = [place for place in expected.order if place < 3]
    found = dict(ranking_of(rerank(**asked, documents=TEXTS[:3])))
    assert list(found) == short
    assert list(found.values()) == pytest.approx(expected.scores[short].tolist(), abs=TOLERANCE)
    with pytest.raises(error, match="more than the model's 48 tokens"):
        rerank(**asked, documents=[TOO_LONG], truncate=False)  # which older versions said by themselves


@row("litellm", "OpenAI", "/v1", "errors: unknown model, empty text")
def test_errors_have_their_classes(server: Server, embedding: Call) -> None:
    asked = {"api_base": f"{server.url}/v1", "input": ["a"]}
    with pytest.raises(litellm.NotFoundError, match="Served: embedder"):
        embedding(**asked, model="openai/nobody")
    with pytest.raises(litellm.BadRequestError, match="empty text"):
        embedding(**{**asked, "input": ["a", ""]}, model="openai/embedder")
    with pytest.raises(litellm.BadRequestError, match="reranker cannot embed"):
        embedding(**asked, model="openai/reranker")


@row("litellm", "vLLM", "/vllm/v1", "errors: text too long: hosted_vllm/")
def test_a_text_that_is_too_long_is_vllm_s_error(server: Server, embedding: Call) -> None:
    with pytest.raises(litellm.BadRequestError, match="48"):
        embedding(model="hosted_vllm/embedder", api_base=f"{server.url}/vllm/v1", input=[TOO_LONG])


@row("litellm", "OpenAI", "/v1", "text too long is cut")
def test_a_text_that_is_too_long_is_cut(server: Server, expected: Expected, embedding: Call) -> None:
    response = embedding(model="openai/embedder", api_base=f"{server.url}/v1", input=[TOO_LONG])
    expected.check_vectors(vectors_of(response), "cut")


@row("litellm", "Cohere", "/cohere", "errors: unknown model: cohere/")
def test_rerank_errors_have_their_classes(server: Server, rerank: Call) -> None:
    with pytest.raises(litellm.NotFoundError, match="Served: "):
        rerank(model="cohere/nobody", api_base=f"{server.url}/cohere", query="a", documents=["b"])


@row("litellm", "OpenAI", "/v1", "overload: RateLimitError, then a retry gets through (num_retries)")
def test_a_full_queue_is_retried(full: FullServer, embedding: Call) -> None:
    asked = {"model": "openai/tiny", "api_base": f"{full.url}/v1", "input": ["hello"]}
    with pytest.raises(litellm.RateLimitError, match="retry in"):
        embedding(**asked, max_retries=0)
    full.check_retried(lambda: vectors_of(embedding(**asked, max_retries=5))[0])


PROVIDERS = [
    pytest.param(
        "hosted_vllm", "/vllm/v1", marks=row("litellm", "vLLM", "/vllm/v1", "errors and overload: hosted_vllm/")
    ),
    pytest.param(
        "infinity", "/infinity", marks=row("litellm", "Infinity", "/infinity", "errors and overload: infinity/")
    ),
    pytest.param(
        "cohere", "/cohere/v2/embed", marks=row("litellm", "Cohere", "/cohere/v2/embed", "errors and overload: cohere/")
    ),
    pytest.param("voyage", "/voyage/v1", marks=row("litellm", "Voyage", "/voyage/v1", "errors and overload: voyage/")),
    pytest.param("jina_ai", "/v1", marks=row("litellm", "Jina", "/v1", "errors and overload: jina_ai/")),
    pytest.param("jina_ai", "/jina/v1", marks=row("litellm", "Jina", "/jina/v1", "errors and overload: jina_ai/")),
    pytest.param("nvidia_nim", "/nim/v1", marks=row("litellm", "NIM", "/nim/v1", "errors and overload: nvidia_nim/")),
]


@pytest.mark.parametrize(("provider", "base"), PROVIDERS)
def test_errors_and_overload_of_a_provider(
    server: Server, full: FullServer, embedding: Call, provider: str, base: str
) -> None:
    asked: dict[str, Any] = {"api_base": server.url + base}
    with pytest.raises(litellm.BadRequestError, match="empty text"):
        embedding(**asked, model=f"{provider}/embedder", input=["a", ""])
    unknown: Any = (litellm.NotFoundError, litellm.BadRequestError)
    with pytest.raises(unknown, match="Served: embedder"):
        embedding(**asked, model=f"{provider}/nobody", input=["a"])
    overload = litellm.ServiceUnavailableError if provider == "nvidia_nim" else litellm.RateLimitError
    asked = {"model": f"{provider}/tiny", "api_base": full.url + base, "input": ["hello"], "max_retries": 0}
    with pytest.raises(overload, match="retry in"):
        embedding(**asked)
    full.open()
    full.check_vector(vectors_of(embedding(**asked))[0])
