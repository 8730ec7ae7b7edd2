"""Static embeddings, from their authors' files to HTTP: vectors are means of rows, also of long and unknown texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from bei.core import Float32Array
from bei.engine.postprocess import unit_length
from tests.e2e.process import Server, serve
from tests.support.builds import build_artifact
from tests.support.checkpoints import add_static_modules, save_static
from tests.support.oracle import static_embed

NAMES = ("model2vec", "sentence-transformers")
UNKNOWN = "\u2603"
TEXTS = ["hello world", "the cat sat on a mat", f"a {UNKNOWN} cat", UNKNOWN, "the cat " * 300]
MAX_SEQ_LEN = 512  # model2vec's default; the other one is built for it


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("static")
    saved = {name: save_static(root / name, name) for name in NAMES}
    add_static_modules(saved["model2vec"], ".", "Normalize")
    return saved


@pytest.fixture(scope="module")
def server(
    checkpoints: dict[str, Path], env: Mapping[str, str], home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Of both."""
    folder = tmp_path_factory.mktemp("artifacts")
    for name, limit in zip(NAMES, (None, MAX_SEQ_LEN), strict=True):
        build_artifact(checkpoints[name], folder / name, max_seq_len=limit)
    with serve([folder / name for name in NAMES], env, home) as server:
        yield server


def embed(server: Server, texts: list[str], model: str) -> Float32Array:
    response = server.embed(texts, model=model)
    assert response.status_code == 200, response.text
    assert response.headers.get("x-truncated-inputs", "") == ",".join(
        str(index) for index, text in enumerate(texts) if text == TEXTS[-1]
    )
    return np.array([entry["embedding"] for entry in response.json()["data"]], np.float32)


def test_vectors_are_those_of_the_authors(server: Server, checkpoints: dict[str, Path]) -> None:
    ours = static_embed(checkpoints["model2vec"], TEXTS, MAX_SEQ_LEN, with_unknown=False)
    theirs = static_embed(
        checkpoints["sentence-transformers"] / "0_StaticEmbedding", TEXTS, MAX_SEQ_LEN, with_unknown=True
    )
    for name, expected in zip(NAMES, (unit_length(ours), theirs), strict=True):
        together = embed(server, TEXTS, name)
        alone = np.concatenate([embed(server, [text], name) for text in TEXTS])
        np.testing.assert_allclose(together, expected, atol=1e-5)
        np.testing.assert_allclose(alone, expected, atol=1e-5)


def test_a_text_without_tokens_is_400_and_one_of_unknown_tokens_is_zeros(server: Server) -> None:
    for name in NAMES:
        for given in (" \t\n", ["hello", "\u00a0"]):
            response = server.embed(given, model=name)
            assert response.status_code == 400
            assert response.json()["error"]["message"] == "An input has no tokens: leave it out."
    assert not embed(server, [UNKNOWN], "model2vec").any()
    assert embed(server, [UNKNOWN], "sentence-transformers").any()
