"""Scores of pairs of entities for labels (``RelationScoresSpec``), as a layer of a head.

As of spans (``onnx_graph.span_scores``), the first matrix of the MLP over pairs is applied to heads and tails by
themselves, and its second one to the labels. The hidden numbers of pairs are computed an eighth at a time, so that a
step never holds all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np

from bei.engine.entity_pairs import entity_columns
from bei_build.onnx_graph.word_rows import WordRows
from bei_build.onnx_graph.writer import GraphWriter
from bei_build.spec.dtypes import DType, FloatArray
from bei_build.spec.head_layers import RelationScoresSpec

_PARTS = 8


def emit_relation_scores(
    graph: GraphWriter, read: Callable[[str], FloatArray], value: str, layer: RelationScoresSpec, name: str
) -> str:
    """From token states ``value`` [T, state_width] to scores [T, C * max_entities], in the graph's type: of the entity
    whose scores stand in a token's row as the head, by labels, then by tails."""
    rows = WordRows(graph, read, layer, name)
    states = rows.with_zeros(value)
    if layer.is_projected:
        states = _linear(rows, states, "projection")
    words = rows.recurrent(rows.rows_at(states, rows.word_slots, f"{name}.words"))
    entities = _entities(rows, words)
    factors, offsets = _labels(rows, states, layer)
    scores = [_part(rows, index, entities, factors[index], layer) for index in range(_PARTS)]
    total = reduce(lambda left, right: graph.op("Add", [left, right], f"{right}.total"), [*scores, offsets])
    sizes = graph.op("Shape", [_slots(rows, "starts")], f"{name}.sizes")
    count = graph.op("Slice", [sizes, graph.constant([1]), graph.constant([2])], f"{name}.count")
    shape = graph.op("Concat", [sizes, count, graph.constant([-1])], f"{name}.shape", axis=0)
    by_pair = graph.op("Reshape", [total, shape], f"{name}.by_pair")  # [B, E, E, C]
    by_label = graph.op("Transpose", [by_pair], f"{name}.by_label", perm=[0, 1, 3, 2])
    columns = graph.input(entity_columns(layer.max_entities), DType.INT32, [layer.max_entities])
    whole = graph.op("Gather", [by_label, columns], f"{name}.whole", axis=3)
    by_entity = graph.op("Flatten", [whole], f"{name}.by_entity", axis=2)
    return graph.op("Gather", [by_entity, graph.input("token_entities", DType.INT32, ["T"])], name, axis=0)


def _slots(rows: WordRows, side: str) -> str:
    return rows.graph.input(f"entity_{side}", DType.INT32, ["B", "E"])


def _entities(rows: WordRows, words: str) -> str:
    """Rows [B * E, width] of the entities of flat ``words``."""
    graph, name = rows.graph, f"{rows.name}.entity"
    ends = [
        _mlp(rows, rows.rows_at(words, _slots(rows, f"{part}s"), f"{name}.{part}"), part) for part in ("start", "end")
    ]
    joined = graph.op("Concat", ends, f"{name}.ends", axis=1)
    return _mlp(rows, graph.op("Relu", [joined], f"{name}.ends.act"), "out")


def _labels(rows: WordRows, states: str, layer: RelationScoresSpec) -> tuple[list[str], str]:
    """The factors of each part of a pair's hidden numbers, [B, width / 2, C], and what is added to their sum,
    [B, 1, C]. ``states``: of tokens, with one row more."""
    graph, name = rows.graph, f"{rows.name}.label"
    slots = rows.label_slots
    labels = rows.rows_at(states, slots, f"{name}.tokens")
    if layer.averages_labels:
        following = graph.op("Add", [slots, graph.constant(1, np.int32)], f"{name}.following")
        total = graph.op("Add", [labels, rows.rows_at(states, following, f"{name}.second")], f"{name}.sum")
        labels = graph.op("Mul", [total, graph.vector(f"{name}.half", np.array(0.5, np.float32))], f"{name}.mean")
    labels = _mlp(rows, labels, "label")
    matrix, bias = rows.read("pair.1.weight"), rows.read("pair.1.bias")
    width = matrix.shape[1] // _PARTS
    sides = [
        graph.linear(f"{name}.{index}.factors", labels, matrix[:, index * width : (index + 1) * width].T)
        for index in range(_PARTS)
    ]
    sides.append(graph.linear(f"{name}.offsets", labels, bias[None]))
    *factors, offsets = [
        graph.op("Transpose", [rows.by_sequence(side, slots)], f"{side}.turned", perm=[0, 2, 1]) for side in sides
    ]
    return factors, offsets


def _part(rows: WordRows, index: int, entities: str, factors: str, layer: RelationScoresSpec) -> str:
    """What part ``index`` of the hidden numbers of pairs adds to their scores, [B, E * E, C]."""
    graph, name, width = rows.graph, f"{rows.name}.pair.{index}", layer.width
    matrix, bias = rows.read("pair.0.weight"), rows.read("pair.0.bias")
    kept = slice(index * matrix.shape[0] // _PARTS, (index + 1) * matrix.shape[0] // _PARTS)
    sides = []
    for side, half, added, axis in (
        ("head", matrix[kept, :width], bias[kept], 2),
        ("tail", matrix[kept, width:], None, 1),
    ):
        found = rows.by_sequence(graph.linear(f"{name}.{side}", entities, half, added), _slots(rows, "starts"))
        sides.append(graph.op("Unsqueeze", [found, graph.constant([axis])], f"{name}.{side}.pairs"))
    hidden = graph.op("Relu", [graph.op("Add", sides, f"{name}.sum")], f"{name}.act")
    flat = graph.constant([0, -1, kept.stop - kept.start])
    return graph.op("MatMul", [graph.op("Reshape", [hidden, flat], f"{name}.flat"), factors], f"{name}.product")


def _mlp(rows: WordRows, value: str, part: str) -> str:
    inner = _linear(rows, value, f"{part}.0")
    return _linear(rows, rows.graph.op("Relu", [inner], f"{rows.name}.{part}.0.act"), f"{part}.1")


def _linear(rows: WordRows, value: str, part: str) -> str:
    return rows.graph.linear(f"{rows.name}.{part}", value, rows.read(f"{part}.weight"), rows.read(f"{part}.bias"))
