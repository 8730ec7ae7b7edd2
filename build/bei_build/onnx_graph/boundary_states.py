"""States of boundaries between words, and what labels score them (``BoundaryScoresSpec``).

Rows are flat, [B * N, n] and [B * C, n], wherever a matrix is applied to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from bei_build.onnx_graph.activation import emit_activation
from bei_build.onnx_graph.writer import GraphWriter
from bei_build.spec.dtypes import DType, FloatArray
from bei_build.spec.head_layers import BoundaryScoresSpec

# What a score of attention loses where a boundary is not seen: enough that its share is 0.
_HIDDEN = -1e4


class BoundaryStates:
    """The states of ``layer``, which is called ``name`` in the graph, for token states ``value`` [T, width]; ``read``
    gives weights by their names."""

    def __init__(
        self, graph: GraphWriter, read: Callable[[str], FloatArray], value: str, layer: BoundaryScoresSpec, name: str
    ) -> None:
        self.graph = graph
        self.name = name
        self._read = read
        self._layer = layer
        self._names = Counter[str]()
        self.ids = graph.input("boundary_ids", DType.INT32, ["N"])
        counts = graph.input("boundary_counts", DType.INT32, ["B"])
        self.rows = graph.input("boundary_rows", DType.INT32, ["B"])
        self._right = graph.input("boundary_right", DType.INT32, ["B", "N"])
        counts = graph.op("Unsqueeze", [counts, graph.constant([1])], f"{name}.counts")
        self.last = graph.op("Sub", [counts, graph.constant(1, np.int32)], f"{name}.last")  # [B, 1]: words, too
        self.is_boundary = graph.op("Less", [self.ids, counts], f"{name}.is_boundary")  # [B, N]
        self._is_word = graph.op("Less", [self.ids, self.last], f"{name}.is_word")
        ends = [graph.vector(f"{name}.{part}", self.read(part)[None]) for part in ("bos", "eos")]
        self._tokens = graph.op("Concat", [value, *ends], f"{name}.tokens", axis=0)  # [T + 2, width]
        slots = graph.op("Reshape", [self._label_slots, graph.constant([-1])], f"{name}.label_slots")
        self.labels = graph.op("Gather", [value, slots], f"{name}.labels", axis=0)  # [B * C, width]
        self._states = self._refined(self._joined())

    @property
    def _label_slots(self) -> str:
        return self.graph.input("label_slots", DType.INT32, ["B", "C"])

    @property
    def states(self) -> str:
        """The states of boundaries, flat [B * N, boundary_width]."""
        return self._states

    def read(self, weight: str) -> FloatArray:
        """One of the layer's weights."""
        return self._read(f"{self._layer.name}.{weight}")

    def linear(self, part: str, value: str) -> str:
        """``value`` [rows, n] through the linear layer ``part``."""
        weight, bias = (self.read(f"{part}.{kind}") for kind in ("weight", "bias"))
        return self.graph.linear(f"{self.name}.{part}", value, weight, bias)

    def normed(self, part: str, value: str) -> str:
        """``value`` [..., n] through the norm ``part``."""
        weights = [self.graph.vector(f"{self.name}.{part}.{kind}", self.read(f"{part}.{kind}")) for kind in _NORM]
        inputs = [value, *weights]
        return self.graph.op("LayerNormalization", inputs, f"{self.name}.{part}", axis=-1, epsilon=self._layer.eps)

    def read_at(self, part: str, places: str) -> str:
        """The linear layer ``part`` of the states at ``places`` [rows], flat."""
        return self.graph.op("Gather", [self.linear(part, self._states), places], f"{self.name}.{part}.at", axis=0)

    def logits(self, side: str) -> str:
        """What labels score boundaries as ``side``, [B, N, C]."""
        states = self.by_sequence(self.linear(f"{side}.boundary", self._states), self._right)
        return self._products(side, states)

    def sums_of_words(self, part: str) -> str:
        """Sums over the words in front of each boundary of what ``part`` makes of them, FP32 [B, N, n]."""
        return self._sums(self._of_words(part), f"{self.name}.{part}")

    def sums_inside(self) -> str:
        """Sums over the words in front of each boundary of what labels score them, FP32 [B, N, C]."""
        return self._sums(self._products("inside", self._of_words("inside.word")), f"{self.name}.inside")

    def by_label(self, value: str) -> str:
        """Flat ``value`` [B * C, n] as [B, C, n]."""
        return self.by_sequence(value, self._label_slots)

    def by_sequence(self, value: str, slots: str) -> str:
        """Flat ``value`` as [B, n, width], with the sizes of ``slots``."""
        sizes = self.graph.op("Shape", [slots], self.fresh(f"{value}.sizes"))
        shape = self.graph.op("Concat", [sizes, self.graph.constant([-1])], self.fresh(f"{value}.shape"), axis=0)
        return self.graph.op("Reshape", [value, shape], self.fresh(f"{value}.by_sequence"))

    def turned(self, value: str) -> str:
        """``value`` [B, n, m] as [B, m, n]."""
        return self.graph.op("Transpose", [value], self.fresh(f"{value}.turned"), perm=[0, 2, 1])

    def fresh(self, name: str) -> str:
        """A name for another view of ``name``."""
        self._names[name] += 1
        return f"{name}.view.{self._names[name]}"

    def _products(self, side: str, states: str) -> str:
        """[B, N, C]."""
        labels = self.by_label(self.linear(f"{side}.label", self.labels))
        product = self.graph.op("MatMul", [states, self.turned(labels)], f"{self.name}.{side}.product")
        scale = self.graph.constant(self._layer.boundary_width**-0.5, self.graph.types.compute.numpy)
        return self.graph.op("Mul", [product, scale], f"{self.name}.{side}.logits")

    def _of_words(self, part: str) -> str:
        """The linear layer ``part`` of words, [B, N, n]; what is behind the last one is not to be read."""
        return self._looked_up(part, self._right, "words")

    def _looked_up(self, part: str, slots: str, what: str) -> str:
        return self.graph.op("Gather", [self.linear(part, self._tokens), slots], f"{self.name}.{part}.{what}", axis=0)

    def _sums(self, value: str, name: str) -> str:
        """Sums of ``value`` [B, N, n] over the words in front of each boundary, FP32."""
        graph = self.graph
        value = graph.cast(value, DType.FP32, f"{name}.fp32")
        is_word = graph.op("Unsqueeze", [self._is_word, graph.constant([2])], f"{name}.is_word")
        words = graph.op("Where", [is_word, value, graph.constant(0, np.float32)], f"{name}.of_words")
        return graph.op("CumSum", [words, graph.constant(1)], f"{name}.sums", exclusive=1)

    def _joined(self) -> str:
        """States of boundaries from the words on both sides, [B * N, boundary_width]."""
        graph, width = self.graph, self._layer.boundary_width
        left = graph.input("boundary_left", DType.INT32, ["B", "N"])
        sides = [self._looked_up(part, slots, "sides") for part, slots in (("left", left), ("right", self._right))]
        both = graph.op("Concat", sides, f"{self.name}.sides", axis=2)
        flat = graph.op("Reshape", [both, graph.constant([-1, 2 * width])], f"{self.name}.sides.flat")
        return self.normed("norm", self.linear("joined", flat))

    def _refined(self, value: str) -> str:
        graph, inner = self.graph, self._layer.inner_width
        known = graph.cast(self.is_boundary, graph.types.compute, f"{self.name}.known")
        known = graph.op("Reshape", [known, graph.constant([-1, 1])], f"{self.name}.known.flat")
        hidden = self._hidden() if self._layer.attention_layers else ""
        for index in range(self._layer.attention_layers):
            part = f"attention.{index}"
            added = self._attended(part, value, hidden)
            total = graph.op("Add", [value, added], f"{self.name}.{part}.total")
            value = graph.op("Mul", [total, known], f"{self.name}.{part}")
        for index in range(self._layer.refinement_layers):
            part = f"refinement.{index}"
            up = self.linear(f"{part}.up", self.normed(f"{part}.norm", value))
            held, gate = graph.split(up, [inner, inner], f"{self.name}.{part}.sides", 1)
            gate = emit_activation(graph, gate, "silu", f"{self.name}.{part}.act")
            update = graph.op("Mul", [held, gate], f"{self.name}.{part}.gated")
            value = graph.op("Add", [value, self.linear(f"{part}.down", update)], f"{self.name}.{part}")
        return graph.op("Mul", [value, known], f"{self.name}.states")

    def _attended(self, part: str, value: str, hidden: str) -> str:
        graph, name, width, heads = self.graph, f"{self.name}.{part}", self._layer.boundary_width, self._layer.num_heads
        joined = self.by_sequence(self.linear(f"{part}.input", self.normed(f"{part}.norm", value)), self._right)
        by_head = graph.constant([0, 0, heads, width // heads])
        query, key, values = (
            graph.op("Reshape", [one, by_head], f"{one}.heads")
            for one in graph.split(joined, [width] * 3, f"{name}.parts", 2)
        )
        query, values = (graph.op("Transpose", [one], f"{one}.turned", perm=[0, 2, 1, 3]) for one in (query, values))
        key = graph.op("Transpose", [key], f"{key}.turned", perm=[0, 2, 3, 1])
        scores = graph.op("MatMul", [query, key], f"{name}.scores")
        scale = graph.constant((width // heads) ** -0.5, graph.types.compute.numpy)
        scores = graph.op("Add", [graph.op("Mul", [scores, scale], f"{name}.scaled"), hidden], f"{name}.masked")
        shares = graph.op("Softmax", [scores], f"{name}.shares", axis=-1)
        context = graph.op("MatMul", [shares, values], f"{name}.context")
        context = graph.op("Transpose", [context], f"{name}.context.turned", perm=[0, 2, 1, 3])
        context = graph.op("Reshape", [context, graph.constant([-1, width])], f"{name}.context.flat")
        return self.linear(f"{part}.output", context)

    def _hidden(self) -> str:
        """What is added to scores of attention, [B, 1, N or 1, N]: 0 where a boundary is seen, else a large negative
        number."""
        graph, name = self.graph, f"{self.name}.seen"
        seen = graph.op("Unsqueeze", [self.is_boundary, graph.constant([1, 2])], f"{name}.known")
        if self._layer.window:
            rows, columns = (
                graph.op("Unsqueeze", [self.ids, graph.constant([axis])], f"{name}.ids.{axis}") for axis in (1, 0)
            )
            apart = graph.op("Abs", [graph.op("Sub", [rows, columns], f"{name}.difference")], f"{name}.apart")
            is_near = graph.op("LessOrEqual", [apart, graph.constant(self._layer.window, np.int32)], f"{name}.near")
            seen = graph.op("And", [seen, is_near], f"{name}.both")
        added = [graph.constant(number, np.float32) for number in (0.0, _HIDDEN)]
        return graph.cast(graph.op("Where", [seen, *added], f"{name}.added"), graph.types.compute, f"{name}.cast")


_NORM = ("weight", "bias")
