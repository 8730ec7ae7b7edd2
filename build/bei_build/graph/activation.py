"""Activation functions as ONNX nodes."""

from __future__ import annotations

from bei_build.graph.writer import GraphWriter
from bei_build.spec import Activation


def emit_activation(graph: GraphWriter, value: str, activation: Activation, name: str) -> str:
    """Apply ``activation`` to ``value``."""
    if activation == "identity":
        return value
    if activation in ("gelu", "gelu_tanh"):
        return graph.op("Gelu", [value], name, approximate="none" if activation == "gelu" else "tanh")
    if activation == "silu":
        return graph.op("Mul", [value, graph.op("Sigmoid", [value], f"{name}.gate")], name)
    return graph.op({"relu": "Relu", "tanh": "Tanh"}[activation], [value], name)
