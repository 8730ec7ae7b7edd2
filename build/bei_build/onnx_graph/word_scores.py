"""Scores of words of spans for labels (``WordScoresSpec``), as a layer of a head.

Of the MLP's first matrix two thirds are applied to words and labels by themselves, together with their projections. The
last third reads products of every word with every label; its rows are computed a quarter at a time, so that a step
never holds all hidden numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from bei_build.onnx_graph.word_rows import WordRows
from bei_build.onnx_graph.writer import GraphWriter
from bei_build.spec.dtypes import FloatArray
from bei_build.spec.head_layers import WordScoresSpec

_PARTS = 4


def emit_word_scores(
    graph: GraphWriter, read: Callable[[str], FloatArray], value: str, layer: WordScoresSpec, name: str
) -> str:
    """From token states ``value`` [T, width] to scores [T, C * 3], in the graph's type: of the word that starts at a
    token, by labels, then as first, last and inner word. Rows of tokens that start no word are not to be read."""
    rows, width = WordRows(graph, read, layer, name), layer.width
    sides = {"word": (rows.words(value), rows.word_slots, 2), "label": (rows.labels(value), rows.label_slots, 1)}
    factors = [_by_pair(rows, part, _factor(rows, side[0], part, width), side) for part, side in sides.items()]
    products = graph.op("Mul", factors, f"{name}.products")
    shape = graph.op("Shape", [products], f"{name}.shape")  # of each quarter of the hidden numbers too
    flat = graph.constant([-1, width])
    pairs = graph.op("Reshape", [products, flat], f"{name}.pairs")
    scores = []
    for index in range(_PARTS):
        hidden = graph.op("Reshape", [_of_products(rows, index, pairs, width), shape], f"{name}.{index}.by_pair")
        for side in sides:
            term = _by_pair(rows, f"{index}.{side}", _of_side(rows, index, side, sides[side][0], width), sides[side])
            hidden = graph.op("Add", [hidden, term], f"{name}.{index}.{side}.sum")
        hidden = graph.op("Relu", [graph.op("Reshape", [hidden, flat], f"{name}.{index}.flat")], f"{name}.{index}.act")
        bias = None if index else rows.read("out.1.bias")
        second = rows.read("out.1.weight")[:, index * width : (index + 1) * width]
        scores.append(graph.linear(f"{name}.{index}.out", hidden, second, bias))
    total = reduce(lambda left, right: graph.op("Add", [left, right], f"{right}.total"), scores)
    counts = graph.op("Slice", [shape, *(graph.constant([bound]) for bound in (0, 3))], f"{name}.counts")
    by_pair = graph.op("Concat", [counts, graph.constant([-1])], f"{name}.scores.shape", axis=0)
    return rows.of_tokens(graph.op("Reshape", [total, by_pair], f"{name}.scores"))


def _of_products(rows: WordRows, index: int, pairs: str, width: int) -> str:
    """What quarter ``index`` of the hidden numbers has from the products."""
    matrix = rows.read("out.0.weight")[index * width : (index + 1) * width, 2 * width :]
    return rows.graph.linear(f"{rows.name}.{index}", pairs, matrix)


def _of_side(rows: WordRows, index: int, side: str, value: str, width: int) -> str:
    """What it has from the words, with the bias, or from the labels: their projection is part of the matrix."""
    place, kept = ("word", "label").index(side), slice(index * width, (index + 1) * width)
    matrix = rows.read("out.0.weight")[kept, place * width : (place + 1) * width]
    bias = matrix @ rows.read(f"{side}.bias")[:width]
    if side == "word":
        bias = bias + rows.read("out.0.bias")[kept]
    return rows.graph.linear(f"{rows.name}.{index}.{side}", value, matrix @ rows.read(f"{side}.weight")[:width], bias)


def _factor(rows: WordRows, value: str, part: str, width: int) -> str:
    weight, bias = (rows.read(f"{part}.{kind}")[width:] for kind in ("weight", "bias"))
    return rows.graph.linear(f"{rows.name}.{part}.factor", value, weight, bias)


def _by_pair(rows: WordRows, part: str, value: str, side: tuple[str, str, int]) -> str:
    """Flat rows of words as [B, W, 1, n], of labels as [B, 1, C, n]."""
    _, slots, axis = side
    by_sequence = rows.by_sequence(value, slots)
    return rows.graph.op("Unsqueeze", [by_sequence, rows.graph.constant([axis])], f"{rows.name}.{part}.pairs")
