"""Scores of pairs of spans for relations (``SpanPairScoresSpec``), as a layer of a head.

Matrices are applied to pairs, not to words: a step without pairs to score has one for each sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np

from bei.engine.span_pairs import pair_slots
from bei_build.onnx_graph.activation import emit_activation
from bei_build.onnx_graph.writer import GraphWriter
from bei_build.spec.dtypes import DType, FloatArray
from bei_build.spec.head_layers import SpanPairScoresSpec


def emit_pair_scores(
    graph: GraphWriter, read: Callable[[str], FloatArray], value: str, layer: SpanPairScoresSpec, name: str
) -> str:
    """From token states ``value`` [T, width] to rows [T, most], in the graph's type."""
    scores = _Pairs(graph, read, value, layer, name).emit()
    slots = graph.input(pair_slots(layer.most), DType.INT32, ["T", layer.most])
    flat = graph.op("Reshape", [scores, graph.constant([-1])], f"{name}.flat")
    return graph.op("Gather", [flat, slots], name, axis=0)


class _Pairs:
    """P pairs of all texts; the head and the tail of each are two rows, [2, P, n]."""

    def __init__(
        self, graph: GraphWriter, read: Callable[[str], FloatArray], value: str, layer: SpanPairScoresSpec, name: str
    ) -> None:
        self._graph = graph
        self._read = read
        self._value = value
        self._layer = layer
        self._name = name
        self._words = self._at(value, graph.input("pair_words", DType.INT32, ["W"]), "words")  # [W, width]
        self._firsts, self._stops = (graph.input(f"pair_{part}", DType.INT32, [2, "P"]) for part in ("firsts", "stops"))

    def emit(self) -> str:
        """Scores [P, 1]."""
        graph, name = self._graph, self._name
        label = self._label()
        features = graph.cast(
            graph.input("pair_features", DType.FP32, ["P", 2]), graph.types.compute, f"{name}.features"
        )
        joined = graph.op("Concat", [self._ends(), label, features], f"{name}.joined", axis=1)
        hidden = emit_activation(graph, self._linear("mlp.0", joined), "gelu", f"{name}.act")
        parts = [self._linear("mlp.1", hidden)]
        if self._layer.reads_content:
            parts += self._of_content(label)
        return reduce(lambda left, right: graph.op("Add", [left, right], f"{right}.total"), parts)

    def _ends(self) -> str:
        """The states of the first and last words of heads and tails, [P, 4 * width]."""
        graph, name = self._graph, self._name
        lasts = graph.op("Sub", [self._stops, graph.constant(1, np.int32)], f"{name}.lasts")
        ends = [self._at(self._words, places, f"{places}.states") for places in (self._firsts, lasts)]
        return self._by_pair(graph.op("Concat", ends, f"{name}.sides", axis=2), "ends")

    def _label(self) -> str:
        """What labels say of pairs: the states of both, or their mean, [P, label_width]."""
        graph, name = self._graph, self._name
        labels = self._at(self._value, graph.input("pair_labels", DType.INT32, [2, "P"]), "labels")
        if self._layer.joins_labels:
            return self._by_pair(labels, "label")
        return graph.op("ReduceMean", [labels, graph.constant([0])], f"{name}.label", keepdims=0)

    def _of_content(self, label: str) -> list[str]:
        """What the words of heads and tails add to the scores, each [P, 1]."""
        graph, name, width = self._graph, self._name, self._layer.width
        sides = graph.split(self._means(), [1, 1], f"{name}.means", 0)
        head, tail = (
            self._linear(part, graph.op("Reshape", [side, graph.constant([-1, width])], f"{side}.flat"))
            for part, side in zip(("head", "tail"), sides, strict=True)
        )
        gate = graph.op("Sigmoid", [self._linear("gate", label)], f"{name}.gates")
        gated = graph.op("Mul", [graph.op("Mul", [head, gate], f"{name}.gated"), tail], f"{name}.products")
        total = graph.op("ReduceSum", [gated, graph.constant([1])], f"{name}.product", keepdims=1)
        scale = graph.constant(width**-0.5, graph.types.compute.numpy)
        joined = graph.op("Concat", [head, tail, label], f"{name}.contents", axis=1)
        return [graph.op("Mul", [total, scale], f"{name}.scaled"), self._linear("content", joined)]

    def _means(self) -> str:
        """The means of the words of heads and tails, [2, P, width]."""
        graph, name, compute = self._graph, self._name, self._graph.types.compute
        ids = graph.input("pair_word_ids", DType.INT32, ["W"])
        firsts, stops = (
            graph.op("Unsqueeze", [side, graph.constant([2])], f"{name}.{side}.column")
            for side in (self._firsts, self._stops)
        )
        is_behind = graph.op("GreaterOrEqual", [ids, firsts], f"{name}.is_behind")
        is_inside = graph.op("And", [is_behind, graph.op("Less", [ids, stops], f"{name}.is_before")], f"{name}.inside")
        shares = graph.cast(is_inside, compute, f"{name}.shares")
        total = graph.op("MatMul", [shares, self._words], f"{name}.sums")
        lengths = graph.cast(graph.op("Sub", [stops, firsts], f"{name}.counts"), compute, f"{name}.lengths")
        return graph.op("Div", [total, lengths], f"{name}.mean")

    def _by_pair(self, value: str, part: str) -> str:
        """``value`` [2, P, n] as [P, 2 * n]."""
        turned = self._graph.op("Transpose", [value], f"{self._name}.{part}.turned", perm=[1, 0, 2])
        return self._graph.op("Flatten", [turned], f"{self._name}.{part}", axis=1)

    def _at(self, value: str, places: str, part: str) -> str:
        """The rows of ``value`` at ``places``."""
        return self._graph.op("Gather", [value, places], f"{self._name}.{part}", axis=0)

    def _linear(self, part: str, value: str) -> str:
        weight, bias = (self._read(f"{self._layer.name}.{part}.{kind}") for kind in ("weight", "bias"))
        return self._graph.linear(f"{self._name}.{part}", value, weight, bias)
