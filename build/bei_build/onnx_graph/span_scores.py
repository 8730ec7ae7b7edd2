"""Scores of spans of words for labels (``SpanScoresSpec``), as a layer of a head.

The first matrix of the MLP over spans is applied to starts and ends by themselves, and its second one to the labels:
of a span of a label there remain a sum, a ReLU and a product of 4 * width numbers, a fiftieth of the MLP's work with
a dozen widths and labels. Spans of one width are computed at a time, so that a step never holds those of all.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bei_build.onnx_graph.counted_labels import emit_counted_labels, with_counts
from bei_build.onnx_graph.word_rows import WordRows
from bei_build.onnx_graph.writer import GraphWriter
from bei_build.spec.dtypes import DType, FloatArray
from bei_build.spec.head_layers import SpanScoresSpec


def emit_span_scores(
    graph: GraphWriter, read: Callable[[str], FloatArray], value: str, layer: SpanScoresSpec, name: str
) -> str:
    """From token states ``value`` [T, width] to scores [T, C * max_width], in the graph's type: of the word that starts
    at a token, by labels, then by widths. Rows of tokens that start no word are not to be read."""
    rows, most = WordRows(graph, read, layer, name), layer.max_width
    words = rows.words(value)
    starts = rows.by_sequence(_projected(rows, words, layer, "start"), rows.word_slots)
    # Spans over the last word's end have the score of the one that ends there, whatever else is in the step.
    places = graph.input("word_ends", DType.INT32, ["B", "W"])
    ends = graph.op("Gather", [_projected(rows, words, layer, "end"), places], f"{name}.ends", axis=0)
    ends = graph.op("Pad", [ends, graph.constant([0, 0, 0, 0, most - 1, 0])], f"{name}.padded", mode="edge")
    factors, offsets = _labels(rows, value, layer)
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
    return rows.of_tokens(with_counts(rows, value, complete, layer) if layer.counting else complete)


def _projected(rows: WordRows, words: str, layer: SpanScoresSpec, part: str) -> str:
    """Starts or ends, 4 * width numbers a word: through their MLP and their half of the first matrix over spans."""
    name, width = f"{rows.name}.{part}", layer.width
    value = rows.graph.op("Relu", [_mlp(rows, words, part)], f"{name}.act")
    matrix = rows.read("out.0.weight")
    half, bias = (matrix[:, :width], rows.read("out.0.bias")) if part == "start" else (matrix[:, width:], None)
    return rows.graph.linear(f"{name}.out", value, half, bias)


def _labels(rows: WordRows, value: str, layer: SpanScoresSpec) -> tuple[str, str]:
    """The factors of a span's numbers, [B, 4 * width, C], and what is added to their sum, [B, 1, C, 1]."""
    graph, name = rows.graph, f"{rows.name}.label"
    labels = emit_counted_labels(rows, value, layer) if layer.counting else _mlp(rows, rows.labels(value), "label")
    factors = graph.linear(f"{name}.factors", labels, rows.read("out.1.weight").T)
    offsets = graph.linear(f"{name}.offsets", labels, rows.read("out.1.bias")[None])
    if layer.counting:
        slots = graph.input("column_slots", DType.INT32, ["B", "C"])
        factors, offsets = (rows.rows_at(side, slots, f"{side}.by_column") for side in (factors, offsets))
    else:
        slots = rows.label_slots
    by_sequence = rows.by_sequence(factors, slots)
    turned = graph.op("Transpose", [by_sequence], f"{name}.turned", perm=[0, 2, 1])
    offsets = rows.by_sequence(offsets, slots)
    return turned, graph.op("Unsqueeze", [offsets, graph.constant([1])], f"{name}.added")


def _mlp(rows: WordRows, value: str, part: str) -> str:
    graph, name = rows.graph, f"{rows.name}.{part}"
    inner = graph.linear(f"{name}.0", value, rows.read(f"{part}.0.weight"), rows.read(f"{part}.0.bias"))
    inner = graph.op("Relu", [inner], f"{name}.0.act")
    return graph.linear(f"{name}.1", inner, rows.read(f"{part}.1.weight"), rows.read(f"{part}.1.bias"))
