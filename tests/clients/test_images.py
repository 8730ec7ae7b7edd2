"""Images in the words of the clients: those that vendors have for them, and OpenAI's, which passes objects on."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tests.clients.offline  # noqa: F401

# isort: split

import cohere
import httpx
import langchain_community.embeddings
import numpy as np
import openai
import pytest
import transformers
import voyageai.client
import voyageai.client_async
import voyageai.error
from llama_index.embeddings.cohere import CohereEmbedding
from llama_index.embeddings.jinaai import JinaEmbedding
from llama_index.embeddings.voyageai import VoyageEmbedding
from PIL import Image

from bei.core import Float32Array
from tests.clients.conftest import run
from tests.e2e.kinds import TOLERANCE
from tests.e2e.process import DEADLINE_S, Server, serve
from tests.support.builds import build_artifact
from tests.support.two_towers import SIDE, TEXTS, data_url, library_vectors, png, save_clip

row = pytest.mark.client_call

FILES = [png(60, 40), png(30, 90, (10, 220, 40)), png(50, 50, (0, 0, 250))]
NAMES = ("embed-v4.0", "voyage-multimodal-3")  # the clients of LlamaIndex know no others


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the checkpoint ``clip``, and FILES by their numbers."""
    folder = tmp_path_factory.mktemp("images")
    save_clip(folder / "clip")
    for number, content in enumerate(FILES):
        (folder / f"{number}.png").write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def paths(folder: Path) -> list[str]:
    return [str(folder / f"{number}.png") for number in range(len(FILES))]


@pytest.fixture(scope="module")
def server(folder: Path, env: Mapping[str, str], home: Path) -> Iterator[Server]:
    """A server of ``clip``, which also has the names in NAMES."""
    artifact = build_artifact(folder / "clip", folder / "built", name="clip")
    with serve([artifact.path, *(f"--alias={name}" for name in NAMES)], env, home) as server:
        yield server


@pytest.fixture(scope="module")
def expected(folder: Path) -> Float32Array:
    """Of FILES, then of TEXTS, by transformers."""
    return library_vectors(folder / "clip", transformers.CLIPModel, FILES, TEXTS)


def check(found: Any, expected: Float32Array) -> None:
    np.testing.assert_allclose(np.array(found), expected, atol=TOLERANCE)


def pictures() -> list[Any]:
    """As Pillow opens them."""
    return [Image.open(io.BytesIO(content)) for content in FILES]


# openai


@row(
    "openai", "OpenAI", "/v1", "embeddings.create: images and texts as content parts; errors: no image; sync and async"
)
@row("openai", "vLLM", "/vllm/v1", "post('/embeddings'): an image as messages")
def test_openai(server: Server, expected: Float32Array) -> None:
    images: list[Any] = [{"type": "image_url", "image_url": {"url": data_url(content)}} for content in FILES]
    parts: Any = [*images, *({"type": "text", "text": text} for text in TEXTS)]
    no_image: Any = [{"image": "aGVsbG8="}]
    options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": DEADLINE_S}

    async def asynchronous() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", **options) as client:
            return await client.embeddings.create(model="clip", input=parts)

    check([item.embedding for item in run(asynchronous()).data], expected)
    with openai.OpenAI(base_url=f"{server.url}/v1", **options) as client:
        check([item.embedding for item in client.embeddings.create(model="clip", input=parts).data], expected)
        with pytest.raises(openai.BadRequestError, match="of no format that is read"):
            client.embeddings.create(model="clip", input=no_image)
    with openai.OpenAI(base_url=f"{server.url}/vllm/v1", **options) as client:
        body = {"model": "clip", "messages": [{"role": "user", "content": images[:1]}], "encoding_format": "float"}
        answer: Any = client.post("/embeddings", cast_to=object, body=body)
    check([item["embedding"] for item in answer["data"]], expected[:1])


# cohere


