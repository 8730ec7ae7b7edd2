"""Activation functions as ONNX nodes."""

from __future__ import annotations

import numpy as np

from bei_build.graph.writer import GraphWriter
from bei_build.spec import Activation

_OPS = {"relu": "Relu", "hardswish": "HardSwish", "mish": "Mish", "tanh": "Tanh", "sigmoid": "Sigmoid"}


def emit_activation(graph: GraphWriter, value: str, activation: Activation, name: str) -> str:
    """Apply ``activation`` to ``value``; ``log1p_relu``, SPLADE's, takes FP32 values only."""
    if activation == "identity":
        return value
    if activation in ("gelu", "gelu_tanh"):
        return graph.op("Gelu", [value], name, approximate="none" if activation == "gelu" else "tanh")
    if activation == "gelu_10":
        return _clipped(graph, emit_activation(graph, value, "gelu", f"{name}.gelu"), -10.0, 10.0, name)
    if activation == "relu6":
        return _clipped(graph, value, 0.0, 6.0, name)
    if activation == "leaky_relu":
        return graph.op("LeakyRelu", [value], name, alpha=0.01)
    if activation == "elu":
        return graph.op("Elu", [value], name, alpha=1.0)
    if activation == "silu":
        return graph.op("Mul", [value, graph.op("Sigmoid", [value], f"{name}.gate")], name)
    if activation == "quick_gelu":  # x * sigmoid(1.702 x)
        steeper = graph.op("Mul", [value, graph.constant(1.702, graph.types.compute.numpy)], f"{name}.steeper")
        return graph.op("Mul", [value, graph.op("Sigmoid", [steeper], f"{name}.gate")], name)
    if activation == "relu2":
        positive = graph.op("Relu", [value], f"{name}.relu")
        return graph.op("Mul", [positive, positive], name)
    if activation == "log1p_relu":
        positive = graph.op("Relu", [value], f"{name}.relu")
        return graph.op("Log", [graph.op("Add", [positive, graph.constant(1.0, np.float32)], f"{name}.plus_1")], name)
    return graph.op(_OPS[activation], [value], name)


def _clipped(graph: GraphWriter, value: str, least: float, most: float, name: str) -> str:
    bounds = [graph.constant(bound, graph.types.compute.numpy) for bound in (least, most)]
    return graph.op("Clip", [value, *bounds], name)
