"""ModelSpec to packed ONNX graph: embeddings, layers, heads. ``[total_tokens, hidden]`` throughout.

Graph inputs are those of ``bei.packing.graph_inputs``; only the ones this model reads are declared.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bei_build.graph.activation import emit_activation
from bei_build.graph.attention import AttentionCore, PaddedAttention, PositionTables
from bei_build.graph.experts import ExpertsEmitter
from bei_build.graph.heads import HeadEmitter
from bei_build.graph.positions import Rotations, relative_bias_table
from bei_build.graph.writer import DType, FloatArray, GraphTypes, GraphWriter
from bei_build.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec

Read = Callable[[str], FloatArray]


def write_graph(
    spec: ModelSpec, read: Read, folder: Path, types: GraphTypes, core: AttentionCore, max_seq_len: int
) -> Path:
    """Write the packed graph of ``spec`` for sequences of up to ``max_seq_len`` tokens into ``folder``.

    ``read`` gives a weight by its name in ``spec.weights()``. Every head is a float32 output of its name, [B, width]
    or, without pooling, [T, width]; an embedding is not normalized at the end. Returns the path of the ONNX file.
    """
    graph = GraphWriter(folder, types)
    emitter = _TransformerEmitter(graph, read, spec, core, max_seq_len)
    hidden = emitter.embeddings()
    for index, layer in enumerate(spec.layers):
        hidden = emitter.layer(hidden, layer, f"layers.{index}")
    if spec.final_norm:
        hidden = emitter.norm(hidden, spec.final_norm, "final_norm")
    heads = HeadEmitter(graph, read, hidden, spec.unpooled_id)
    for head in spec.heads:
        rows = "B" if head.pooling else "T"
        graph.output(head.output, heads.emit(head), DType.FP32, [rows, spec.dimensions[head.output]])
    return graph.finish()


class _TransformerEmitter:
    def __init__(self, graph: GraphWriter, read: Read, spec: ModelSpec, core: AttentionCore, max_seq_len: int) -> None:
        self._graph = graph
        self._read: Read = lambda name: read(spec.weight_read_as(name))
        self._spec = spec
        self._max_seq_len = max_seq_len
        self._input_ids = graph.input("input_ids", DType.INT32, ["T"])
        if spec.layers:  # else nothing would read the indices that it declares
            self._attention = PaddedAttention(graph, core, spec.layers, max_seq_len, partial_keys=spec.partial_keys)
        # TensorRT wants shapes that do not depend on values.
        self._experts = ExpertsEmitter(graph, self._read, on_all_tokens=core is AttentionCore.TRT_ATTENTION)
        self._rotations: Rotations | None = None
        self._relative_bias: npt.NDArray[np.float32] | None = None

    def embeddings(self) -> str:
        graph, spec, name = self._graph, self._spec.embeddings, "embeddings"
        total = graph.lookup(self._table(f"{name}.word"), self._input_ids, f"{name}.words")
        if spec.scale != 1.0:
            total = self._scaled(total, spec.scale, f"{name}.scaled")
        for index, part in enumerate(self._position_and_type_rows()):
            total = graph.op("Add", [total, part], f"{name}.sum.{index}")
        if spec.norm:
            total = self.norm(total, spec.norm, f"{name}.norm")
        return self._linear(total, f"{name}.projection") if spec.width else total

    def layer(self, hidden: str, spec: LayerSpec, name: str) -> str:
        """Attention and MLP, each ``h + f(h)`` with the norms where the spec places them."""
        entering = hidden
        for part in ("attention", "mlp"):
            norm = f"{name}.{part}_norm"
            before = spec.norms_input and (part == "mlp" or spec.attention_norm)
            value = self.norm(hidden, spec.norm, norm) if before else hidden
            if part == "attention":
                value = self._attend(value, spec.attention, f"{name}.attention")
            else:
                value = self._mlp(value, spec.mlp, f"{name}.mlp")
            if spec.norms_output:
                value = self.norm(value, spec.norm, f"{name}.{part}_post_norm")
            if spec.residual_scale != 1.0:
                value = self._scaled(value, spec.residual_scale, f"{name}.{part}_scaled")
            hidden = self._graph.op("Add", [value, hidden], f"{name}.{part}_residual")
            if spec.placement == "post":
                hidden = self.norm(hidden, spec.norm, norm)
            if part == "attention" and spec.second_attention_norm:
                again = self._graph.op("Add", [hidden, entering], f"{name}.second_attention_residual")
                hidden = self.norm(again, spec.norm, f"{name}.second_attention_norm")
        return hidden

    def norm(self, value: str, spec: NormSpec, name: str, scale: float = 1.0) -> str:
        """The norm of the last axis of ``value``, times ``scale``."""
        graph, factor = self._graph, np.float32(scale)
        weight = graph.vector(f"{name}.weight", (self._read(f"{name}.weight") + np.float32(spec.offset)) * factor)
        if spec.kind == "rms":
            return graph.op("RMSNormalization", [value, weight], name, axis=-1, epsilon=spec.eps)
        bias = [graph.vector(f"{name}.bias", self._read(f"{name}.bias") * factor)] if spec.bias else []
        return graph.op("LayerNormalization", [value, weight, *bias], name, axis=-1, epsilon=spec.eps)

    def _position_and_type_rows(self) -> list[str]:
        graph, spec, name = self._graph, self._spec.embeddings, "embeddings"
        parts = []
        if spec.max_positions:
            parts.append(graph.lookup(self._table(f"{name}.position"), self._position_ids(), f"{name}.positions"))
        if spec.type_vocab_size == 1:
            parts.append(graph.vector(f"{name}.type.weight", self._read(f"{name}.type.weight")))
        elif spec.type_vocab_size > 1:
            token_type_ids = graph.input("token_type_ids", DType.INT32, ["T"])
            parts.append(graph.lookup(self._table(f"{name}.type"), token_type_ids, f"{name}.types"))
        return parts

    def _attend(self, hidden: str, spec: AttentionSpec, name: str) -> str:
        query, key, value = self._query_key_value(hidden, spec, name)
        if spec.qk_norm or spec.rope:
            # The score scale is in the query's weights; a norm would take it out again, so there it goes behind.
            query = self._turned(query, spec, spec.num_heads, f"{name}.query", spec.scale if spec.qk_norm else 1.0)
            key = self._turned(key, spec, spec.num_kv_heads, f"{name}.key", 1.0)
        context = self._attention.emit(query, key, value, spec, self._position_tables(spec, name), name)
        return self._linear(context, f"{name}.output", spec.output_bias)

    def _query_key_value(self, hidden: str, spec: AttentionSpec, name: str) -> list[str]:
        """One matrix for the three projections; the query's rows carry the score scale."""
        scales = {"query": 1.0 if spec.qk_norm else spec.scale, "key": 1.0, "value": 1.0}
        graph = self._graph

        def stacked(kind: str) -> FloatArray:
            parts = [self._read(f"{name}.{role}.{kind}") * np.float32(scale) for role, scale in scales.items()]
            return np.concatenate(parts)

        matrix = graph.matrix(f"{name}.qkv.weight", stacked("weight"))
        bias = graph.vector(f"{name}.qkv.bias", stacked("bias")) if spec.bias else None
        sizes = [spec.width, spec.kv_width, spec.kv_width]
        return graph.split(graph.linear(hidden, matrix, bias, f"{name}.qkv"), sizes, f"{name}.split", axis=1)

    def _turned(self, value: str, spec: AttentionSpec, num_heads: int, name: str, scale: float) -> str:
        """``value`` [T, heads * head_dim] normalized, scaled and rotated."""
        graph = self._graph
        if spec.qk_norm and spec.qk_norm_joint:
            value = self.norm(value, spec.qk_norm, f"{name}_norm", scale)
        heads = graph.op("Reshape", [value, graph.constant([0, num_heads, spec.head_dim])], f"{name}.heads")
        if spec.qk_norm and not spec.qk_norm_joint:
            heads = self.norm(heads, spec.qk_norm, f"{name}_norm", scale)
        if spec.rope:
            if self._rotations is None:
                self._rotations = Rotations(graph, self._position_ids(), self._max_seq_len)
            heads = self._rotations.emit(heads, spec.rope, spec.head_dim, f"{name}.turned")
        return graph.op("Reshape", [heads, graph.constant([0, num_heads * spec.head_dim])], f"{name}.packed")

    def _mlp(self, value: str, spec: MLPSpec, name: str) -> str:
        if spec.experts:
            return self._experts.emit(value, spec, spec.experts, name)
        graph = self._graph
        up = self._linear(value, f"{name}.up", spec.bias)
        if spec.gated:
            gate = self._linear(value, f"{name}.gate", spec.bias)
            inner = graph.op("Mul", [emit_activation(graph, gate, spec.activation, f"{name}.act"), up], f"{name}.inner")
        else:
            inner = emit_activation(graph, up, spec.activation, f"{name}.act")
        return self._linear(inner, f"{name}.down", spec.down_bias)

    def _position_tables(self, spec: AttentionSpec, name: str) -> PositionTables:
        if spec.relative_bias:
            if self._relative_bias is None:
                weight = self._read("relative_bias.weight")
                self._relative_bias = relative_bias_table(weight, spec.relative_bias, self._max_seq_len)
            return PositionTables(relative_bias=self._relative_bias)
        if not spec.disentangled:
            return PositionTables()
        keys, queries = ("key", "query") if spec.disentangled.share_keys else ("position_key", "position_query")
        return PositionTables(
            keys=self._projected_positions(spec, name, keys, 1.0) if spec.disentangled.content_to_position else None,
            queries=self._projected_positions(spec, name, queries, spec.scale)
            if spec.disentangled.position_to_content
            else None,
        )

    def _projected_positions(self, spec: AttentionSpec, name: str, role: str, scale: float) -> str:
        """DeBERTa's table through a projection of the layer, [heads, head_dim, rows]: constant, so computed here."""
        assert spec.disentangled is not None
        rows = self._read("relative_positions.weight")
        if spec.disentangled.norm:
            weight, bias = (self._read(f"relative_positions_norm.{kind}") for kind in ("weight", "bias"))
            centred = rows - rows.mean(axis=1, keepdims=True)
            deviation = np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + np.float32(spec.disentangled.norm.eps))
            rows = centred / deviation * weight + bias
        projected = rows @ self._read(f"{name}.{role}.weight").T + self._read(f"{name}.{role}.bias")
        by_head = (projected * np.float32(scale)).reshape(-1, spec.num_heads, spec.head_dim).transpose(1, 2, 0)
        return self._graph.vector(f"{name}.{role}.positions", by_head)

    def _linear(self, value: str, name: str, bias: bool = True) -> str:
        matrix = self._graph.matrix(f"{name}.weight", self._read(f"{name}.weight"))
        offset = self._graph.vector(f"{name}.bias", self._read(f"{name}.bias")) if bias else None
        return self._graph.linear(value, matrix, offset, name)

    def _scaled(self, value: str, factor: float, name: str) -> str:
        return self._graph.op("Mul", [value, self._graph.constant(factor, self._graph.types.compute.numpy)], name)

    def _position_ids(self) -> str:
        return self._graph.input("position_ids", DType.INT32, ["T"])

    def _table(self, name: str) -> str:
        return self._graph.table(f"{name}.weight", self._read(f"{name}.weight"))
