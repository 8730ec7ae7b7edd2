"""Models whose vectors are made by modules of their repositories: SSE's tanh, and pplx-embed's before it rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from bei.artifact.manifest import TOKENIZER, Artifact
from bei.core import Encoding, Float32Array
from bei.errors import CheckpointError, WeightsError
from tests.hub_matrix.stored_modules import flexible_quantizer
from tests.support.builds import build_artifact, embed, random_encodings, running
from tests.support.checkpoints import add_modules, change_config, read_tensors, write_json, write_tensors
from tests.support.reading import refused, saved
from tests.support.stable_static import REST, TABLE, save_stable_static, stable_embed

_TEXTS = ["the cat sat on a mat", "hello", "\u2603", "[CLS] hello </s>", "hello the world " * 20]


def _vectors(artifact: Artifact, texts: list[str]) -> Float32Array:
    tokenizer = Tokenizer.from_file(str(artifact.path / TOKENIZER))
    with running(artifact) as engine:
        return embed(engine, [Encoding(np.array(tokenizer.encode(text).ids, np.int32)) for text in texts])


@pytest.mark.parametrize("quantized", [False, True])
def test_sse_is_a_tanh_with_factors_behind_the_mean(quantized: bool, tmp_path: Path) -> None:
    folder = save_stable_static(tmp_path / "model", quantized=quantized)
    artifact = build_artifact(folder, tmp_path / "artifact")
    found = _vectors(artifact, _TEXTS)
    np.testing.assert_allclose(found, stable_embed(folder, _TEXTS), rtol=0, atol=1e-6)
    assert not np.allclose(np.linalg.norm(found, axis=1), 1)


@pytest.mark.parametrize(
    ("size", "message"),
    [(0, "has 0 bytes, which are no rows"), (1001, "has 1,001 bytes, which are no rows of 32")],
)
def test_a_table_of_4_bits_that_does_not_fit_is_refused(size: int, message: str, tmp_path: Path) -> None:
    folder = save_stable_static(tmp_path / "model", quantized=True)
    (folder / TABLE).write_bytes(bytes(size))
    refused(folder, WeightsError, message)


def test_a_rest_without_the_tanh_is_refused(tmp_path: Path) -> None:
    folder = save_stable_static(tmp_path / "model", quantized=True)
    write_tensors(folder, {"other": next(iter(read_tensors(folder, REST).values()))}, REST)
    refused(folder, WeightsError, "no rows of 0 numbers")


def test_another_module_behind_sse_is_refused(tmp_path: Path) -> None:
    folder = save_stable_static(tmp_path / "model")
    dense = {"idx": 1, "name": "1", "path": "1_Dense", "type": "sentence_transformers.models.Dense"}
    write_json(folder / "modules.json", [{"idx": 0, "name": "0", "path": "", "type": "modeling.SSE"}, dense])
    refused(folder, CheckpointError, "SSE")


def test_pplx_sees_both_ways_and_ends_in_a_tanh(tmp_path: Path) -> None:
    plain = saved(tmp_path / "plain", "Qwen3Model")
    wanted = build_artifact(
        plain, tmp_path / "wanted", pooling="mean", normalize=False, task="embed", attention="bidirectional"
    )
    own = saved(tmp_path / "own", "Qwen3Model")
    change_config(own, model_type="bidirectional_pplx_qwen3", architectures=["PPLXQwen3Model"])
    change_config(own, auto_map={"AutoModel": "modeling.PPLXQwen3Model"})
    add_modules(own, ("mean",), [])
    flexible_quantizer(own)
    found = build_artifact(own, tmp_path / "found")
    encodings = random_encodings([7, 1, 20, 9], 40)
    with running(wanted) as one, running(found) as other:
        np.testing.assert_allclose(embed(other, encodings), np.tanh(embed(one, encodings)), rtol=0, atol=1e-6)
