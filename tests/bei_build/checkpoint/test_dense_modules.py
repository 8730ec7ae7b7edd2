"""Dense modules of sentence-transformers and PyLate: activations and residuals, as their code computes them.

``dense_of`` is their definition, written here in torch (sentence-transformers 6.2, base/modules/dense.py; PyLate's
models/Dense.py has the same): ``activation(linear(x))``, and with a residual plus ``x``, or plus ``residual(x)``, a
linear layer without bias, where the widths differ.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from bei.errors import CheckpointError
from bei_build.checkpoint.sentence_transformers import _DENSE_ACTIVATIONS
from bei_build.onnx_graph.attention import AttentionCore
from bei_build.onnx_graph.transformer import write_graph
from bei_build.onnx_graph.writer import GraphTypes
from bei_build.spec.dtypes import DType
from bei_build.spec.flops import flops
from bei_build.torch_graph.model import packed_model
from tests.bei_build.checkpoint.test_sentence_transformers_outputs import (
    assert_rows,
    assert_token_rows,
    encodings,
    linear,
    modules,
    run,
    states,
    vocab_size,
)
from tests.bei_build.torch_graph.rig import of_the_module
from tests.support.builds import build_artifact
from tests.support.checkpoints import HIDDEN, WEIGHTS, change_config, save_checkpoint, write_json
from tests.support.reading import read, refused

IDENTITY = "torch.nn.modules.linear.Identity"


def with_residual(folder: Path, in_features: int, out_features: int, **config: Any) -> None:
    """Save a Dense module with a residual."""
    tensors = linear(folder, in_features, out_features, use_residual=True, **config)
    if in_features != out_features:
        generator = torch.Generator().manual_seed(99 + out_features)
        tensors["residual.weight"] = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
    save_file(tensors, folder / WEIGHTS)


def dense_of(folder: Path, activation: str, *, residual: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    tensors = load_file(folder / WEIGHTS)
    function = getattr(torch.nn, activation)()

    def dense(value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = function(
            torch.nn.functional.linear(value, tensors["linear.weight"], tensors.get("linear.bias"))
        )
        if not residual:
            return result
        matrix = tensors.get("residual.weight")
        return result + (value if matrix is None else torch.nn.functional.linear(value, matrix))

    return dense


@pytest.mark.parametrize("activation", sorted(_DENSE_ACTIVATIONS))
def test_every_activation_is_that_of_torchs_class(activation: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model")
    pooling, first, last = modules(folder, "Transformer", "Pooling", "Dense", "Dense")[1:]
    write_json(pooling / "config.json", {"pooling_mode": "mean"})
    place = "linear" if activation == "Identity" else "activation"
    linear(first, HIDDEN, 24, activation_function=f"torch.nn.modules.{place}.{activation}")
    linear(last, 24, 8, activation_function=f"torch.nn.{activation}")
    tensors = load_file(first / WEIGHTS)
    save_file({name: 8.0 * tensor for name, tensor in tensors.items()}, first / WEIGHTS)
    checkpoint, texts = read(folder), encodings(vocab_size(folder))
    layers = [dense_of(path, activation, residual=False) for path in (first, last)]
    expected = [layers[1](layers[0](rows.mean(0))) for rows in states(folder, texts)]
    with checkpoint.weights() as weights:
        module = of_the_module(packed_model(checkpoint.spec, weights.read, checkpoint.max_seq_len), texts)
    assert_rows(np.stack(module["embedding"]), expected)
    assert_rows(run(build_artifact(folder, tmp_path / "artifact", verify=False), texts)["embedding"], expected)


@pytest.mark.parametrize("width", [HIDDEN, 24], ids=["as wide", "projected"])
@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "per token"])
def test_a_residual_is_added_to_what_the_activation_gives(pooled: bool, width: int, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model")
    kinds = ["Pooling"] if pooled else []
    paths = modules(folder, "Transformer", *kinds, "pylate.models.Dense.Dense", "sentence_transformers.models.Dense")
    if pooled:
        write_json(paths[1] / "config.json", {"pooling_mode": "mean"})
    first, last = paths[-2:]
    with_residual(first, HIDDEN, width, activation_function="torch.nn.modules.activation.GELU")
    with_residual(last, width, 12, bias=False, activation_function=IDENTITY)
    layers = [dense_of(first, "GELU", residual=True), dense_of(last, "Identity", residual=True)]
    texts = encodings(vocab_size(folder))
    entering = [rows.mean(0) if pooled else rows for rows in states(folder, texts)]
    expected = [layers[1](layers[0](rows)) for rows in entering]
    check, output = (assert_rows, "embedding") if pooled else (assert_token_rows, "token_embedding")
    checkpoint = read(folder)
    with checkpoint.weights() as weights:
        module = of_the_module(packed_model(checkpoint.spec, weights.read, checkpoint.max_seq_len), texts)[output]
    check(np.stack(module) if pooled else np.concatenate(module), expected)
    artifact = build_artifact(folder, tmp_path / "artifact")
    assert artifact.certificate.reference.startswith("transformers")
    check(run(artifact, texts)[output], expected)


def test_the_matrix_of_a_residual_counts(tmp_path: Path) -> None:
    work, parameters = [], []
    for name, use_residual in (("without", False), ("with", True)):
        folder = save_checkpoint(tmp_path / name)
        pooling, dense = modules(folder, "Transformer", "Pooling", "Dense")[1:]
        write_json(pooling / "config.json", {"pooling_mode": "mean"})
        (with_residual if use_residual else linear)(dense, HIDDEN, 8, activation_function=IDENTITY)
        spec = read(folder).spec
        work.append(flops(spec, [5]))
        parameters.append(spec.num_parameters)
    assert work[1] - work[0] == 2 * HIDDEN * 8
    assert parameters[1] - parameters[0] == HIDDEN * 8


@pytest.mark.parametrize(
    ("save", "out_features", "config", "message"),
    [
        (linear, 8, {"use_residual": True}, r"Tensor residual\.weight is missing"),
        (with_residual, 8, {"use_residual": False}, r"Tensor residual\.weight is not part of this architecture"),
        (linear, 8, {"use_residual": "yes"}, "use_residual = 'yes'"),
        (linear, 8, {"activation_function": "torch.nn.modules.activation.PReLU"}, "supported are torch's Identity, "),
        (linear, 8, {"activation_function": "torch.nn.modules.activation.Softmax"}, "activation_function 'torch.nn"),
        # sentence-transformers would take Tanh for these, unless it may run remote code.
        (linear, 8, {"activation_function": "mine.Tanh"}, "activation_function 'mine.Tanh'"),
        (linear, 8, {"activation_function": "transformers.activations.GELUActivation"}, "activation_function 'transf"),
        (linear, 8, {"activation_function": ["Tanh"]}, r"activation_function = \['Tanh'\]"),
    ],
)
def test_other_modules_are_refused(
    save: Callable[..., Any], out_features: int, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path)
    pooling, dense = modules(folder, "Transformer", "Pooling", "Dense")[1:]
    write_json(pooling / "config.json", {"pooling_mode": "mean"})
    settings = {"activation_function": IDENTITY, **config}
    save(dense, HIDDEN, out_features, **{key: value for key, value in settings.items() if key != "use_residual"})
    write_json(dense / "config.json", {"in_features": HIDDEN, "out_features": out_features, "bias": True, **settings})
    refused(folder, CheckpointError, message)


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
def test_activations_behind_the_pooling_are_in_fp32_whatever_the_graphs_type(dtype: DType, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model")
    pooling, *layers = modules(folder, "Transformer", "Pooling", "Dense", "Dense")[1:]
    write_json(pooling / "config.json", {"pooling_mode": "mean"})
    for path, activation in zip(layers, ("ReLU6", "Mish"), strict=True):
        with_residual(path, HIDDEN, HIDDEN, activation_function=f"torch.nn.{activation}")
    checkpoint = read(change_config(folder, hidden_act="gelu_10"))
    types, core = GraphTypes(dtype, dtype), AttentionCore.MATMUL_SOFTMAX
    with checkpoint.weights() as weights:
        path = write_graph(checkpoint.spec, weights.read, tmp_path, types, core, checkpoint.max_seq_len)
    onnx.checker.check_model(str(path), full_check=True)
