"""Words and labels of a step, read by the heads that score them (``SpanScoresSpec``, ``WordScoresSpec``,
``RelationScoresSpec``).

Rows are flat, [B * W, n] and [B * C, n], wherever a matrix is applied to them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bei.engine.packing import label_vectors
from bei_build.onnx_graph.writer import GraphWriter
from bei_build.spec.dtypes import DType, FloatArray
from bei_build.spec.head_layers import RelationScoresSpec, SpanScoresSpec, WordScoresSpec

# PyTorch's gates are input, forget, cell, output; ONNX's input, output, forget, cell.
_GATES = (0, 3, 1, 2)


class WordRows:
    """The rows of ``layer``, which is called ``name`` in the graph; ``read`` gives weights by their names."""

    def __init__(
        self,
        graph: GraphWriter,
        read: Callable[[str], FloatArray],
        layer: SpanScoresSpec | WordScoresSpec | RelationScoresSpec,
        name: str,
    ) -> None:
        self.graph = graph
        self.name = name
        self._read_weight = read
        self._layer = layer
        self.word_slots = graph.input("word_slots", DType.INT32, ["B", "W"])

    @property
    def label_slots(self) -> str:
        """The slots of the labels of each sequence."""
        return self.graph.input("label_slots", DType.INT32, ["B", "C"])

    def words(self, value: str) -> str:
        """Rows of all words for token states ``value`` [T, width], through the LSTMs."""
        return self.recurrent(self.rows_at(self.with_zeros(value), self.word_slots, f"{self.name}.words"))

    def with_zeros(self, value: str) -> str:
        """``value`` [T, width] with a row of zeros behind it, of words without tokens."""
        return self.graph.op("Pad", [value, self.graph.constant([0, 0, 1, 0])], f"{self.name}.with_zeros")

    def recurrent(self, words: str) -> str:
        """Flat rows of ``words`` through the LSTMs."""
        for index in range(self._layer.recurrent_layers):
            words = self._recurrent(words, index)
        return words

    def labels(self, value: str) -> str:
        """Rows of all labels: token states, or given vectors."""
        if not isinstance(self._layer, RelationScoresSpec) and self._layer.given_labels:
            width = self._layer.width
            given = self.graph.input(label_vectors(width), DType.FP32, ["R", width])
            value = self.graph.cast(given, self.graph.types.compute, f"{self.name}.label.given")
        return self.rows_at(value, self.label_slots, f"{self.name}.label.tokens")

    def of_tokens(self, scores: str) -> str:
        """``scores`` [B, W, C, n] as the layer's output, [T, C * n]: of the word that starts at a token."""
        by_word = self.graph.op("Flatten", [scores], f"{self.name}.by_word", axis=2)
        return self.graph.op(
            "Gather", [by_word, self.graph.input("token_words", DType.INT32, ["T"])], self.name, axis=0
        )

    def rows_at(self, value: str, slots: str, name: str) -> str:
        """Rows of ``value`` at ``slots`` [B, n], flat."""
        flat = self.graph.op("Reshape", [slots, self.graph.constant([-1])], f"{name}.slots")
        return self.graph.op("Gather", [value, flat], name, axis=0)

    def by_sequence(self, rows: str, slots: str) -> str:
        """Flat ``rows`` as [B, n, width], with the sizes of ``slots``."""
        sizes = self.graph.op("Shape", [slots], f"{rows}.sizes")
        shape = self.graph.op("Concat", [sizes, self.graph.constant([-1])], f"{rows}.shape", axis=0)
        return self.graph.op("Reshape", [rows, shape], f"{rows}.by_sequence")

    def read(self, weight: str) -> FloatArray:
        """One of the layer's weights."""
        return self._read_weight(f"{self._layer.name}.{weight}")

    def _recurrent(self, words: str, index: int) -> str:
        """One bidirectional LSTM. The backward one reads the words of each sequence from its own last to its first:
        sequences need no lengths, which not every compiler's LSTM knows."""
        graph, part = self.graph, f"rnn.{index}"
        reversal = graph.input("word_reversal", DType.INT32, ["B", "W"])
        from_end = self.rows_at(words, reversal, f"{self.name}.{part}.from_end")
        backward = self._direction(from_end, f"{part}.back")
        restored = self.rows_at(backward, reversal, f"{self.name}.{part}.restored")
        return graph.op("Concat", [self._direction(words, f"{part}.ahead"), restored], f"{self.name}.{part}", axis=1)

    def _direction(self, words: str, part: str) -> str:
        graph, name, half = self.graph, f"{self.name}.{part}", self._layer.width // 2
        by_time = graph.op("Transpose", [self.by_sequence(words, self.word_slots)], f"{name}.by_time", perm=[1, 0, 2])
        matrices = [
            graph.vector(f"{name}.{kind}.weight", self._gates(f"{part}.{kind}.weight")[None])
            for kind in ("input", "hidden")
        ]
        biases = np.concatenate([self._gates(f"{part}.{kind}.bias") for kind in ("input", "hidden")])
        inputs = [by_time, *matrices, graph.vector(f"{name}.bias", biases[None])]
        states = graph.op("LSTM", inputs, f"{name}.states", hidden_size=half)  # [W, 1, B, half]
        turned = graph.op("Transpose", [states], f"{name}.turned", perm=[2, 0, 1, 3])
        return graph.op("Reshape", [turned, graph.constant([-1, half])], name)

    def _gates(self, weight: str) -> FloatArray:
        parts = np.split(self.read(weight), 4)
        return np.concatenate([parts[gate] for gate in _GATES])
