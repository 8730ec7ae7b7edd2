"""The embedded default's real weights behind a real server, beside a second model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from bei.artifact.manifest import TOKENIZER, Artifact
from tests.e2e.process import DEADLINE_S, Server, serve

TEXTS = ["A cat sits on the mat.", "A kitten rests on a rug.", "The central bank raised its interest rate."]


@pytest.fixture(scope="module")
def both(minilm: Artifact, tiny: Artifact, env: Mapping[str, str], home: Path) -> Iterator[Server]:
    with serve([minilm.path, tiny.path], env, home) as server:
        yield server


@pytest.fixture(scope="module")
def client(both: Server) -> Iterator[openai.OpenAI]:
    options = {"api_key": "not needed", "max_retries": 0, "timeout": DEADLINE_S}
    with openai.OpenAI(base_url=f"{both.url}/v1", **options) as client:  # type: ignore[arg-type]
        yield client


def test_models_are_routed_by_name(both: Server, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["minilm", "tiny"]
    lengths = [len(client.embeddings.create(model=name, input="a").data[0].embedding) for name in ("minilm", "tiny")]
    assert lengths == [384, 32]
    with pytest.raises(openai.BadRequestError, match="set model to one of minilm, tiny"):
        client.embeddings.create(model=None, input="a")  # type: ignore[arg-type]
    assert both.get_status("/ready") == 200


def test_similar_texts_are_near_and_others_far(client: openai.OpenAI) -> None:
    vectors = np.array([entry.embedding for entry in client.embeddings.create(model="minilm", input=TEXTS).data])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    assert vectors[0] @ vectors[1] > 0.5 > 0.2 > vectors[0] @ vectors[2]


def test_usage_counts_are_those_of_the_tokenizers_library(client: openai.OpenAI, minilm: Artifact) -> None:
    tokenizer = Tokenizer.from_file(str(minilm.path / TOKENIZER))
    tokenizer.enable_truncation(minilm.manifest.max_seq_len)
    texts = [*TEXTS, "Grüße, 世界! \N{GRINNING FACE}", "word " * 1000, "\u200b", "https://example.org/?q=%20" * 9]
    usage = client.embeddings.create(model="minilm", input=texts).usage
    assert usage.prompt_tokens == sum(len(tokenizer.encode(text).ids) for text in texts)
