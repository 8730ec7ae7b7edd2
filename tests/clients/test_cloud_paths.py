"""Clients whose paths are a cloud's: Azure OpenAI, Cohere's models and keys, Hugging Face's older paths."""

from __future__ import annotations

from typing import Any

import cohere
import huggingface_hub
import langchain_openai
import numpy as np
import openai
import pytest
from cohere.base_client import BaseCohere

from tests.clients.conftest import Expected, run
from tests.e2e.kinds import LABELS, TEXTS, TOLERANCE
from tests.e2e.process import DEADLINE_S, Server

row = pytest.mark.client_call

VERSION = "2024-10-21"


def azure(server: Server, kind: Any = openai.AzureOpenAI, **fields: Any) -> Any:
    return kind(azure_endpoint=server.url, api_key="none", api_version=VERSION, timeout=DEADLINE_S, **fields)


@row("openai", "Azure OpenAI", "/", "AzureOpenAI, AsyncAzureOpenAI: embeddings.create; errors: unknown deployment")
def test_azure(server: Server, expected: Expected) -> None:
    client = azure(server, max_retries=0)
    found = client.embeddings.create(model="embedder", input=TEXTS)
    expected.check_vectors([one.embedding for one in found.data])
    assert found.usage.prompt_tokens == expected.num_tokens
    short = azure(server, azure_deployment="embedder").embeddings.create(model="any", input=TEXTS, dimensions=8)
    expected.check_vectors([one.embedding for one in short.data], "short")
    with pytest.raises(openai.NotFoundError, match="Served: embedder") as caught:
        client.embeddings.create(model="text-embedding-3-small", input="a")
    assert caught.value.code == "model_not_found"

    async def call() -> Any:
        return await azure(server, openai.AsyncAzureOpenAI).embeddings.create(model="embedder", input=TEXTS)

    expected.check_vectors([one.embedding for one in run(call()).data])


@row("openai", "Azure OpenAI", "/openai/v1", "OpenAI: embeddings.create, models.list")
def test_azure_s_newer_paths(server: Server, expected: Expected) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/openai/v1", api_key="none", timeout=DEADLINE_S)
    found = client.embeddings.create(model="embedder", input=TEXTS)
    expected.check_vectors([one.embedding for one in found.data])
    assert [model.id for model in client.models.list()] == ["embedder", "reranker", "classifier"]


@row("langchain-openai", "Azure OpenAI", "/", "AzureOpenAIEmbeddings: .embed_documents")
def test_langchain_azure(server: Server, expected: Expected) -> None:
    client = langchain_openai.AzureOpenAIEmbeddings(
        azure_endpoint=server.url,
        api_key="none",
        api_version=VERSION,
        model="embedder",
        check_embedding_ctx_length=False,
    )
    expected.check_vectors(client.embed_documents(TEXTS))


@row("cohere", "Cohere", "/cohere", "Client.models.list, .models.get; BaseCohere.check_api_key")
def test_cohere_s_models_and_the_check_of_a_key(server: Server) -> None:
    client = cohere.Client(api_key="none", base_url=f"{server.url}/cohere")
    listed = client.models.list().models
    assert [(model.name, model.endpoints) for model in listed] == [
        ("embedder", ["embed"]),
        ("reranker", ["rerank", "classify"]),
        ("classifier", ["classify"]),
    ]
    assert [model.name for model in client.models.list(endpoint="rerank").models] == ["reranker"]
    assert client.models.get("embedder").context_length == 48
    check = BaseCohere(token="none", base_url=f"{server.url}/cohere")  # Client's own call is deprecated
    assert check.check_api_key().valid
    with pytest.raises(cohere.NotFoundError):
        client.models.get("command-r")


@row("cohere", "Cohere", "/", "BaseCohere.check_api_key")
def test_cohere_s_check_of_a_key_at_the_root(server: Server) -> None:
    assert BaseCohere(token="none", base_url=server.url).check_api_key().valid


@row("huggingface_hub", "Hugging Face", "/models/NAME", "InferenceClient: feature_extraction")
@row("huggingface_hub", "Hugging Face", "/pipeline/TASK/NAME", "InferenceClient: feature_extraction")
@pytest.mark.parametrize(
    "path",
    ["/models/embedder", "/pipeline/feature-extraction/embedder", "/models/embedder/pipeline/feature-extraction"],
)
def test_hugging_face_s_older_paths(server: Server, expected: Expected, path: str) -> None:
    client = huggingface_hub.InferenceClient(model=server.url + path, timeout=DEADLINE_S)
    for text, vector in zip(TEXTS, expected.vectors, strict=True):
        np.testing.assert_allclose(client.feature_extraction(text), [vector], atol=TOLERANCE)


@row("huggingface_hub", "Hugging Face", "/models/NAME", "InferenceClient: text_classification; errors: unknown model")
def test_hugging_face_s_classes(server: Server, expected: Expected) -> None:
    client = huggingface_hub.InferenceClient(model=f"{server.url}/models/classifier", timeout=DEADLINE_S)
    found = {one.label: one.score for one in client.text_classification(TEXTS[0])}
    np.testing.assert_allclose([found[label] for label in LABELS], expected.labels[0], atol=TOLERANCE)
    unknown = huggingface_hub.InferenceClient(model=f"{server.url}/models/nobody", timeout=DEADLINE_S)
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="Served: embedder"):
        unknown.feature_extraction("a")
