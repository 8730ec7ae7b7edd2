"""Quantizable linear layers are those of the graph, with the same matrices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from bei_build.onnx_graph.attention import AttentionCore
from bei_build.onnx_graph.transformer import write_graph
from bei_build.onnx_graph.writer import GraphTypes
from bei_build.spec.dtypes import DType
from bei_build.spec.linear_layers import linear_layers
from tests.bei_build.targets.tiny import case_named, read_case, tiny_spec, with_experts
from tests.support.zoo import Case, by_tier

# One model a kind of layer: post and pre norms, gates, shared weights, attention to an encoder, MLPs beside attention.
SOME = ("BertModel", "LlamaModel", "ModernBertModel", "AlbertModel", "BartModel", "GPTJModel")


def gemms_of(path: Path) -> dict[str, np.ndarray]:
    """The matrix of each product of ``path``, by the layer's name."""
    model = onnx.load(path)
    arrays = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    return {node.name: arrays[node.input[1]] for node in model.graph.node if node.op_type == "Gemm"}


@pytest.mark.parametrize("case", by_tier(*map(case_named, SOME)))
def test_they_are_the_products_of_the_graph_s_layers(tmp_path: Path, case: Case) -> None:
    checkpoint = read_case(case, tmp_path)
    read, types = checkpoint.weights().read, GraphTypes(DType.FP32, DType.FP32)
    path = write_graph(checkpoint.spec, read, tmp_path, types, AttentionCore.TRT_ATTENTION, checkpoint.max_seq_len)
    products = gemms_of(path)
    layers = linear_layers(checkpoint.spec)
    expected = {name for name in products if name.startswith(("layers.", "decoder.layers.")) and "router" not in name}
    assert {layer.name for layer in layers} == expected
    for layer in layers:
        matrix, product = layer.matrix(read), products[layer.name]
        assert matrix.shape == product.shape
        if not any(name.endswith("query.weight") for name in layer.weights):  # whose rows the graph scales
            np.testing.assert_allclose(np.abs(matrix).max(axis=0), np.abs(product).max(axis=0), rtol=1e-6)


def test_layers_of_a_group_read_the_same_value(tmp_path: Path) -> None:
    spec = with_experts(tiny_spec())
    by_group: dict[str, list[str]] = {}
    for layer in linear_layers(spec):
        by_group.setdefault(layer.group, []).append(layer.name)
    assert any(len(names) > 1 for names in by_group.values())
    assert all(name.rsplit(".", 1)[1] == "up" for names in by_group.values() if len(names) > 1 for name in names)
