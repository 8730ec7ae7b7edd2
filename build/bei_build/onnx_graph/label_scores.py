"""Scores of tokens as labels of the text that they stand in (``LabelScoresSpec``), as a layer of a head.

Every token is scored: few of them are labels' own, and a step's rows need no other order than its tokens'.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bei_build.onnx_graph.activation import emit_activation
from bei_build.onnx_graph.writer import GraphWriter
from bei_build.spec.dtypes import DType, FloatArray
from bei_build.spec.head_layers import LabelScoresSpec
from bei_build.spec.parts import Activation

_LEAST_LENGTH = 1e-8  # added to lengths by GLiClass's code


def emit_label_scores(
    graph: GraphWriter, read: Callable[[str], FloatArray], value: str, text: str, layer: LabelScoresSpec, name: str
) -> str:
    """From token states ``value`` [T, width] and texts' states ``text`` FP32 [B, width] to scores [T, 1]."""

    def linear(part: str, rows: str) -> str:
        weight, bias = (read(f"{layer.name}.{part}.{kind}") for kind in ("weight", "bias"))
        return graph.linear(f"{name}.{part}", rows, weight, bias)

    def through(part: str, rows: str, activation: Activation) -> str:
        return emit_activation(graph, linear(part, rows), activation, f"{name}.{part}.act", in_fp32=False)

    def side(part: str, rows: str) -> str:
        projected = linear(f"{part}.1", through(f"{part}.0", rows, layer.activation))
        return _normalized(graph, projected, f"{name}.{part}.unit") if layer.normalizes else projected

    def of_tokens(rows: str, part: str) -> str:
        return graph.op("Gather", [rows, graph.input("sequence_ids", DType.INT32, ["T"])], f"{name}.{part}", axis=0)

    texts = side("text", graph.cast(text, graph.types.compute, f"{name}.pooled"))
    labels = side("label", value)
    if layer.scorer == "dot":
        products = graph.op("Mul", [of_tokens(texts, "text.of_tokens"), labels], f"{name}.products")
        scores = graph.op("ReduceSum", [products, graph.constant([1])], f"{name}.scores", keepdims=1)
    else:
        if layer.scorer == "weighted":
            sizes = [layer.width, layer.width]
            of_text = graph.split(of_tokens(linear("text.rows", texts), "text.of_tokens"), sizes, f"{name}.text.two", 1)
            of_label = graph.split(linear("label.rows", labels), sizes, f"{name}.label.two", 1)
            products = graph.op("Mul", [of_text[1], of_label[1]], f"{name}.products")
            parts = [of_text[0], of_label[0], products]
        else:
            parts = [of_tokens(texts, "text.of_tokens"), labels]
        scores = graph.op("Concat", parts, f"{name}.pairs", axis=1)
        for index in range(len(layer.inner)):
            scores = through(f"out.{index}", scores, "relu")
        scores = linear(f"out.{len(layer.inner)}", scores)
    if not layer.normalizes:
        return scores
    return graph.op("Mul", [scores, graph.vector(f"{name}.scale", read(f"{layer.name}.scale"))], f"{name}.scaled")


def _normalized(graph: GraphWriter, rows: str, name: str) -> str:
    length = graph.op("ReduceL2", [rows, graph.constant([1])], f"{name}.length", keepdims=1)
    least = graph.constant(_LEAST_LENGTH, np.float32)
    total = graph.op("Add", [length, graph.cast(least, graph.types.compute, f"{name}.least")], f"{name}.total")
    return graph.op("Div", [rows, total], name)
