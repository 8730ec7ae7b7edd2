"""Decoders that read images, compiled as for a GPU and run on this CPU (``cuda-twin``): the library's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bei
from bei.artifact.manifest import Artifact
from bei.engine.load import load_engine
from tests.support import colpali, colqwen2, embedding_gemma2, qwen3_vl
from tests.support.builds import build_artifact
from tests.support.two_towers import drawn_files

FILES = drawn_files()[:6]
TEXTS = ["a red car", "hello world " * 5]


def built(checkpoint: Path, folder: Path, **settings: Any) -> Artifact:
    return build_artifact(checkpoint, folder / "out", load_engine, target="cuda-twin", verify=False, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ColPali", "ColQwen2.5"])
def test_vectors_of_tokens(kind: str, tmp_path: Path) -> None:
    """Images of one size, or of many with windows in the tower and positions on three axes; and texts."""
    if kind == "ColPali":
        checkpoint = colpali.save_colpali(tmp_path / "colpali")
        expected = colpali.library_rows(checkpoint, FILES, TEXTS)
    else:
        checkpoint = colqwen2.save_colqwen2(tmp_path / "colqwen2_5", second=True)
        expected = colqwen2.library_rows(checkpoint, FILES, TEXTS)
    with bei.Model(built(checkpoint, tmp_path).path, tune="off") as model:
        found = model.embed_all([*FILES, *TEXTS])
        alone = model.embed_all(TEXTS[:1])  # a step without images
    for rows, one in zip([*found, *alone], [*expected, expected[len(FILES)]], strict=True):
        assert rows.shape[0] <= one.shape[0]  # colpali's images without the prompt's first tokens
        np.testing.assert_allclose(rows, one[len(one) - len(rows) :], atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Qwen3-VL", "EmbeddingGemma 2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_vectors_of_texts_and_images_in_one_input(precision: str, kind: str, tmp_path: Path) -> None:
    """What DeepStack adds behind the first layers is read too; steps need not be whole blocks of merged patches."""
    of_qwen = (qwen3_vl.save_qwen3_vl, qwen3_vl.library_vectors)
    of_gemma = (embedding_gemma2.save_embedding_gemma2, embedding_gemma2.library_vectors)
    save, vectors = of_qwen if kind == "Qwen3-VL" else of_gemma
    checkpoint = save(tmp_path / "checkpoint")
    inputs = [*((one,) for one in FILES), (FILES[0], TEXTS[0]), (FILES[1], FILES[2], FILES[1]), *((t,) for t in TEXTS)]
    expected = np.array(vectors(checkpoint, inputs))
    with bei.Model(built(checkpoint, tmp_path, precision=precision).path, tune="off") as model:
        found = model.embed([{"content": one} if len(one) > 1 else one[0] for one in inputs])
    if precision == "fp32":
        np.testing.assert_allclose(found, expected, atol=2e-4)
    assert (found * expected).sum(axis=1).min() > 0.999


@pytest.mark.slow
def test_vectors_of_tokens_that_are_means_of_patches(tmp_path: Path) -> None:
    """EmbeddingGemma 2's, whose steps need not have whole blocks of nine."""
    checkpoint = embedding_gemma2.save_embedding_gemma2(tmp_path / "embedding_gemma2")
    inputs = [*((one,) for one in FILES), (FILES[0], TEXTS[0]), *((text,) for text in TEXTS)]
    expected = np.array(embedding_gemma2.library_vectors(checkpoint, inputs))
    with bei.Model(built(checkpoint, tmp_path).path, tune="off") as model:
        found = model.embed([{"content": one} if len(one) > 1 else one[0] for one in inputs])
    np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.slow
def test_scores_of_pairs(tmp_path: Path) -> None:
    checkpoint = qwen3_vl.save_reranker(tmp_path / "reranker")
    documents: list[str | bytes] = [*FILES, *TEXTS]
    expected = qwen3_vl.library_scores(checkpoint, [((TEXTS[0],), (one,)) for one in documents])
    with bei.Model(built(checkpoint, tmp_path, **qwen3_vl.RERANKER).path, tune="off") as model:
        ranks = model.rerank(TEXTS[0], documents)
    found = [rank.score for rank in sorted(ranks, key=lambda rank: rank.index)]
    np.testing.assert_allclose(found, expected, atol=2e-4)
