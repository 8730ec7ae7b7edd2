"""Embedders of three families, from ``save_pretrained`` to HTTP, in one server: vectors are those of the HF classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer

from bei.core import Encoding
from bei.postprocess import unit_length
from tests.e2e.process import Server, run, serve
from tests.model_matrix import pooled
from tests.zoo import CASES, MAX_TOKENS, Case, hf_outputs, save_case

NAMES = ("ModernBertModel", "Qwen3Model", "Gemma3TextModel-bidirectional")
TEXTS = ["hello world", "the cat sat on a mat", "a", "Gr\u00fc\u00dfe, \u4e16\u754c!", "hello the world " * 20]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [case for case in CASES if case.name in NAMES]


@pytest.fixture(scope="module")
def checkpoints(cases: list[Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {case.name: save_case(tmp_path_factory.mktemp("families") / case.name, case) for case in cases}


@pytest.fixture(scope="module")
def server(
    checkpoints: dict[str, Path], env: Mapping[str, str], home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """All three, each built by ``bei build``."""
    folder = tmp_path_factory.mktemp("artifacts")
    for name, checkpoint in checkpoints.items():
        built = run(
            ["build", checkpoint, "--out", folder / name, "--precision", "fp32", "--reference", "engine"], env, home
        )
        assert built.returncode == 0, built.stderr
    with serve([folder / name for name in checkpoints], env, home) as server:
        yield server


def test_vectors_of_every_family_are_those_of_the_hf_class(
    server: Server, cases: list[Case], checkpoints: dict[str, Path]
) -> None:
    models = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert sorted(model["id"] for model in models) == sorted(NAMES)
    for case in cases:
        folder = checkpoints[case.name]
        response = server.embed(TEXTS, model=case.name)
        assert response.status_code == 200, response.text
        actual = np.array([entry["embedding"] for entry in response.json()["data"]])
        expected = unit_length(np.stack(pooled(case, hf_outputs(folder, case, encodings_of(folder)), None)))
        assert actual.shape == expected.shape == (len(TEXTS), 32)
        assert np.abs(actual - expected).max() <= 2e-4


def encodings_of(folder: Path) -> list[Encoding]:
    """``TEXTS`` by the checkpoint's own tokenizer, truncated."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    return [Encoding(np.array(encoding.ids, np.int32)) for encoding in tokenizer.encode_batch(TEXTS)]
