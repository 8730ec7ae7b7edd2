"""Attention of tokens to learned rows (NV-Embed, arXiv:2405.17428, section 3.1), as a layer of a head.

Keys and values of the rows are constant, and so are their products with the query's and the output's matrices: scores
and context are one product each with [num_heads * num_latents, width], an eighth of the stored matrices at NV-Embed's
sizes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bei_build.onnx_graph.activation import emit_activation
from bei_build.onnx_graph.writer import GraphWriter
from bei_build.spec.dtypes import FloatArray
from bei_build.spec.parts import LatentAttentionSpec


def emit_latent_attention(
    graph: GraphWriter, read: Callable[[str], FloatArray], value: str, layer: LatentAttentionSpec, name: str
) -> str:
    """``value`` [T, width] through ``layer``, in the graph's type."""

    def norm(rows: str, part: str) -> str:
        weights = [graph.vector(f"{name}.{part}.{k}", read(f"{layer.name}.{part}.{k}")) for k in ("weight", "bias")]
        return graph.op("LayerNormalization", [rows, *weights], f"{name}.{part}", axis=-1, epsilon=layer.norm.eps)

    def linear(rows: str, part: str, matrix: FloatArray, bias: FloatArray | None = None) -> str:
        return graph.linear(f"{name}.{part}", rows, matrix, bias)

    to_scores, to_context = _folded(read, layer)
    scores = linear(norm(value, "norm"), "scores", to_scores)
    by_head = graph.op("Reshape", [scores, graph.constant([0, layer.num_heads, layer.num_latents])], f"{name}.by_head")
    shares = graph.op("Softmax", [by_head], f"{name}.shares", axis=-1)
    flat = graph.op("Reshape", [shares, graph.constant([0, layer.num_heads * layer.num_latents])], f"{name}.flat")
    attended = graph.op("Add", [linear(flat, "context", to_context), value], f"{name}.attended")
    entering = norm(attended, "mlp_norm")
    matrix, bias = (read(f"{layer.name}.mlp.up.{kind}") for kind in ("weight", "bias"))
    size = layer.intermediate_size
    up = linear(entering, "up", matrix[:size], bias[:size])
    gate = emit_activation(graph, linear(entering, "gate", matrix[size:], bias[size:]), "gelu", f"{name}.act")
    inner = graph.op("Mul", [up, gate], f"{name}.inner")
    down = linear(inner, "down", read(f"{layer.name}.mlp.down.weight"), read(f"{layer.name}.mlp.down.bias"))
    return graph.op("Add", [down, attended], name)


def _folded(read: Callable[[str], FloatArray], layer: LatentAttentionSpec) -> tuple[FloatArray, FloatArray]:
    """Two matrices: from a token's normalized state to its scores, [num_heads * num_latents, width], and from their
    softmax to the attention's output, [width, num_heads * num_latents]."""
    rows = read(f"{layer.name}.latents.weight")
    centred = rows - rows.mean(axis=1, keepdims=True)
    deviation = np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + np.float32(layer.norm.eps))
    weight, bias = (read(f"{layer.name}.latents_norm.{kind}") for kind in ("weight", "bias"))
    joined = (centred / deviation * weight + bias) @ read(f"{layer.name}.key_value.weight").T
    keys, values = np.split(joined.reshape(layer.num_latents, 2 * layer.num_heads, layer.head_dim), 2, axis=1)
    query = read(f"{layer.name}.query.weight").reshape(layer.num_heads, layer.head_dim, layer.width)
    output = read(f"{layer.name}.output.weight").reshape(layer.width, layer.num_heads, layer.head_dim)
    scale = np.float32(layer.head_dim**-0.5)
    heads = range(layer.num_heads)
    to_scores = np.concatenate([keys[:, head] @ query[head] * scale for head in heads])
    to_context = np.concatenate([output[:, head] @ values[:, head].T for head in heads], axis=1)
    return to_scores, to_context
