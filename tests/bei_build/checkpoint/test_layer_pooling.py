"""WeightedLayerPooling: token states as a weighted mean of several layers, as in sentence-transformers.

``mean_of_layers`` is its definition, written here in torch (sentence-transformers 6.2, weighted_layer_pooling.py):
transformers' ``hidden_states`` from ``layer_start`` on, each times its weight, divided by the sum of the weights. If
config.json does not ask for these states, the library ignores the module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, T5EncoderModel

from bei.core import Encoding
from bei.errors import CheckpointError, UnsupportedArchitectureError
from bei_build.checkpoint.read import source_of
from bei_build.targets.trtllm import class_of
from bei_build.torch_graph.model import packed_model
from tests.bei_build.checkpoint.test_sentence_transformers_outputs import encodings, linear, modules, run, vocab_size
from tests.bei_build.torch_graph.rig import of_the_graph, of_the_module
from tests.support.builds import build_artifact
from tests.support.checkpoints import HIDDEN, WEIGHTS, change_config, write_json
from tests.support.reading import read, refused, saved

TOLERANCE = 2e-4
# Post-norm, pre-norm with a final norm, embeddings that are projected, shared layers, a convolution behind the first.
CLASSES = (
    *("BertModel", "Qwen3Model", "ModernBertModel", "ElectraModel", "AlbertModel", "DebertaV2Model-convolution"),
    *("T5EncoderModel", "GPTNeoModel", "Gemma2Model", "Olmo2Model"),
)


def layer_pooled(folder: Path, start: int, weights: Sequence[float], *tail: str, **config: Any) -> list[Path]:
    """Write the modules beside a checkpoint; returns the folders of the tail."""
    base, kinds = "sentence_transformers.models", ("Transformer", "WeightedLayerPooling", "Pooling", *tail)
    _, layers, pooling, *rest = modules(folder, *(f"{base}.{it}" for it in kinds))
    write_json(layers / "config.json", {"word_embedding_dimension": HIDDEN, "layer_start": start, **config})
    save_file({"layer_weights": torch.tensor(weights)}, layers / WEIGHTS)
    write_json(pooling / "config.json", {"pooling_mode": "mean"})
    change_config(folder, output_hidden_states=True)
    return rest


def mean_of_layers(folder: Path, texts: Sequence[Encoding], start: int) -> list[torch.Tensor]:
    weights = load_file(folder / "1_WeightedLayerPooling" / WEIGHTS)["layer_weights"]
    kind = T5EncoderModel if "T5" in str((folder / "config.json").read_text()) else AutoModel
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    rows = []
    with torch.no_grad():
        for text in texts:
            ids = torch.from_numpy(text.input_ids.astype(np.int64))[None]
            layers = torch.stack(model(ids, output_hidden_states=True).hidden_states)[start:]
            rows.append(((weights[:, None, None, None] * layers).sum(0) / weights.sum())[0])
    return rows


@pytest.mark.parametrize("name", CLASSES)
def test_graph_and_module_mix_the_layers_states(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", name)
    count = len(read(folder).spec.layers) + 1
    layer_pooled(folder, 0, np.linspace(-0.5, 2.0, count).tolist())
    checkpoint, texts = read(folder), encodings(vocab_size(folder))
    expected = [rows.mean(0).numpy() for rows in mean_of_layers(folder, texts, 0)]
    with checkpoint.weights() as weights:
        graph = of_the_graph(checkpoint.spec, weights.read, checkpoint.max_seq_len, texts, tmp_path / "graph")
        module = of_the_module(packed_model(checkpoint.spec, weights.read, checkpoint.max_seq_len), texts)
    np.testing.assert_allclose(graph["embedding"], expected, atol=TOLERANCE)
    np.testing.assert_allclose(module["embedding"], expected, atol=TOLERANCE)
    assert read(folder, pooling="cls").spec.layer_shares == checkpoint.spec.layer_shares


def test_an_artifact_is_verified_with_the_states_of_all_layers(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "Qwen3Model")
    (dense,) = layer_pooled(folder, 2, [0.5, 3.0], "Dense", num_hidden_layers=3)
    tensors = linear(dense, HIDDEN, 8, activation_function="torch.nn.modules.activation.LeakyReLU")
    texts = encodings(vocab_size(folder))
    expected = [
        torch.nn.functional.leaky_relu(tensors["linear.weight"] @ rows.mean(0) + tensors["linear.bias"]).numpy()
        for rows in mean_of_layers(folder, texts, 2)
    ]
    artifact = build_artifact(folder, tmp_path / "artifact", token_embeddings=True)
    assert artifact.certificate.reference.startswith("transformers")
    outputs = run(artifact, texts)
    np.testing.assert_allclose(outputs["embedding"], expected, atol=TOLERANCE)
    states = torch.cat(mean_of_layers(folder, texts, 2)).numpy()
    np.testing.assert_allclose(outputs["token_embedding"], states, atol=TOLERANCE)


def test_the_source_hash_covers_the_weights_of_the_layers(tmp_path: Path) -> None:
    folder = saved(tmp_path, "BertModel")
    layer_pooled(folder, 2, [1.0, 1.0])
    first = source_of(read(folder)).sha256
    layer_pooled(folder, 2, [1.0, 2.0])
    assert source_of(read(folder)).sha256 != first


def test_tensorrt_llm_refuses_it(tmp_path: Path) -> None:
    folder = saved(tmp_path, "Qwen3Model")
    layer_pooled(folder, 3, [1.0])
    with pytest.raises(UnsupportedArchitectureError, match="layer_shares"):
        class_of(read(folder, pooling="last").spec)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda folder: change_config(folder, output_hidden_states=None),
            '"output_hidden_states": true to config.json',
        ),
        (lambda folder: layer_pooled(folder, 2, [1.0]), "has 1 layer_weights and layer_start 2, for a model whose 3"),
        (lambda folder: layer_pooled(folder, 4, [1.0]), "has 1 layer_weights and layer_start 4"),
        (lambda folder: layer_pooled(folder, -2, [1.0, 1.0]), "layer_start -2"),
        (lambda folder: layer_pooled(folder, 2, [1.0, -1.0]), "add up to 0.0: they have no mean"),
        (lambda folder: layer_pooled(folder, 2, [1.0, float("nan")]), "add up to nan"),
        (lambda folder: save_file({"a": torch.ones(2)}, folder / "1_WeightedLayerPooling" / WEIGHTS), "holds a, not"),
        (lambda folder: modules(folder, "Transformer", "WeightedLayerPooling"), "asks for Transformer -> WeightedL"),
        (lambda folder: modules(folder, "Transformer", "Pooling", "WeightedLayerPooling"), "asks for Transformer -> P"),
    ],
)
def test_what_has_no_such_mean_is_refused(change: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, "BertModel")
    layer_pooled(folder, 2, [1.0, 1.0])
    change(folder)
    refused(folder, CheckpointError, message)


def test_a_decoder_behind_an_encoder_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, "BartModel")
    layer_pooled(folder, 2, [1.0, 1.0])
    refused(folder, CheckpointError, "nothing but a pooling behind their layers, not for BartModel")


def test_layers_that_are_not_read_by_default_start_at_the_fourth(tmp_path: Path) -> None:
    folder = saved(tmp_path, "BertModel")
    layer_pooled(folder, 0, [1.0] * 4)
    (folder / "1_WeightedLayerPooling" / "config.json").write_text('{"word_embedding_dimension": 32}')
    refused(folder, CheckpointError, "has 4 layer_weights and layer_start 4")
