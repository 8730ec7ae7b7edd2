"""Scores of pairs of boundaries for labels (``BoundaryScoresSpec``), as a layer of a head.

Matrices that read words are applied to all tokens, before words are looked up. The first matrix of the small MLP reads
a pair's row times numbers of a label: these are a part of the matrix, of which each label has its own, and hidden
numbers of pairs are computed a quarter at a time, so that a step never holds all of them.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from bei.core import EXTRAS
from bei.engine.boundaries import DIGIT, NOWHERE, boundary_columns
from bei_build.onnx_graph.activation import emit_activation
from bei_build.onnx_graph.boundary_states import BoundaryStates
from bei_build.spec.dtypes import DType
from bei_build.spec.head_layers import BoundaryScoresSpec

_PARTS = 4
_LOWEST = -3e4  # of a boundary that no sequence has


def emit_boundary_scores(states: BoundaryStates, layer: BoundaryScoresSpec) -> str:
    """From token states, of which ``states`` are, to rows [T, (C + 1) * columns], in the graph's type."""
    return _Pairs(states, layer).emit()


class _Pairs:
    """Pairs of boundaries of each text, [B, M], and their scores for labels, [B, M, C]. The R starts and R ends that
    labels score highest make the first R * R; the N behind them are each single word, of which choices are some."""

    def __init__(self, states: BoundaryStates, layer: BoundaryScoresSpec) -> None:
        self._states = states
        self._graph = states.graph
        self._layer = layer
        self._name = states.name
        self._of_start, self._of_end = states.logits("start"), states.logits("end")  # [B, N, C]
        self._starts, self._ends = self._chosen(self._of_start, "start"), self._chosen(self._of_end, "end")
        firsts, lasts = self._numbers()
        self._start_rows, self._end_rows = self._places(firsts, "pair.starts"), self._places(lasts, "pair.ends")
        self._length = self._lengths(firsts, lasts)

    def emit(self) -> str:
        """The layer's output."""
        graph, name = self._graph, self._name
        compat = self._compat()
        scores = self._scores(self._rows(compat))
        of_start, of_end = self._at(self._of_start, self._start_rows), self._at(self._of_end, self._end_rows)
        for added in (of_start, of_end, self._inside()):
            scores = graph.op("Add", [scores, self._by_text(added)], f"{added}.total")
        sizes = graph.op("Shape", [self._starts], f"{name}.sizes")  # B, R
        side = graph.op("Slice", [sizes, graph.constant([1]), graph.constant([2])], f"{name}.side")
        count = graph.op("Mul", [side, side], f"{name}.count")
        pairs = graph.op("Concat", [self._by_text(compat), scores], f"{name}.pairs", axis=2)
        pairs = graph.op("Slice", [pairs, graph.constant([0]), count, graph.constant([1])], f"{name}.of_chosen")
        shape = graph.op("Concat", [sizes, side, graph.constant([-1])], f"{name}.square.shape", axis=0)
        square = graph.op("Reshape", [pairs, shape], f"{name}.square")  # [B, R, R, C + 1]
        square = graph.op("Transpose", [square], f"{name}.blocks", perm=[0, 1, 3, 2])
        last = graph.constant([np.iinfo(np.int64).max])
        words = graph.op("Slice", [scores, count, last, graph.constant([1])], f"{name}.of_words")
        return self._output(square, words)

    def _output(self, blocks: str, words: str) -> str:
        """Rows of tokens, of ``blocks`` [B, R, C + 1, R] and the scores of single ``words`` [B, N, C]."""
        graph, name = self._graph, self._name
        columns = graph.input(boundary_columns(self._layer.most), DType.INT32, [self._layer.most])
        blocks = graph.op("Gather", [blocks, columns], f"{name}.whole", axis=3)
        numbers, last = graph.split(self._digits(), [EXTRAS - 1, 1], f"{name}.numbers", 2)  # of [B, R, EXTRAS]
        beside = graph.op("Concat", [self._unsqueezed(numbers, 2), self._extras()], f"{name}.beside", axis=2)
        every = graph.op("Concat", [blocks, beside], f"{name}.every", axis=3)
        rows, last, words = (self._of_tokens(*one) for one in ((every, "tokens"), (last, "tokens"), (words, "words")))
        rows = graph.op("Reshape", [rows, graph.constant([0, -1, self._layer.columns - 1])], f"{name}.rows")
        column = graph.op("Concat", [last, words], f"{name}.column", axis=1)  # [T, C + 1]
        whole = graph.op("Concat", [rows, self._unsqueezed(column, 2)], f"{name}.columns", axis=2)
        return graph.op("Flatten", [whole], name, axis=1)

    def _of_tokens(self, value: str, of: str) -> str:
        """``value`` [B, n, ...] of rows, or with ``of`` of words, as [T, ...]."""
        tokens = self._graph.input(f"boundary_{of}", DType.INT32, ["T"])
        return self._graph.op("Gather", [self._flat(value), tokens], f"{value}.of_tokens", axis=0)

    def _chosen(self, logits: str, side: str) -> str:
        """The numbers of up to ``most`` boundaries, ascending, INT32 [B, R]; NOWHERE behind the last one. A start
        behind all words and an end in front of them take a place, as in the library, and are no part of a span."""
        graph, name, most = self._graph, f"{self._name}.{side}.chosen", self._layer.most
        union = graph.op("ReduceMax", [logits, graph.constant([2])], f"{name}.union", keepdims=0)
        union = graph.cast(union, DType.FP32, f"{name}.union.fp32")
        lowest = graph.constant(_LOWEST, np.float32)
        known = graph.op("Where", [self._states.is_boundary, union, lowest], f"{name}.known")
        padded = graph.op("Pad", [known, graph.constant([0, 0, 0, most]), lowest], f"{name}.padded")
        places = graph.cast(graph.top_k(padded, most, f"{name}.best"), DType.INT32, f"{name}.places")
        last = self._states.last
        if side == "start":
            useless = graph.op("GreaterOrEqual", [places, last], f"{name}.useless")
        else:
            behind = graph.op("Greater", [places, last], f"{name}.behind")
            first = graph.op("Equal", [places, graph.constant(0, np.int32)], f"{name}.first")
            useless = graph.op("Or", [behind, first], f"{name}.useless")
        kept = graph.op("Where", [useless, graph.constant(NOWHERE, np.int32), places], f"{name}.kept")
        descending = graph.op("Neg", [kept], f"{name}.negative")
        graph.top_k(descending, most, f"{name}.order")
        ascending = graph.op("Neg", [f"{name}.order.values"], f"{name}.ascending")
        size = graph.op("Shape", [graph.input("boundary_ids", DType.INT32, ["N"])], f"{name}.size")
        return graph.op("Slice", [ascending, graph.constant([0]), size, graph.constant([1])], name)

    def _numbers(self) -> tuple[str, str]:
        """The numbers of the starts and ends of all pairs, INT32 [B, M], none behind the last boundary."""
        graph, name, last = self._graph, f"{self._name}.numbers", self._states.last
        chosen = [self._unsqueezed(self._starts, 2), self._unsqueezed(self._ends, 1)]
        shape = graph.op("Shape", [graph.op("Add", chosen, f"{name}.every")], f"{name}.shape")
        found = []
        for side, one, more in zip(("start", "end"), chosen, (0, 1), strict=True):
            of_chosen = graph.op(
                "Flatten", [graph.op("Expand", [one, shape], f"{name}.{side}.every")], f"{name}.{side}"
            )
            moved = graph.op("Add", [self._states.ids, graph.constant(more, np.int32)], f"{name}.{side}.moved")
            of_words = graph.op("Min", [moved, last], f"{name}.{side}.of_words")
            found.append(graph.op("Concat", [of_chosen, of_words], f"{name}.{side}.all", axis=1))
        return found[0], found[1]

    def _places(self, numbers: str, name: str) -> str:
        """The places of the boundaries ``numbers`` [B, n] in a flat [B * N], flat."""
        graph, name = self._graph, f"{self._name}.{name}"
        known = graph.op("Min", [numbers, self._states.last], f"{name}.known")
        placed = graph.op("Add", [known, self._unsqueezed(self._states.rows, 1)], f"{name}.of_all")
        return graph.op("Reshape", [placed, graph.constant([-1])], name)

    def _lengths(self, firsts: str, lasts: str) -> str:
        """Words of each pair, at least 1, FP32 [B, M]."""
        graph, name = self._graph, f"{self._name}.length"
        between = graph.cast(graph.op("Sub", [lasts, firsts], f"{name}.between"), DType.FP32, f"{name}.fp32")
        # Of no span any number does that is not too large for 16 bits.
        return graph.op("Clip", [between, *(graph.constant(bound, np.float32) for bound in (1, DIGIT**2))], name)

    def _at(self, value: str, places: str) -> str:
        """``value`` [B, N, n] at the ``places`` of pairs, flat."""
        return self._graph.op("Gather", [self._flat(value), places], self._states.fresh(f"{value}.at"), axis=0)

    def _compat(self) -> str:
        """[B * M, 1]."""
        graph, name = self._graph, f"{self._name}.compat"
        sides = (("start", self._start_rows), ("end", self._end_rows))
        both = [self._states.read_at(f"pool.{side}", places) for side, places in sides]
        product = graph.op("Mul", both, f"{name}.products")
        total = graph.op("ReduceSum", [product, graph.constant([1])], f"{name}.total", keepdims=1)
        return graph.op(
            "Mul", [total, graph.constant(self._layer.boundary_width**-0.5, graph.types.compute.numpy)], name
        )

    def _rows(self, compat: str) -> str:
        """A row for each pair, [B * M, pair_width]."""
        graph, name, compute = self._graph, f"{self._name}.pair", self._graph.types.compute
        longer = graph.op("Add", [self._length, graph.constant(1, np.float32)], f"{name}.longer")
        words = graph.cast(self._states.last, DType.FP32, f"{name}.words")
        root = graph.op("Sqrt", [self._length], f"{name}.root")
        features = [
            graph.op("Log", [longer], f"{name}.log"),
            graph.op("Div", [self._length, words], f"{name}.share"),
            graph.op("Reciprocal", [root], f"{name}.inverse"),
        ]
        columns = [self._column(graph.cast(one, compute, f"{one}.cast")) for one in features]
        joined = graph.op("Concat", [*columns, compat], f"{name}.features", axis=1)
        read = self._states.read
        weight = np.concatenate([read("pair.length.weight"), read("pair.prior.weight")], axis=1)
        parts = [
            graph.linear(f"{name}.of_features", joined, weight, read("pair.length.bias") + read("pair.prior.bias"))
        ]
        sides = (("start", self._start_rows), ("end", self._end_rows))
        parts += [self._states.read_at(f"pair.{side}", places) for side, places in sides]
        if self._layer.content_width:
            parts.append(self._content())
        return self._states.normed("pair.norm", reduce(self._sum, parts))

    def _content(self) -> str:
        """What pairs read of the words between, [B * M, pair_width]."""
        graph, name = self._graph, f"{self._name}.content"
        mean = self._between(self._states.sums_of_words("content.value"), self._length, name)
        normed = self._states.normed("content.norm", graph.cast(mean, graph.types.compute, f"{name}.cast"))
        return self._states.linear("content.out", normed)

    def _inside(self) -> str:
        """What the words between score, [B * M, C]: the sum of their logits, divided by the root of the length."""
        graph, name = self._graph, f"{self._name}.inside"
        root = graph.op("Sqrt", [self._length], f"{name}.root")
        return graph.cast(self._between(self._states.sums_inside(), root, name), graph.types.compute, name)

    def _between(self, sums: str, divisor: str, name: str) -> str:
        """The differences of FP32 ``sums`` [B, N, n] at the ends and starts of pairs, divided, [B * M, n]."""
        ends, starts = self._at(sums, self._end_rows), self._at(sums, self._start_rows)
        between = self._graph.op("Sub", [ends, starts], f"{name}.between")
        return self._graph.op("Div", [between, self._column(divisor)], f"{name}.divided")

    def _scores(self, rows: str) -> str:
        """Of pairs' ``rows`` for labels, without what starts, ends and words score: [B, M, C]."""
        graph, name, pair = self._graph, f"{self._name}.score", self._layer.pair_width
        batch = graph.op("Shape", [self._starts], f"{name}.batch", end=1)
        by_text = graph.op("Concat", [batch, graph.constant([-1, pair])], f"{name}.by_text.shape", axis=0)
        pairs = graph.op("Reshape", [rows, by_text], f"{name}.by_text")  # [B, M, pair]
        queries = self._states.linear("pair.label", self._states.labels)  # [B * C, pair]
        by_label = graph.op("Reshape", [queries, by_text], f"{name}.queries")
        product = graph.op("MatMul", [pairs, self._states.turned(by_label)], f"{name}.product")
        total = graph.op("Mul", [product, graph.constant(pair**-0.5, graph.types.compute.numpy)], f"{name}.scaled")
        gamma, beta = graph.split(self._states.linear("pair.film", queries), [pair, pair], f"{name}.film", 1)
        factors = graph.op("Add", [gamma, graph.constant(1, graph.types.compute.numpy)], f"{name}.factors")
        for index in range(_PARTS):
            total = graph.op("Add", [total, self._film(index, pairs, factors, beta, by_text)], f"{name}.{index}.total")
        return total

    def _film(self, index: int, pairs: str, factors: str, beta: str, by_text: str) -> str:
        """What part ``index`` of the MLP's hidden numbers adds to the scores, [B, M, C]. ``factors``, ``beta``
        [B * C, pair_width]: what rows are multiplied with for a label, and what is added."""
        graph, name, read = self._graph, f"{self._name}.film.{index}", self._states.read
        width = self._layer.film_width // _PARTS
        kept = slice(index * width, (index + 1) * width)
        matrix = read("pair.out.0.weight")[kept]
        own = graph.op(
            "Mul", [self._unsqueezed(factors, 1), graph.vector(f"{name}.matrix", matrix)], f"{name}.of_labels"
        )
        own = graph.op("Reshape", [own, by_text], f"{name}.by_text")  # [B, C * width, pair]
        hidden = graph.op("MatMul", [pairs, self._states.turned(own)], f"{name}.product")
        added = graph.linear(f"{name}.added", beta, matrix, read("pair.out.0.bias")[kept])
        batch = graph.op("Shape", [self._starts], f"{name}.batch", end=1)
        shape = graph.op("Concat", [batch, graph.constant([1, -1])], f"{name}.added.shape", axis=0)
        added = graph.op("Reshape", [added, shape], f"{name}.added.by_text")
        hidden = emit_activation(graph, graph.op("Add", [hidden, added], f"{name}.sum"), "gelu", f"{name}.act")
        flat = graph.op("Reshape", [hidden, graph.constant([-1, width])], f"{name}.flat")
        bias = None if index else read("pair.out.1.bias")
        out = graph.linear(f"{name}.out", flat, read("pair.out.1.weight")[:, kept], bias)
        shape = graph.op("Shape", [pairs], f"{name}.shape", end=2)
        shape = graph.op("Concat", [shape, graph.constant([-1])], f"{name}.shape.labels", axis=0)
        return graph.op("Reshape", [out, shape], name)

    def _digits(self) -> str:
        """The numbers of starts and ends, in two digits each, [B, R, EXTRAS]."""
        graph, name = self._graph, f"{self._name}.digits"
        base, columns = graph.constant(DIGIT, np.int32), []
        for side in (self._starts, self._ends):
            high = graph.op("Div", [side, base], f"{side}.high")
            low = graph.op("Sub", [side, graph.op("Mul", [high, base], f"{side}.round")], f"{side}.low")
            columns += [graph.cast(one, graph.types.compute, f"{one}.cast") for one in (high, low)]
        return graph.op("Concat", [self._unsqueezed(one, 2) for one in columns], name, axis=2)

    def _extras(self) -> str:
        """What labels score beside pairs and words, [B, R, C, EXTRAS - 1]."""
        graph, name = self._graph, f"{self._name}.extras"
        sides = ((self._of_start, self._starts, "starts"), (self._of_end, self._ends, "ends"))
        columns = [self._states.by_sequence(self._at(one, self._places(at, side)), at) for one, at, side in sides]
        absent = self._states.by_label(self._states.linear("absent", self._states.labels))  # [B, C, 1]
        sizes = graph.op("Shape", [columns[0]], f"{name}.sizes")
        columns.append(graph.op("Expand", [self._states.turned(absent), sizes], f"{name}.absent"))
        return graph.op("Concat", [self._unsqueezed(one, 3) for one in columns], name, axis=3)

    def _by_text(self, value: str) -> str:
        """Flat ``value`` [B * M, n] as [B, M, n]."""
        graph, fresh = self._graph, self._states.fresh
        sizes = graph.op("Shape", [self._length], fresh(f"{value}.sizes"))
        shape = graph.op("Concat", [sizes, graph.constant([-1])], fresh(f"{value}.shape"), axis=0)
        return graph.op("Reshape", [value, shape], fresh(f"{value}.by_text"))

    def _flat(self, value: str) -> str:
        """``value`` [B, n, ...] as [B * n, ...], with one axis behind."""
        return self._graph.op("Flatten", [value], self._states.fresh(f"{value}.flat"), axis=2)

    def _column(self, value: str) -> str:
        """``value`` [B, M] as [B * M, 1]."""
        return self._graph.op("Reshape", [value, self._graph.constant([-1, 1])], self._states.fresh(f"{value}.column"))

    def _sum(self, left: str, right: str) -> str:
        return self._graph.op("Add", [left, right], f"{right}.sum")

    def _unsqueezed(self, value: str, axis: int) -> str:
        return self._graph.op("Unsqueeze", [value, self._graph.constant([axis])], self._states.fresh(value))
