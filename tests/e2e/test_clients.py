"""openai-python, synchronous and asynchronous, against a real server."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from bei.artifact.manifest import TOKENIZER, Artifact
from bei.core import Encoding
from bei.engine.postprocess import unit_length
from tests.e2e.process import DEADLINE_S, Server
from tests.support.builds import embed, running

TEXTS = ["The cat sat on the mat.", "hello", "Grüße, 世界! \N{GRINNING FACE}", "a " * 200, "  \n\t ", "x" * 500]
DIMENSION = 32

# One call of the embeddings API, by either client: fields -> response.
Create = Callable[..., openai.types.CreateEmbeddingResponse]


def _options(server: Server) -> dict[str, Any]:
    return {"base_url": f"{server.url}/v1", "api_key": "not needed", "max_retries": 0, "timeout": DEADLINE_S}


@pytest.fixture(params=["sync", "async"])
def create(server: Server, request: pytest.FixtureRequest) -> Iterator[Create]:
    if request.param == "sync":
        with openai.OpenAI(**_options(server)) as client:
            yield client.embeddings.create
        return

    def create_async(**fields: Any) -> openai.types.CreateEmbeddingResponse:
        async def call() -> openai.types.CreateEmbeddingResponse:
            async with openai.AsyncOpenAI(**_options(server)) as client:
                response: openai.types.CreateEmbeddingResponse = await client.embeddings.create(**fields)
                return response

        return asyncio.run(call())

    yield create_async


@pytest.fixture(scope="module")
def tokenizer(tiny: Artifact) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(tiny.path / TOKENIZER))
    tokenizer.enable_truncation(tiny.manifest.max_seq_len)
    return tokenizer


@pytest.fixture(scope="module")
def alone(tiny: Artifact, tokenizer: Tokenizer) -> list[list[float]]:
    """The vectors of TEXTS from the engine itself, each text alone, without server and batching."""
    with running(tiny) as engine:
        encodings = [Encoding(np.array(tokenizer.encode(text).ids, np.int32)) for text in TEXTS]
        rows = np.concatenate([embed(engine, [encoding]) for encoding in encodings])
    vectors: list[list[float]] = unit_length(rows).tolist()
    return vectors


def vectors_of(response: openai.types.CreateEmbeddingResponse) -> list[list[float]]:
    assert [entry.index for entry in response.data] == list(range(len(response.data)))
    return [entry.embedding for entry in response.data]


@pytest.mark.client_call(
    "openai", "OpenAI", "/v1", "embeddings.create, sync and async: texts, in the client's default encoding"
)
def test_texts_get_the_engine_s_vectors_in_the_client_s_default_encoding(
    create: Create, alone: list[list[float]]
) -> None:
    response = create(model="tiny", input=TEXTS)
    np.testing.assert_allclose(vectors_of(response), alone, atol=1e-5)
    assert response.model == "tiny"


@pytest.mark.client_call("openai", "OpenAI", "/v1", "embeddings.create: encoding_format float, base64")
def test_float_and_base64_carry_the_same_vectors(create: Create) -> None:
    as_float = vectors_of(create(model="tiny", input=TEXTS, encoding_format="float"))
    raw = create(model="tiny", input=TEXTS, encoding_format="base64").data
    as_base64 = [np.frombuffer(base64.b64decode(str(entry.embedding)), "<f4") for entry in raw]
    np.testing.assert_allclose(as_float, as_base64, rtol=0, atol=1e-6)


@pytest.mark.client_call("openai", "OpenAI", "/v1", "embeddings.create: token ids (`openai_token_ids` accept)")
def test_one_text_token_ids_and_lists_of_token_ids_agree(
    create: Create, tokenizer: Tokenizer, alone: list[list[float]]
) -> None:
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    np.testing.assert_allclose(vectors_of(create(model="tiny", input=TEXTS[0])), alone[:1], atol=1e-5)
    np.testing.assert_allclose(vectors_of(create(model="tiny", input=ids[0])), alone[:1], atol=1e-5)
    np.testing.assert_allclose(vectors_of(create(model="tiny", input=ids)), alone, atol=1e-5)


@pytest.mark.client_call("openai", "OpenAI", "/v1", "embeddings.create: dimensions")
def test_dimensions_are_the_first_components_at_unit_length(create: Create, alone: list[list[float]]) -> None:
    short = np.array(alone)[:, :8]
    expected = short / np.linalg.norm(short, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors_of(create(model="tiny", input=TEXTS, dimensions=8)), expected, atol=1e-5)


@pytest.mark.client_call("openai", "OpenAI", "/v1", "embeddings.create: usage")
def test_usage_counts_are_those_of_the_tokenizers_library(create: Create, tokenizer: Tokenizer) -> None:
    for texts in (TEXTS, TEXTS[3:4], ["a", "b"] * 100):
        usage = create(model="tiny", input=texts, user="someone").usage
        num_tokens = sum(len(tokenizer.encode(text).ids) for text in texts)
        assert (usage.prompt_tokens, usage.total_tokens) == (num_tokens, num_tokens)


@pytest.mark.client_call("openai", "OpenAI", "/v1", "embeddings.create: 2,000 texts")
@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_an_answer_that_is_streamed_is_read_as_any_other(create: Create, encoding_format: str) -> None:
    texts = ["hello", "The cat"] * 1000
    found = create(model="tiny", input=texts, encoding_format=encoding_format)
    few = create(model="tiny", input=texts[:2], encoding_format=encoding_format)
    assert [entry.embedding for entry in found.data] == [entry.embedding for entry in few.data] * 1000
    assert [entry.index for entry in found.data] == list(range(2000))
    assert found.usage.prompt_tokens == 1000 * few.usage.prompt_tokens


@pytest.mark.client_call("openai", "OpenAI", "/v1", "embeddings.create: errors: unknown model")
def test_an_unknown_model_is_the_client_s_not_found_error(create: Create) -> None:
    with pytest.raises(openai.NotFoundError, match="Served: tiny") as caught:
        create(model="text-embedding-3-small", input="a")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.client_call(
    "openai", "OpenAI", "/v1", "embeddings.create: errors: empty text, empty list, too many dimensions"
)
@pytest.mark.parametrize(
    ("fields", "param"),
    [({"input": ""}, "input"), ({"input": []}, "input"), ({"input": "a", "dimensions": 33}, "dimensions")],
)
def test_a_wrong_request_is_the_client_s_bad_request_error(create: Create, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="tiny", **fields)
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")


@pytest.mark.client_call("openai", "OpenAI", "/v1", "models.list, models.retrieve")
def test_the_models_are_listed(server: Server) -> None:
    with openai.OpenAI(**_options(server)) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").owned_by == "bei"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("nobody")


@pytest.mark.client_call("openai", "OpenAI", "/v1", "AsyncOpenAI: 120 calls at once")
def test_many_concurrent_callers_each_get_their_own_vector(server: Server, alone: list[list[float]]) -> None:
    async def call() -> list[list[float]]:
        async with openai.AsyncOpenAI(**_options(server)) as client:
            calls = [client.embeddings.create(model="tiny", input=TEXTS[i % len(TEXTS)]) for i in range(120)]
            return [response.data[0].embedding for response in await asyncio.gather(*calls)]

    expected = [alone[i % len(TEXTS)] for i in range(120)]
    np.testing.assert_allclose(asyncio.run(call()), expected, atol=1e-5)
