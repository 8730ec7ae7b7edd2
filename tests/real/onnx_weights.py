"""Weights out of an ONNX export, under the names of the torch modules they came from.

torch's exporter keeps the names of embeddings, norms and biases. Weights of matrix products lose theirs, but the nodes
that use them are called after the module they are in. FP32, FP16, dynamically quantized INT8 and attention that ONNX
Runtime fused are read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from bei.core import Float32Array

_QUANTIZED = "_quantized"
_PRODUCTS = ("MatMul", "MatMulInteger", "Gemm")
_PASSED_ON = ("Identity", "DequantizeLinear")
_FUSED_PARTS = ("query", "key", "value")


def state_dict(path: Path) -> dict[str, Float32Array]:
    """Every weight of the graph in ``path`` as FP32, matrices as [out_features, in_features]."""
    graph = _Graph(onnx.load(path).graph)
    return {**graph.named(), **graph.fused_attention(), **graph.of_products()}


class _Graph:
    def __init__(self, graph: onnx.GraphProto) -> None:
        self._nodes = list(graph.node)
        self._producers = {output: node for node in graph.node for output in node.output}
        self._constants: dict[str, npt.NDArray[Any]] = {
            tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer
        }
        for node in graph.node:
            if node.op_type == "Constant":
                for attribute in node.attribute:
                    if attribute.name == "value":
                        self._constants[node.output[0]] = numpy_helper.to_array(attribute.t)

    def named(self) -> dict[str, Float32Array]:
        """Tensors that kept the name of their parameter."""
        found = {}
        for name in self._constants:
            if re.search(r"\.(weight|bias)$", name) or name.endswith(f".weight{_QUANTIZED}"):
                found[name.removesuffix(_QUANTIZED)] = self._value(name)
        return found

    def fused_attention(self) -> dict[str, Float32Array]:
        """ONNX Runtime's Attention nodes: query, key and value side by side, [hidden, 3 * hidden]."""
        found = {}
        for node in self._nodes:
            if node.op_type == "Attention":
                module = node.output[0].split("/attention")[0].strip("/").replace("/", ".") + ".attention.self."
                weights = np.split(self._value(node.input[1]), 3, axis=1)
                biases = np.split(self._value(node.input[2]), 3)
                for part, weight, bias in zip(_FUSED_PARTS, weights, biases, strict=True):
                    found[f"{module}{part}.weight"], found[f"{module}{part}.bias"] = weight.T, bias
        return found

    def of_products(self) -> dict[str, Float32Array]:
        """Weights without a name: those of products, whose nodes say the module."""
        found = {}
        for node in self._nodes:
            name = self._constant_behind(node.input[1]) if node.op_type in _PRODUCTS else None
            module = ".".join(node.name.removesuffix("_quant").strip("/").split("/")[:-1])
            if name is None or not module or re.search(r"_\d+$", module):  # module_1: used twice, a product of states
                continue
            matrix = self._value(name)
            if matrix.ndim == 2:
                is_ours = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
                found[f"{module}.weight"] = matrix if is_ours else matrix.T
        return found

    def _constant_behind(self, name: str) -> str | None:
        producer = self._producers.get(name)
        if producer is not None and producer.op_type in _PASSED_ON:
            name = producer.input[0]
        return name if name in self._constants else None

    def _value(self, name: str) -> Float32Array:
        value = np.asarray(self._constants[name]).astype(np.float32)
        if name.endswith(_QUANTIZED):
            base = name.removesuffix(_QUANTIZED)
            zero, scale = (self._constants[base + end].astype(np.float32) for end in ("_zero_point", "_scale"))
            value = (value - zero) * scale
        result: Float32Array = np.ascontiguousarray(value, np.float32)
        return result
