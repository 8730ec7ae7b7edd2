"""Models that transformers has no class of, from their files to HTTP: vectors are those of implementations in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from bei.core import Encoding
from bei.engine.postprocess import unit_length
from tests.bei_build.families import jina, lfm2, nomic
from tests.e2e.process import Server, run, serve
from tests.support.checkpoints import read_tensors

TEXTS = ["hello world", "a", "the cat sat on a mat", "hello the world " * 20]
LONGEST = 32

States = Callable[[Path, Encoding], torch.Tensor]
MODELS: dict[str, tuple[Callable[[Path], Path], States]] = {
    "jina": (jina.save, lambda folder, text: jina.states(read_tensors(folder), text)),
    "jina-code": (
        lambda folder: jina.save(folder, code=jina.CODE),
        lambda folder, text: jina.states(read_tensors(folder), text, code=jina.CODE),
    ),
    "lfm2": (lfm2.save, lambda folder, text: lfm2.Oracle(folder).states(text)),
    "nomic-experts": (nomic.save, lambda folder, text: nomic.Oracle(folder).states(text)),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("remote")
    return {name: save(folder / name) for name, (save, _) in MODELS.items()}


@pytest.fixture(scope="module")
def server(
    checkpoints: dict[str, Path], env: Mapping[str, str], home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """All of them, each built by ``bei build``."""
    folder = tmp_path_factory.mktemp("artifacts")
    for name, checkpoint in checkpoints.items():
        settings = ["--precision", "fp32", "--pooling", "mean", "--max-seq-len", str(LONGEST)]
        built = run(["build", checkpoint, "--out", folder / name, *settings], env, home)
        assert built.returncode == 0, built.stderr
    with serve([folder / name for name in checkpoints], env, home) as server:
        yield server


@pytest.mark.slow  # the first tier compares the engines with it, without a server
def test_vectors_over_http_are_those_of_the_original_code(server: Server, checkpoints: dict[str, Path]) -> None:
    for name, (_, states) in MODELS.items():
        assert_same(server, name, checkpoints[name], states)


def assert_same(server: Server, name: str, folder: Path, states: States) -> None:
    """All texts at once and one by one."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(LONGEST)
    texts = [Encoding(np.array(encoding.ids, np.int32)) for encoding in tokenizer.encode_batch(TEXTS)]
    expected = unit_length(np.stack([states(folder, text).mean(0).numpy() for text in texts]))
    alone = [([text], expected[index : index + 1]) for index, text in enumerate(TEXTS)]
    for inputs, rows in ((TEXTS, expected), *alone):
        response = server.embed(inputs, model=name)
        assert response.status_code == 200, response.text
        actual = np.array([entry["embedding"] for entry in response.json()["data"]])
        np.testing.assert_allclose(actual, rows, atol=2e-4)
