"""Ollama's own client, and LangChain's for it."""

from __future__ import annotations

from typing import Any

import langchain_ollama
import numpy as np
import ollama
import pytest

from tests.clients.conftest import TOO_LONG, Expected, post, run
from tests.e2e.kinds import TEXTS, TOLERANCE
from tests.e2e.process import DEADLINE_S, Server

row = pytest.mark.client_call

BASES = pytest.mark.parametrize("base", ["", "/ollama"])


@pytest.fixture
def client(server: Server) -> ollama.Client:
    return ollama.Client(server.url, timeout=DEADLINE_S)


@row("ollama", "Ollama", "/", "embed: texts, one text, dimensions, truncate, options")
@row("ollama", "Ollama", "/ollama", "embed: texts, one text, dimensions, truncate, options")
@BASES
def test_embed(server: Server, expected: Expected, base: str) -> None:
    client = ollama.Client(server.url + base, timeout=DEADLINE_S)
    found = client.embed(model="embedder", input=TEXTS, keep_alive="5m")
    expected.check_vectors(found.embeddings)
    assert (found.model, found.prompt_eval_count) == ("embedder", expected.num_tokens)
    expected.check_vectors(client.embed(model="embedder:latest", input=TEXTS, dimensions=8).embeddings, "short")
    expected.check_vectors(client.embed(model="embedder", input=TOO_LONG, options={"num_ctx": 2048}).embeddings, "cut")
    with pytest.raises(ollama.ResponseError, match="48") as caught:
        client.embed(model="embedder", input=TOO_LONG, truncate=False)
    assert caught.value.status_code == 400


@row("ollama", "Ollama", "/", "embeddings: the vector as the model gives it")
def test_the_older_call(server: Server, client: ollama.Client) -> None:
    raw = post(server, "/embed", inputs=TEXTS[0], model="embedder", normalize=False)
    found = client.embeddings(model="embedder", prompt=TEXTS[0]).embedding
    np.testing.assert_allclose(np.array([found]), np.array(raw), atol=TOLERANCE)


@row("ollama", "Ollama", "/", "list, ps, show, pull (with its stream); errors: unknown model")
def test_models(client: ollama.Client) -> None:
    names = ["embedder:latest", "reranker:latest", "classifier:latest"]
    assert [one.model for one in client.list().models] == names
    assert [one.name for one in client.ps().models] == names
    shown = client.show("embedder")
    assert shown.capabilities == ["embedding"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["bert.context_length"] == 48
    assert client.pull("embedder").status == "success"
    assert [step.status for step in client.pull("embedder", stream=True)][-1] == "success"
    for call in (client.show, client.pull):
        with pytest.raises(ollama.ResponseError, match="model 'llama3' not found") as caught:
            call("llama3")
        assert caught.value.status_code == 404


@row("ollama", "Ollama", "/", "AsyncClient.embed")
def test_the_asynchronous_client(server: Server, expected: Expected) -> None:
    async def call() -> Any:
        return await ollama.AsyncClient(server.url).embed(model="embedder", input=TEXTS)

    expected.check_vectors(run(call()).embeddings)


@row("langchain-ollama", "Ollama", "/", "OllamaEmbeddings: .embed_documents, .embed_query, validate_model_on_init")
@row(
    "langchain-ollama", "Ollama", "/ollama", "OllamaEmbeddings: .embed_documents, .embed_query, validate_model_on_init"
)
@BASES
def test_langchain(server: Server, expected: Expected, base: str) -> None:
    def embeddings(model: str) -> Any:
        return langchain_ollama.OllamaEmbeddings(model=model, base_url=server.url + base, validate_model_on_init=True)

    expected.check_vectors(embeddings("embedder").embed_documents(TEXTS))
    expected.check_vectors([embeddings("embedder").embed_query(TOO_LONG)], "cut")
    with pytest.raises(ValueError, match="not found"):
        embeddings("llama3")