@row("cohere", "Cohere", "/", "Client.embed(images=...); ClientV2.embed(images=...), (inputs=...)")
@row("cohere", "Cohere", "/cohere", "Client.embed(images=...); ClientV2.embed(images=...), (inputs=...)")
@pytest.mark.parametrize("base", ["", "/cohere"])
def test_cohere(server: Server, expected: Float32Array, base: str) -> None:
    urls = [data_url(content) for content in FILES]
    asked: dict[str, Any] = {"model": "clip", "input_type": "image", "embedding_types": ["float"]}
    inputs: list[Any] = [{"content": [{"type": "image_url", "image_url": {"url": url}}]} for url in urls]
    inputs += [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    with httpx.Client(timeout=DEADLINE_S) as http:
        options: dict[str, Any] = {"api_key": "none", "base_url": server.url + base, "httpx_client": http}
        first: Any = cohere.Client(**options)
        second: Any = cohere.ClientV2(**options)
        for client in (first, second):
            check(client.embed(images=urls, **asked).embeddings.float_, expected[: len(FILES)])
        found: Any = second.embed(inputs=inputs, **{**asked, "input_type": "search_document"})
        check(found.embeddings.float_, expected)
        with pytest.raises(cohere.BadRequestError, match="of no format that is read"):
            second.embed(images=["data:image/png;base64,aGVsbG8="], **asked)


# voyageai


@row("voyageai", "Voyage", "/voyage/v1", "multimodal_embed: Pillow images, texts, dictionaries; sync and async")
@row(
    "voyageai",
    "Voyage",
    "/voyage/v1",
    "multimodal_embed: a text and an image in one input",
    fails="models with two towers have no vector for both: the error says so",
)
def test_voyage(server: Server, expected: Float32Array) -> None:
    options: dict[str, Any] = {"api_key": "none", "base_url": f"{server.url}/voyage/v1", "timeout": DEADLINE_S}
    client = voyageai.client.Client(**options)
    inputs: list[Any] = [*([picture] for picture in pictures()), *([text] for text in TEXTS)]
    found = client.multimodal_embed(inputs, model="clip")
    check(found.embeddings, expected)
    assert found.image_pixels == len(FILES) * SIDE * SIDE
    assert found.total_tokens > found.text_tokens > 0
    again = run(voyageai.client_async.AsyncClient(**options).multimodal_embed(inputs, model="clip"))
    check(again.embeddings, expected)
    parts: Any = [{"content": [{"type": "image_base64", "image_base64": data_url(content)}]} for content in FILES]
    check(client.multimodal_embed(parts, model="clip").embeddings, expected[: len(FILES)])
    with pytest.raises(voyageai.error.InvalidRequestError, match="reads a text or an image in an input"):
        client.multimodal_embed([[TEXTS[0], pictures()[0]]], model="clip")


# llama-index


def check_images(client: Any, paths: list[str], expected: Float32Array) -> None:
    """Calls of a ``MultiModalEmbedding`` for images, and one for texts."""
    check(run(client.aget_image_embedding_batch(paths)), expected[: len(FILES)])
    check(client.get_image_embedding_batch(paths), expected[: len(FILES)])
    check(client.get_image_embedding(paths[1]), expected[1])
    check(client.get_text_embedding_batch(TEXTS), expected[len(FILES) :])


@row("llama-index-embeddings-cohere", "Cohere", "/cohere", "CohereEmbedding(model_name='embed-v4.0'): images")
def test_cohere_of_llama_index(server: Server, paths: list[str], expected: Float32Array) -> None:
    client = CohereEmbedding(
        model_name=NAMES[0], api_key="none", base_url=f"{server.url}/cohere", timeout=DEADLINE_S, max_retries=1
    )
    check_images(client, paths, expected)


@row("llama-index-embeddings-jinaai", "Jina", "/jina/v1", "JinaEmbedding, its address replaced: images")
@row(
    "llama-index-embeddings-jinaai",
    "Jina",
    "/jina/v1",
    "JinaEmbedding, its address replaced: aget_image_embedding",
    fails="the client takes the first vector before it has waited for them: call aget_image_embedding_batch",
)
def test_jina_of_llama_index(server: Server, paths: list[str], expected: Float32Array) -> None:
    client = JinaEmbedding(model="clip", api_key="none")
    client._api.api_url = f"{server.url}/jina/v1/embeddings"
    check_images(client, paths, expected)
    with pytest.raises(TypeError, match="coroutine"):
        run(client.aget_image_embedding(paths[0]))


@row(
    "llama-index-embeddings-voyageai",
    "Voyage",
    "/voyage/v1",
    "VoyageEmbedding(model_name='voyage-multimodal-3'), its address and tokenizer replaced: images",
)
def test_voyage_of_llama_index(
    server: Server, paths: list[str], expected: Float32Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = VoyageEmbedding(model_name=NAMES[1], voyage_api_key="none")
    for inner in (client._client, client._aclient):
        inner._params["base_url"] = f"{server.url}/voyage/v1"
    monkeypatch.setattr(client._client, "tokenize", lambda texts, model: [text.split() for text in texts])
    check_images(client, paths, expected)


# langchain


@row("langchain-community", "Jina", "/jina/v1", "JinaEmbeddings, its address replaced: embed_images")
def test_jina_of_langchain(
    server: Server, paths: list[str], expected: Float32Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = "langchain_community.embeddings.jina.JINA_API_URL"
    monkeypatch.setattr(address, f"{server.url}/jina/v1/embeddings")
    settings: dict[str, Any] = {"jina_api_key": "none", "model_name": "clip"}
    client = langchain_community.embeddings.JinaEmbeddings(**settings)
    check(client.embed_images(paths), expected[: len(FILES)])
    check(client.embed_documents(TEXTS), expected[len(FILES) :])
