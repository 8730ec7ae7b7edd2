"""Inputs and pairs of one to five images among texts, drawn by chance: the library's vectors and scores."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bei
from bei.core import Float32Array
from tests.support import embedding_gemma2, qwen2_vl, qwen3_vl
from tests.support.builds import build_artifact
from tests.support.cpus import needs_bf16
from tests.support.two_towers import drawn_files, png

pytestmark = pytest.mark.slow

FILES = [*drawn_files()[:20], png(1, 1), png(3, 600), png(2000, 1400)]
TEXTS = ["a page", " two  spaces ", "\n", "né 世界", "what is shown here? " * 4, "<|im_end|>"]
LONG = {"max_position_embeddings": 1024}
Vectors = Callable[[Path, Sequence[Sequence[str | bytes]]], list[Float32Array]]


def drawn(count: int, seed: int) -> list[list[str | bytes]]:
    """Images and texts in any order, an image at least; an image may be there twice."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        parts: list[str | bytes] = [*chance.choices(FILES, k=chance.randint(1, 5))]
        parts += chance.choices(TEXTS, k=chance.randint(0, 3))
        chance.shuffle(parts)
        found.append(parts)
    return found


FAMILIES = pytest.mark.parametrize(
    ("save", "vectors"),
    [
        (lambda folder: qwen3_vl.save_qwen3_vl(folder, text=LONG), qwen3_vl.library_vectors),
        (lambda folder: qwen2_vl.save_qwen2_vl(folder, text=LONG), qwen2_vl.library_vectors),
        (lambda folder: qwen2_vl.save_qwen2_vl(folder, second=True, text=LONG), qwen2_vl.library_vectors),
        (embedding_gemma2.save_embedding_gemma2, embedding_gemma2.library_vectors),
    ],
    ids=["qwen3_vl", "qwen2_vl", "qwen2_5_vl", "embedding_gemma2"],
)


@FAMILIES
def test_inputs_have_the_librarys_vectors(save: Callable[[Path], Path], vectors: Vectors, tmp_path: Path) -> None:
    folder, inputs = save(tmp_path / "checkpoint"), drawn(60, 1)
    expected = vectors(folder, inputs)
    with bei.Model(build_artifact(folder, tmp_path / "out", verify=False).path, tune="off") as model:
        found = model.embed([{"content": one} for one in inputs])
    np.testing.assert_allclose(found, np.array(expected), atol=2e-4)


@FAMILIES
@needs_bf16
def test_in_bf16_they_are_near(save: Callable[[Path], Path], vectors: Vectors, tmp_path: Path) -> None:
    folder, inputs = save(tmp_path / "checkpoint"), drawn(30, 2)
    expected = np.array(vectors(folder, inputs))
    artifact = build_artifact(folder, tmp_path / "out", precision="bf16", verify=False)
    with bei.Model(artifact.path, tune="off") as model:
        found = np.array(model.embed([{"content": one} for one in inputs], normalize=True))
    assert (found * expected).sum(1).mean() > 0.999


def test_pairs_have_the_librarys_scores(tmp_path: Path) -> None:
    folder = qwen3_vl.save_reranker(tmp_path / "reranker")
    artifact = build_artifact(folder, tmp_path / "out", verify=False, **qwen3_vl.RERANKER)
    queries: list[Any] = drawn(4, 3)
    documents: list[Any] = drawn(12, 4)
    with bei.Model(artifact.path, tune="off") as model:
        for query in queries:
            expected = qwen3_vl.library_scores(folder, [(query, one) for one in documents])
            ranks = model.rerank({"content": query}, [{"content": one} for one in documents])
            found = [rank.score for rank in sorted(ranks, key=lambda rank: rank.index)]
            np.testing.assert_allclose(found, expected, atol=2e-4)
