"""Scores of spans of words for labels (``SpanScoresSpec``), as a layer of a head.

The first matrix of the MLP over spans is applied to starts and ends by themselves, and its second one to the labels:
of a span of a label there remain a sum, a ReLU and a product of 4 * width numbers, a fiftieth of the MLP's work with
a dozen widths and labels. Spans of one width are computed at a time, so that a step never holds those of all. Where the
MLP is one linear layer, a span's score is the sum of its two ends' scores.
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
    factors, offsets = _labels(rows, value, layer)
    if layer.linear:
        starts, ends = (
            graph.op("MatMul", [side, factor], f"{side}.product")
            for side, factor in zip((starts, ends), factors, strict=True)
        )
    ends = graph.op("Pad", [ends, graph.constant([0, 0, 0, 0, most - 1, 0])], f"{name}.padded", mode="edge")
    scores = []
    for width in range(most):
        part = f"{name}.{width}"
        last = np.iinfo(np.int64).max if width == most - 1 else width + 1 - most
        bounds = [graph.constant([bound]) for bound in (width, last, 1)]
        shifted = graph.op("Slice", [ends, *bounds], f"{part}.ends")
        found = graph.op("Add", [starts, shifted], f"{part}.sum")
        if not layer.linear:
            hidden = graph.op("Relu", [found], f"{part}.act")
            found = graph.op("MatMul", [hidden, *factors], f"{part}.product")
        scores.append(graph.op("Unsqueeze", [found, graph.constant([3])], f"{part}.column"))
    joined = graph.op("Concat", scores, f"{name}.joined", axis=3)
    complete = graph.op("Add", [joined, offsets], f"{name}.complete")
    return rows.of_tokens(with_counts(rows, value, complete, layer) if layer.counting else complete)


def _projected(rows: WordRows, words: str, layer: SpanScoresSpec, part: str) -> str:
    """Starts or ends, 4 * width numbers a word: through their MLP and their half of the first matrix over spans. With
    ``linear`` width numbers, through the MLP alone."""
    name, width = f"{rows.name}.{part}", layer.width
    value = rows.graph.op("Relu", [_mlp(rows, words, part)], f"{name}.act")
    if layer.linear:
        return value
    matrix = rows.read("out.0.weight")
    half, bias = (matrix[:, :width], rows.read("out.0.bias")) if part == "start" else (matrix[:, width:], None)
    return rows.graph.linear(f"{name}.out", value, half, bias)


def _labels(rows: WordRows, value: str, layer: SpanScoresSpec) -> tuple[list[str], str]:
    """The factors of a span's numbers, [B, 4 * width, C], and what is added to their sum, [B, 1, C, 1]. With ``linear``
    factors of starts and of ends, [B, width, C] each."""
    graph, name = rows.graph, f"{rows.name}.label"
    labels = emit_counted_labels(rows, value, layer) if layer.counting else _mlp(rows, rows.labels(value), "label")
    out = "out" if layer.linear else "out.1"
    matrix = rows.read(f"{out}.weight")
    of_spans = {"factors": matrix}
    if layer.linear:
        of_spans = {"start_factors": matrix[:, : layer.width], "end_factors": matrix[:, layer.width :]}
    sides = [graph.linear(f"{name}.{part}", labels, factor.T) for part, factor in of_spans.items()]
    sides.append(graph.linear(f"{name}.offsets", labels, rows.read(f"{out}.bias")[None]))
    if layer.counting:
        slots = graph.input("column_slots", DType.INT32, ["B", "C"])
        sides = [rows.rows_at(side, slots, f"{side}.by_column") for side in sides]
    else:
        slots = rows.label_slots
    *factors, offsets = [rows.by_sequence(side, slots) for side in sides]
    turned = [graph.op("Transpose", [factor], f"{factor}.turned", perm=[0, 2, 1]) for factor in factors]
    return turned, graph.op("Unsqueeze", [offsets, graph.constant([1])], f"{name}.added")


def _mlp(rows: WordRows, value: str, part: str) -> str:
    graph, name = rows.graph, f"{rows.name}.{part}"
    inner = graph.linear(f"{name}.0", value, rows.read(f"{part}.0.weight"), rows.read(f"{part}.0.bias"))
    inner = graph.op("Relu", [inner], f"{name}.0.act")
    return graph.linear(f"{name}.1", inner, rows.read(f"{part}.1.weight"), rows.read(f"{part}.1.bias"))
