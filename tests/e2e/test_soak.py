"""Second tier: a real model under load for minutes. Memory stays bounded, every vector goes to whom it belongs."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer

from bei.artifact.manifest import TOKENIZER, Artifact
from bei.core import Float32Array
from tests.e2e.process import Server, serve

_NUM_TEXTS = 20_000
_TEXTS_A_REQUEST = 32
_WARM_TEXTS = 5_000  # the bound counts from here
_MAX_GROWTH = 1.3
_SAMPLE_EVERY = 97
_SAME = 0.9995  # cosine of two BF16 answers to one text in different batches


def _texts(tokenizer: Tokenizer) -> list[str]:
    rng = np.random.default_rng(0)
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha() and len(word) > 2)
    lengths = np.clip(rng.lognormal(4.0, 0.85, _NUM_TEXTS), 1, 300).astype(int)  # some are cut at 256 tokens
    return [" ".join(rng.choice(words, length)) for length in lengths]


def _vectors(server: Server, texts: list[str]) -> Float32Array:
    response = server.embed(texts)
    assert response.status_code == 200
    assert [item["index"] for item in response.json()["data"]] == list(range(len(texts)))
    return np.array([item["embedding"] for item in response.json()["data"]], np.float32)


@pytest.mark.slow
def test_memory_is_bounded_and_answers_are_not_mixed_up_over_many_texts_of_random_lengths(
    minilm: Artifact, env: Mapping[str, str], home: Path
) -> None:
    texts = _texts(Tokenizer.from_file(str(minilm.path / TOKENIZER)))
    requests = [texts[start : start + _TEXTS_A_REQUEST] for start in range(0, _NUM_TEXTS, _TEXTS_A_REQUEST)]
    with serve([minilm.path], env, home) as server, ThreadPoolExecutor(4) as clients:
        process = psutil.Process(server.pid)
        num_warm = _WARM_TEXTS // _TEXTS_A_REQUEST
        answers = list(clients.map(lambda request: _vectors(server, request), requests[:num_warm]))
        rss_after_warm = process.memory_info().rss
        answers += list(clients.map(lambda request: _vectors(server, request), requests[num_warm:]))
        assert process.memory_info().rss <= _MAX_GROWTH * rss_after_warm
        vectors = np.concatenate(answers)
        for index in range(0, _NUM_TEXTS, _SAMPLE_EVERY):
            alone = _vectors(server, [texts[index]])[0]
            assert float(alone @ vectors[index]) >= _SAME
            assert float(alone @ vectors[index - 1]) < _SAME
