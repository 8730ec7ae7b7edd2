"""Comparison of a module's FP8 numbers with those of the ONNX graph, number by number.

Different orders of summation change the last digits, and a value between two numbers of FP8 then goes to one or the
other. In a model of the zoo's size one such number changes all later ones by up to half of the rounding error, so
outputs alone show little. Here each number of the module must equal the graph's, or be as near to the value; it is then
replaced by the graph's, so that both compute on from the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from bei.core import Encoding, Float32Array, PackedBatch
from bei.engine.packing import graph_inputs
from bei_build.onnx_graph.attention import AttentionCore
from bei_build.onnx_graph.positions import rows_for_halves
from bei_build.onnx_graph.transformer import Read, write_graph
from bei_build.onnx_graph.writer import GraphTypes
from bei_build.quantization.emulation import session_of
from bei_build.spec.dtypes import DType
from bei_build.spec.linear_layers import LinearLayer, linear_layers
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.quantization import LARGEST, Quantization
from bei_build.torch_graph.attention import Attention
from bei_build.torch_graph.fp8 import FP8, FP8Linear, Rounding
from bei_build.torch_graph.model import PackedModel

_LOST_IN_FP32 = 1e-6  # relative to a weight divided by its scale, or to a row's largest value where values are sums


@dataclass(frozen=True)
class GraphNumbers:
    """The graph's numbers for a batch: ``inputs`` [tokens, in] and ``matrices`` [out, in] by layer, as FP8, and
    ``outputs``, float32."""

    inputs: dict[str, Tensor]
    matrices: dict[str, Tensor]
    outputs: dict[str, Float32Array]


def numbers_of_the_graph(
    spec: ModelSpec, read: Read, quantization: Quantization, max_seq_len: int, encodings: list[Encoding], folder: Path
) -> GraphNumbers:
    """The numbers from ONNX Runtime, as the emulation runs the graph; without experts."""
    types = GraphTypes(DType.FP32, DType.FP32, quantization)
    path = write_graph(spec, read, folder, types, AttentionCore.TRT_ATTENTION, max_seq_len)
    model = onnx.load(path)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    products = {node.output[0]: node for node in model.graph.node}
    layers = linear_layers(spec)
    rounded = {layer.name: products[layer.name].input[0] for layer in layers}
    for name in dict.fromkeys(rounded.values()):
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    onnx.save(model, path)
    session = session_of(path)
    batch = PackedBatch.from_encodings(encodings)
    names = [one.name for one in session.get_outputs()]
    values = session.run(names, graph_inputs(batch, [one.name for one in session.get_inputs()]))
    found: dict[str, Any] = dict(zip(names, values, strict=True))
    inputs, matrices = {}, {}
    for layer in layers:
        scale = np.float32(quantization.layers[layer.name].input_amax / LARGEST["fp8"])
        inputs[layer.name] = torch.from_numpy(found[rounded[layer.name]][: batch.num_tokens] / scale).to(FP8)
        matrix = stored[f"{layer.name}.weight.fp8"]
        codes = np.frombuffer(matrix.raw_data, np.uint8).reshape(tuple(matrix.dims)).copy()
        matrices[layer.name] = torch.from_numpy(codes).view(FP8)
    counts = {str(head.output): batch.batch_size if head.pooling else batch.num_tokens for head in spec.heads}
    return GraphNumbers(inputs, matrices, {name: found[name][:count] for name, count in counts.items()})


def take_numbers(
    model: PackedModel, read: Read, quantization: Quantization, numbers: GraphNumbers
) -> dict[str, Rounding]:
    """Replace the matrices of ``model`` by those of ``numbers``, and its inputs whenever it runs; AssertionError where
    one is farther from the value than the other.

    Returns the rounding of each layer's input. The hooks are for one batch, that of ``numbers``.
    """
    roundings: dict[str, Rounding] = {}
    for layer in linear_layers(model.spec):
        modules = [model.get_submodule(part.removesuffix(".weight")) for part in layer.parts]
        step = quantization.layers[layer.name].input_amax / LARGEST["fp8"]
        theirs = torch.split(numbers.matrices[layer.name], [_fp8(module).out_features for module in modules])
        of_parts = torch.split(torch.from_numpy(layer.matrix(read)), [len(codes) for codes in theirs])
        for module, values, codes in zip(map(_fp8, modules), of_parts, theirs, strict=True):
            order = _row_order(model, layer, module)
            ideal = values / (module.scales[0] / step)[:, None]
            own = module.codes.view(torch.uint8)
            _check_nearest(layer.name, ideal[order], module.codes[order], codes, _LOST_IN_FP32 * ideal[order].abs())
            own[order] = codes.view(torch.uint8)
        rounding = _fp8(modules[0]).rounding
        if rounding not in roundings.values():
            rounding.register_forward_hook(_hook(layer.name, numbers.inputs[layer.name]))
        roundings[layer.name] = rounding
    return roundings


def _fp8(module: nn.Module) -> FP8Linear:
    assert isinstance(module, FP8Linear)
    return module


def _row_order(model: PackedModel, layer: LinearLayer, module: FP8Linear) -> Tensor:
    """For each row of a part of the graph's matrix, the module's row: rotated pairs lie apart in the graph."""
    rows = np.arange(module.out_features, dtype=np.float32)
    attention = model.get_submodule(layer.name.rpartition(".")[0])
    if isinstance(attention, Attention) and module in (getattr(attention, it, None) for it in ("query", "key")):
        rope = attention._spec.rope
        rows = rows_for_halves(rows, attention._spec) if rope and rope.interleaved else rows
    return torch.from_numpy(rows.astype(np.int64))


def _hook(name: str, theirs: Tensor) -> Any:
    def check(module: nn.Module, arguments: tuple[Tensor], own: Tensor) -> Tensor:
        assert isinstance(module, Rounding)
        ideal = arguments[0].float() * module.inverse
        _check_nearest(name, ideal, own, theirs, _LOST_IN_FP32 * ideal.abs().amax(1, keepdim=True))
        return theirs

    return check


def _check_nearest(name: str, ideal: Tensor, own: Tensor, theirs: Tensor, within: Tensor) -> None:
    """Where they differ, ``ideal`` must be halfway between ``own`` and ``theirs``, up to ``within``."""
    assert own.shape == theirs.shape, name
    ours, others = own.float(), theirs.float()
    is_wrong = (ours != others) & ~((ideal - (ours + others) / 2).abs() <= within)
    assert not is_wrong.any(), f"{name}: {int(is_wrong.sum())} of {is_wrong.numel()} numbers are not the nearest"
