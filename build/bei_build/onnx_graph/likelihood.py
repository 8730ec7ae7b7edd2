"""Likelihoods of tokens behind those in front of them (``LikelihoodSpec``), as a layer of a head.

Only the scored tokens of a step meet the vocabulary's matrix, a part of it at a time: a step never holds the scores of
all of the vocabulary. The parts' softmax is put together from each one's largest score and sum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import numpy as np

from bei_build.onnx_graph.writer import GraphWriter
from bei_build.spec.dtypes import DType, FloatArray
from bei_build.spec.head_layers import LikelihoodSpec

_ROWS = 8192  # of the matrix at a time: 32 kB for each token


class _Part(NamedTuple):
    """Of each scored token, FP32 [K, 1]: the ``largest`` score of the part, the ``sum`` of the exponentials of its
    scores less that, and the token's ``own`` score, 0 if another part has it."""

    largest: str
    sum: str
    own: str


def emit_likelihood(
    graph: GraphWriter, read: Callable[[str], FloatArray], value: str, layer: LikelihoodSpec, name: str
) -> str:
    """From token states ``value`` [T, width] to logarithms of probabilities, FP32 [T, 1]."""
    tokens = graph.input("scored_tokens", DType.INT32, ["K"])
    before = graph.input("scored_before", DType.INT32, ["K"])
    states = graph.op("Gather", [value, before], f"{name}.states", axis=0)
    ids = graph.op("Gather", [graph.input("input_ids", DType.INT32, ["T"]), tokens], f"{name}.flat_ids", axis=0)
    ids = graph.op("Unsqueeze", [ids, graph.constant([1])], f"{name}.ids")
    matrix = read(f"{layer.name}.weight")
    parts = [
        _part(graph, states, ids, matrix[start : start + _ROWS], start, layer, f"{name}.{index}")
        for index, start in enumerate(range(0, layer.vocabulary, _ROWS))
    ]
    largest = _folded(graph, "Max", [part.largest for part in parts], f"{name}.largest")
    sums = []
    for index, part in enumerate(parts):
        distance = graph.op("Sub", [part.largest, largest], f"{name}.{index}.distance")
        scale = graph.op("Exp", [distance], f"{name}.{index}.scale")
        sums.append(graph.op("Mul", [part.sum, scale], f"{name}.{index}.scaled"))
    logarithm = graph.op("Log", [_folded(graph, "Add", sums, f"{name}.sum")], f"{name}.log")
    total = graph.op("Add", [largest, logarithm], f"{name}.total")
    own = _folded(graph, "Add", [part.own for part in parts], f"{name}.own")
    scores = graph.op("Sub", [own, total], f"{name}.scores")
    # A row behind them for tokens that are not scored.
    with_zero = graph.op("Pad", [scores, graph.constant([0, 0, 1, 0])], f"{name}.with_zero")
    return graph.op("Gather", [with_zero, graph.input("token_scores", DType.INT32, ["T"])], name, axis=0)


def _part(
    graph: GraphWriter, states: str, ids: str, matrix: FloatArray, start: int, layer: LikelihoodSpec, name: str
) -> _Part:
    """``matrix``: rows of the vocabulary's from ``start`` on."""
    logits = graph.cast(graph.linear(name, states, matrix), DType.FP32, f"{name}.logits")
    if layer.factor != 1.0:
        logits = graph.op("Mul", [logits, graph.constant(layer.factor, np.float32)], f"{name}.times")
    if layer.cap is not None:
        cap = graph.constant(layer.cap, np.float32)
        bent = graph.op("Tanh", [graph.op("Div", [logits, cap], f"{name}.of_cap")], f"{name}.bent")
        logits = graph.op("Mul", [bent, cap], f"{name}.capped")
    axis = graph.constant([1])
    largest = graph.op("ReduceMax", [logits, axis], f"{name}.largest", keepdims=1)
    powers = graph.op("Exp", [graph.op("Sub", [logits, largest], f"{name}.below")], f"{name}.powers")
    total = graph.op("ReduceSum", [powers, axis], f"{name}.sum", keepdims=1)
    last = len(matrix) - 1
    place = graph.op("Sub", [ids, graph.constant(start, np.int32)], f"{name}.place")
    above = graph.op("Max", [place, graph.constant(0, np.int32)], f"{name}.above")
    near = graph.op("Min", [above, graph.constant(last, np.int32)], f"{name}.near")
    is_here = graph.op("Equal", [place, near], f"{name}.is_here")
    own = graph.op("GatherElements", [logits, near], f"{name}.own", axis=1)
    return _Part(largest, total, graph.op("Where", [is_here, own, graph.constant(0.0, np.float32)], f"{name}.or_zero"))


def _folded(graph: GraphWriter, op: str, values: list[str], name: str) -> str:
    numbered = iter(range(len(values)))
    return reduce(lambda left, right: graph.op(op, [left, right], f"{name}.{next(numbered)}"), values)
