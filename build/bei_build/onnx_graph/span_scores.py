"""Scores of spans of words for labels (``SpanScoresSpec``), as a layer of a head.

The first matrix of the MLP over spans is applied to starts and ends by themselves, and its second one to the labels:
of a span of a label there remain a sum, a ReLU and a product of 4 * width numbers, a fiftieth of the MLP's work with
a dozen widths and labels. Spans of one width are computed at a time, so that a step never holds those of all.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bei_build.onnx_graph.writer import GraphWriter
from bei_build.spec.dtypes import DType, FloatArray
from bei_build.spec.parts import SpanScoresSpec

# PyTorch's gates are input, forget, cell, output; ONNX's input, output, forget, cell.
_GATES = (0, 3, 1, 2)


def emit_span_scores(
    graph: GraphWriter, read: Callable[[str], FloatArray], value: str, layer: SpanScoresSpec, name: str
) -> str:
    """From token states ``value`` [T, width] to scores [T, C * max_width], in the graph's type: of the word that starts
    at a token, by labels, then by widths. Rows of tokens that start no word are not to be read."""
    return _SpanScores(graph, read, layer, name).emit(value)


class _SpanScores:
    """Rows are flat, [B * W, n] and [B * C, n], wherever a matrix is applied to them."""

    def __init__(self, graph: GraphWriter, read: Callable[[str], FloatArray], layer: SpanScoresSpec, name: str) -> None:
        self._graph = graph
        self._read_weight = read
        self._layer = layer
        self._name = name
        self._word_slots = graph.input("word_slots", DType.INT32, ["B", "W"])
        self._label_slots = graph.input("label_slots", DType.INT32, ["B", "C"])

    def emit(self, value: str) -> str:
        graph, name, most = self._graph, self._name, self._layer.max_width
        # Words without tokens are zeros, a row behind those of the tokens.
        with_zeros = graph.op("Pad", [value, graph.constant([0, 0, 1, 0])], f"{name}.with_zeros")
        words = self._rows_at(with_zeros, self._word_slots, f"{name}.words")
        for index in range(self._layer.recurrent_layers):
            words = self._recurrent(words, index)
        starts = self._by_sequence(self._projected(words, "start"), self._word_slots)
        # Spans over the last word's end have the score of the one that ends there, whatever else is in the step.
        places = graph.input("word_ends", DType.INT32, ["B", "W"])
        ends = graph.op("Gather", [self._projected(words, "end"), places], f"{name}.ends", axis=0)
        ends = graph.op("Pad", [ends, graph.constant([0, 0, 0, 0, most - 1, 0])], f"{name}.padded", mode="edge")
        factors, offsets = self._labels(value)
        scores = []
        for width in range(most):
            part = f"{name}.{width}"
            last = np.iinfo(np.int64).max if width == most - 1 else width + 1 - most
            bounds = [graph.constant([bound]) for bound in (width, last, 1)]
            shifted = graph.op("Slice", [ends, *bounds], f"{part}.ends")
            hidden = graph.op("Relu", [graph.op("Add", [starts, shifted], f"{part}.sum")], f"{part}.act")
            product = graph.op("MatMul", [hidden, factors], f"{part}.product")
            scores.append(graph.op("Unsqueeze", [product, graph.constant([3])], f"{part}.column"))
        joined = graph.op("Concat", scores, f"{name}.joined", axis=3)
        complete = graph.op("Add", [joined, offsets], f"{name}.complete")
        by_word = graph.op("Flatten", [complete], f"{name}.by_word", axis=2)
        return graph.op("Gather", [by_word, graph.input("token_words", DType.INT32, ["T"])], name, axis=0)

    def _rows_at(self, value: str, slots: str, name: str) -> str:
        """Rows of ``value`` at ``slots`` [B, n], flat."""
        flat = self._graph.op("Reshape", [slots, self._graph.constant([-1])], f"{name}.slots")
        return self._graph.op("Gather", [value, flat], name, axis=0)

    def _by_sequence(self, rows: str, slots: str) -> str:
        """Flat ``rows`` as [B, n, width], with the sizes of ``slots``."""
        sizes = self._graph.op("Shape", [slots], f"{rows}.sizes")
        shape = self._graph.op("Concat", [sizes, self._graph.constant([-1])], f"{rows}.shape", axis=0)
        return self._graph.op("Reshape", [rows, shape], f"{rows}.by_sequence")

    def _recurrent(self, words: str, index: int) -> str:
        """One bidirectional LSTM. The backward one reads the words of each sequence from its own last to its first:
        sequences need no lengths, which not every compiler's LSTM knows."""
        graph, part = self._graph, f"rnn.{index}"
        reversal = graph.input("word_reversal", DType.INT32, ["B", "W"])
        from_end = self._rows_at(words, reversal, f"{self._name}.{part}.from_end")
        backward = self._direction(from_end, f"{part}.back")
        restored = self._rows_at(backward, reversal, f"{self._name}.{part}.restored")
        return graph.op("Concat", [self._direction(words, f"{part}.ahead"), restored], f"{self._name}.{part}", axis=1)

    def _direction(self, words: str, part: str) -> str:
        graph, name, half = self._graph, f"{self._name}.{part}", self._layer.width // 2
        by_time = graph.op("Transpose", [self._by_sequence(words, self._word_slots)], f"{name}.by_time", perm=[1, 0, 2])
        matrices = [
            graph.vector(f"{name}.{kind}.weight", self._gates(f"{part}.{kind}.weight")[None])
            for kind in ("input", "hidden")
        ]
        biases = np.concatenate([self._gates(f"{part}.{kind}.bias") for kind in ("input", "hidden")])
        inputs = [by_time, *matrices, graph.vector(f"{name}.bias", biases[None])]
        states = graph.op("LSTM", inputs, f"{name}.states", hidden_size=half)  # [W, 1, B, half]
        turned = graph.op("Transpose", [states], f"{name}.turned", perm=[2, 0, 1, 3])
        return graph.op("Reshape", [turned, graph.constant([-1, half])], name)

    def _read(self, weight: str) -> FloatArray:
        return self._read_weight(f"{self._layer.name}.{weight}")

    def _gates(self, weight: str) -> FloatArray:
        parts = np.split(self._read(weight), 4)
        return np.concatenate([parts[gate] for gate in _GATES])

    def _projected(self, words: str, part: str) -> str:
        """Starts or ends, 4 * width numbers a word: through their MLP and their half of the first matrix over spans."""
        name, width = f"{self._name}.{part}", self._layer.width
        rows = self._graph.op("Relu", [self._mlp(words, part)], f"{name}.act")
        matrix = self._read("out.0.weight")
        half, bias = (matrix[:, :width], self._read("out.0.bias")) if part == "start" else (matrix[:, width:], None)
        return self._graph.linear(f"{name}.out", rows, half, bias)

    def _labels(self, value: str) -> tuple[str, str]:
        """The factors of a span's numbers, [B, 4 * width, C], and what is added to their sum, [B, 1, C, 1]."""
        graph, name = self._graph, f"{self._name}.label"
        labels = self._mlp(self._rows_at(value, self._label_slots, f"{name}.tokens"), "label")
        factors = graph.linear(f"{name}.factors", labels, self._read("out.1.weight").T)
        offsets = graph.linear(f"{name}.offsets", labels, self._read("out.1.bias")[None])
        turned = graph.op(
            "Transpose", [self._by_sequence(factors, self._label_slots)], f"{name}.turned", perm=[0, 2, 1]
        )
        by_sequence = self._by_sequence(offsets, self._label_slots)
        return turned, graph.op("Unsqueeze", [by_sequence, graph.constant([1])], f"{name}.added")

    def _mlp(self, rows: str, part: str) -> str:
        graph, name = self._graph, f"{self._name}.{part}"
        inner = graph.linear(f"{name}.0", rows, self._read(f"{part}.0.weight"), self._read(f"{part}.0.bias"))
        inner = graph.op("Relu", [inner], f"{name}.0.act")
        return graph.linear(f"{name}.1", inner, self._read(f"{part}.1.weight"), self._read(f"{part}.1.bias"))
