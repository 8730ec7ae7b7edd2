"""Activation functions as ONNX nodes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bei_build.onnx_graph.writer import GraphWriter
from bei_build.spec.parts import Activation

_OPS = {"relu": "Relu", "hardswish": "HardSwish", "mish": "Mish", "tanh": "Tanh", "sigmoid": "Sigmoid"}


def emit_activation(graph: GraphWriter, value: str, activation: Activation, name: str, *, in_fp32: bool = False) -> str:
    """Apply ``activation`` to ``value``, which has the graph's type or, for SPLADE's ``log1p_relu``, FP32."""
    dtype = np.dtype(np.float32) if in_fp32 else graph.types.compute.numpy
    if activation == "identity":
        return value
    if activation in ("gelu", "gelu_tanh"):
        return graph.op("Gelu", [value], name, approximate="none" if activation == "gelu" else "tanh")
    if activation == "gelu_10":
        exact = graph.op("Gelu", [value], f"{name}.gelu", approximate="none")
        return _clipped(graph, exact, (-10.0, 10.0), dtype, name)
    if activation == "relu6":
        return _clipped(graph, value, (0.0, 6.0), dtype, name)
    if activation == "leaky_relu":
        return graph.op("LeakyRelu", [value], name, alpha=0.01)
    if activation == "elu":
        return graph.op("Elu", [value], name, alpha=1.0)
    if activation == "silu":
        return graph.op("Mul", [value, graph.op("Sigmoid", [value], f"{name}.gate")], name)
    if activation == "quick_gelu":  # x * sigmoid(1.702 x)
        steeper = graph.op("Mul", [value, graph.constant(1.702, dtype)], f"{name}.steeper")
        return graph.op("Mul", [value, graph.op("Sigmoid", [steeper], f"{name}.gate")], name)
    if activation == "relu2":
        positive = graph.op("Relu", [value], f"{name}.relu")
        return graph.op("Mul", [positive, positive], name)
    if activation == "log1p_relu":
        positive = graph.op("Relu", [value], f"{name}.relu")
        return graph.op("Log", [graph.op("Add", [positive, graph.constant(1.0, np.float32)], f"{name}.plus_1")], name)
    return graph.op(_OPS[activation], [value], name)


def _clipped(graph: GraphWriter, value: str, bounds: tuple[float, float], dtype: npt.DTypeLike, name: str) -> str:
    return graph.op("Clip", [value, *(graph.constant(bound, dtype) for bound in bounds)], name)
