"""Pooling by a learned row that attends to a sequence's tokens (SigLIP's head).

The row is constant, and so is its product with the keys' matrix: scores are one product with [num_heads, width]. Tokens
are summed before they meet the values' matrix, which then reads a row per head and sequence, not one per token.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bei_build.onnx_graph.activation import emit_activation
from bei_build.onnx_graph.writer import GraphWriter
from bei_build.spec.dtypes import DType, FloatArray
from bei_build.spec.parts import AttentionPoolSpec

# Added to the scores of slots without a token.
_HIDDEN = -1e9


def emit_attention_pool(
    graph: GraphWriter, read: Callable[[str], FloatArray], hidden: str, pool: AttentionPoolSpec, name: str
) -> str:
    """FP32 [B, width] from token states ``hidden`` [T, width] in the graph's type."""
    to_scores, to_values, value_bias = _folded(read, pool)
    scores = graph.linear(f"{name}.scores", hidden, to_scores)
    pad_index = graph.input("pad_index", DType.INT32, ["B", "S"])
    shares = _shares(graph, graph.cast(scores, DType.FP32, f"{name}.scores.fp32"), pad_index, name)
    rows = graph.op("Gather", [hidden, pad_index], f"{name}.rows", axis=0)
    summed = graph.op(
        "MatMul", [graph.cast(shares, graph.types.compute, f"{name}.shares.cast"), rows], f"{name}.summed"
    )
    by_head = graph.op("Transpose", [graph.cast(summed, DType.FP32, f"{name}.fp32")], f"{name}.by_head", perm=[1, 0, 2])
    values = graph.op("MatMul", [by_head, graph.fp32(f"{name}.values", to_values)], f"{name}.context")
    side_by_side = graph.op("Transpose", [values], f"{name}.side_by_side", perm=[1, 0, 2])
    flat = graph.op("Reshape", [side_by_side, graph.constant([0, pool.width])], f"{name}.flat")
    biased = graph.op("Add", [flat, graph.fp32(f"{name}.value_bias", value_bias)], f"{name}.biased")

    def linear(value: str, part: str) -> str:
        weight, bias = (read(f"{pool.name}.{part}.{kind}") for kind in ("weight", "bias"))
        return graph.linear_fp32(f"{name}.{part}", value, weight, bias)

    attended = linear(biased, "output")
    norm = [graph.fp32(f"{name}.norm.{kind}", read(f"{pool.name}.norm.{kind}")) for kind in ("weight", "bias")]
    entering = graph.op("LayerNormalization", [attended, *norm], f"{name}.norm", axis=-1, epsilon=pool.norm.eps)
    activating = linear(entering, "mlp.gate" if pool.gated else "mlp.up")
    inner = emit_activation(graph, activating, pool.activation, f"{name}.act", in_fp32=True)
    if pool.gated:
        inner = graph.op("Mul", [inner, linear(entering, "mlp.up")], f"{name}.gated")
    if pool.adds_first:
        first_index = graph.input("first_index", DType.INT32, ["B"])
        first = graph.op("Gather", [hidden, first_index], f"{name}.first", axis=0)
        attended = graph.cast(first, DType.FP32, f"{name}.first.fp32")
    return graph.op("Add", [linear(inner, "mlp.down"), attended], name)


def _shares(graph: GraphWriter, scores: str, pad_index: str, name: str) -> str:
    """The softmax of each sequence's scores, FP32 [B, num_heads, S], from [T, num_heads]."""
    padded = graph.op("Gather", [scores, pad_index], f"{name}.padded", axis=0)
    slot_mask = graph.input("slot_mask", DType.FP32, ["B", "S"])
    empty = graph.op("Sub", [graph.constant(1.0, np.float32), slot_mask], f"{name}.empty")
    hidden = graph.op("Mul", [empty, graph.constant(_HIDDEN, np.float32)], f"{name}.hidden")
    column = graph.op("Unsqueeze", [hidden, graph.constant([2])], f"{name}.column")
    by_slot = graph.op("Add", [padded, column], f"{name}.masked")
    return graph.op("Softmax", [graph.op("Transpose", [by_slot], f"{name}.by_row", perm=[0, 2, 1])], f"{name}.shares")


def _folded(read: Callable[[str], FloatArray], pool: AttentionPoolSpec) -> tuple[FloatArray, FloatArray, FloatArray]:
    """From a token's state to its scores, [num_heads, width]; from a sum of states to a head's values, [num_heads,
    width, head_dim]; and the values' bias. The keys' bias adds the same to all scores of a head."""
    heads, width = pool.num_heads, pool.width
    query, key, value = np.split(read(f"{pool.name}.input.weight"), 3)
    query_bias, _, value_bias = np.split(read(f"{pool.name}.input.bias"), 3)
    head_dim = width // heads
    probe = (query @ read(f"{pool.name}.probe").reshape(width) + query_bias) * np.float32(head_dim**-0.5)
    to_scores = np.einsum("hd,hdw->hw", probe.reshape(heads, head_dim), key.reshape(heads, head_dim, width))
    return to_scores, value.reshape(heads, head_dim, width).transpose(0, 2, 1), value_bias
