"""ModelSpec to packed ONNX graph: embeddings, layers, pooling, tail. ``[total_tokens, hidden]`` throughout.

Graph inputs are those of ``bei.packing.graph_inputs``; only the ones this model reads are declared.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from bei_build.graph.activation import emit_activation
from bei_build.graph.attention import AttentionCore, PaddedAttention
from bei_build.graph.pooling import emit_embedding_head
from bei_build.graph.writer import DType, FloatArray, GraphTypes, GraphWriter
from bei_build.spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec

Read = Callable[[str], FloatArray]


def write_graph(spec: ModelSpec, read: Read, folder: Path, types: GraphTypes, core: AttentionCore) -> Path:
    """Write the packed graph of ``spec`` into ``folder``; returns the path of the ONNX file.

    ``read`` gives a weight by its name in ``spec.weights()``. The graph's output ``embedding`` is float32
    [B, ``spec.embedding_dimension``], not normalized at the end.
    """
    graph = GraphWriter(folder, types)
    emitter = _TransformerEmitter(graph, read, core)
    hidden = emitter.embeddings(spec)
    for index, layer in enumerate(spec.layers):
        hidden = emitter.layer(hidden, layer, f"layers.{index}")
    embedding = emit_embedding_head(graph, read, spec, hidden)
    graph.output("embedding", embedding, DType.FP32, ["B", spec.embedding_dimension])
    return graph.finish()


class _TransformerEmitter:
    def __init__(self, graph: GraphWriter, read: Read, core: AttentionCore) -> None:
        self._graph = graph
        self._read = read
        self._input_ids = graph.input("input_ids", DType.INT32, ["T"])
        self._position_ids = graph.input("position_ids", DType.INT32, ["T"])
        self.attention = PaddedAttention(graph, core)

    def embeddings(self, spec: ModelSpec) -> str:
        graph, name = self._graph, "embeddings"
        parts = [
            graph.lookup(self._table(f"{name}.word"), self._input_ids, f"{name}.words"),
            graph.lookup(self._table(f"{name}.position"), self._position_ids, f"{name}.positions"),
        ]
        if spec.embeddings.type_vocab_size == 1:
            parts.append(graph.vector(f"{name}.type.weight", self._read(f"{name}.type.weight")))
        elif spec.embeddings.type_vocab_size > 1:
            token_type_ids = graph.input("token_type_ids", DType.INT32, ["T"])
            parts.append(graph.lookup(self._table(f"{name}.type"), token_type_ids, f"{name}.types"))
        total = parts[0]
        for index, part in enumerate(parts[1:]):
            total = graph.op("Add", [total, part], f"{name}.sum.{index}")
        return self._norm(total, spec.embeddings.norm, f"{name}.norm")

    def layer(self, hidden: str, spec: LayerSpec, name: str) -> str:
        graph = self._graph
        query, key, value = self._query_key_value(hidden, spec.attention, f"{name}.attention")
        context = self.attention.emit(query, key, value, spec.attention, f"{name}.attention")
        attended = self._linear(context, f"{name}.attention.output")
        residual = graph.op("Add", [attended, hidden], f"{name}.attention_residual")
        hidden = self._norm(residual, spec.norm, f"{name}.attention_norm")
        inner = emit_activation(graph, self._linear(hidden, f"{name}.mlp.up"), spec.mlp.activation, f"{name}.mlp.act")
        residual = graph.op("Add", [self._linear(inner, f"{name}.mlp.down"), hidden], f"{name}.mlp_residual")
        return self._norm(residual, spec.norm, f"{name}.mlp_norm")

    def _query_key_value(self, hidden: str, spec: AttentionSpec, name: str) -> list[str]:
        """One matrix for the three projections; the query's rows carry the score scale."""
        matrices, biases = [], []
        for role, scale in (("query", spec.head_dim**-0.5), ("key", 1.0), ("value", 1.0)):
            matrices.append(self._read(f"{name}.{role}.weight") * np.float32(scale))
            biases.append(self._read(f"{name}.{role}.bias") * np.float32(scale))
        graph = self._graph
        matrix = graph.matrix(f"{name}.qkv.weight", np.concatenate(matrices))
        bias = graph.vector(f"{name}.qkv.bias", np.concatenate(biases))
        return graph.split(graph.linear(hidden, matrix, bias, f"{name}.qkv"), 3, f"{name}.split", axis=1)

    def _linear(self, value: str, name: str) -> str:
        matrix = self._graph.matrix(f"{name}.weight", self._read(f"{name}.weight"))
        bias = self._graph.vector(f"{name}.bias", self._read(f"{name}.bias"))
        return self._graph.linear(value, matrix, bias, name)

    def _norm(self, value: str, spec: NormSpec, name: str) -> str:
        weight = self._graph.vector(f"{name}.weight", self._read(f"{name}.weight"))
        bias = self._graph.vector(f"{name}.bias", self._read(f"{name}.bias"))
        return self._graph.op("LayerNormalization", [value, weight, bias], name, axis=-1, epsilon=spec.eps)

    def _table(self, name: str) -> str:
        return self._graph.table(f"{name}.weight", self._read(f"{name}.weight"))
