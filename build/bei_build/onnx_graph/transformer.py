"""ModelSpec to packed ONNX graph: embeddings, layers, heads. ``[total_tokens, hidden]`` throughout.

Graph inputs are those of ``bei.engine.packing.graph_inputs``; only the ones this model reads are declared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bei.artifact.manifest import OPENVINO_ATTENTION, OPENVINO_ROUNDINGS
from bei.engine.packed_attention import encoded
from bei.engine.packing import position_ids_but
from bei.engine.rounded_rows import encoded_roundings
from bei_build.onnx_graph.activation import emit_activation
from bei_build.onnx_graph.adapters import AdapterEmitter
from bei_build.onnx_graph.attention import AttentionCore, AttentionEmitter, PositionTables
from bei_build.onnx_graph.convolution import ConvolutionEmitter
from bei_build.onnx_graph.experts import ExpertsEmitter
from bei_build.onnx_graph.heads import HeadEmitter
from bei_build.onnx_graph.images_in_text import emit_with_images
from bei_build.onnx_graph.patches import emit_patches
from bei_build.onnx_graph.positions import Rotations, is_reordered, rows_for_halves
from bei_build.onnx_graph.writer import Dim, GraphTypes, GraphWriter, ObservedTensor
from bei_build.spec.dtypes import DType, FloatArray
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import (
    AttentionSpec,
    ConvolutionSpec,
    DecoderSpec,
    EmbeddingsSpec,
    EntrySpec,
    LayerInputSpec,
    LayerInputsSpec,
    LayerPart,
    LayerSpec,
    MaskDropoutSpec,
    MLPSpec,
    NormSpec,
)
from bei_build.spec.position_tables import axial_rows, position_rows, relative_bias_table

Read = Callable[[str], FloatArray]


class _Matrix(NamedTuple):
    """``values`` [out, in]; ``row_scales`` [out] where they are rounded already."""

    values: FloatArray
    row_scales: FloatArray | None = None


def write_graph(
    spec: ModelSpec,
    read: Read,
    folder: Path,
    types: GraphTypes,
    core: AttentionCore,
    max_seq_len: int,
    observed: Mapping[str, ObservedTensor] | None = None,
) -> Path:
    """Write the packed graph of ``spec`` for sequences of up to ``max_seq_len`` tokens into ``folder``.

    ``read`` gives a weight by its name in ``spec.weights()``. Every head is a float32 output with its name, [B, width]
    or, without pooling, [T, width]; an embedding is not normalized at the end. ``observed``: additional outputs by
    name, taken from linear layers. Returns the path of the ONNX file.
    """
    graph = GraphWriter(folder, types)
    # TensorRT needs shapes that do not depend on values; calibration needs a row per token.
    on_all_tokens = core is not AttentionCore.MATMUL_SOFTMAX or bool(observed)
    emitter = _TransformerEmitter(graph, read, spec, core, max_seq_len, on_all_tokens=on_all_tokens)
    hidden = emitter.encoder()
    if spec.decoder:
        hidden = emitter.decoder(spec.decoder, hidden)
    heads = HeadEmitter(graph, read, hidden, spec, emitter.passed)
    for head in spec.heads:
        rows = "B" if head.pooling else "T"
        width: Dim = "span_columns" if head.output == "span_logits" else spec.dimensions[head.output]
        graph.output(head.output, heads.emit(head), DType.FP32, [rows, width])
    for output, of in (observed or {}).items():
        graph.observe(output, of)
    emitter.write_sites(folder)
    return graph.finish()


class _TransformerEmitter:
    def __init__(
        self,
        graph: GraphWriter,
        read: Read,
        spec: ModelSpec,
        core: AttentionCore,
        max_seq_len: int,
        *,
        on_all_tokens: bool,
    ) -> None:
        self._graph = graph
        self._read: Read = lambda name: read(spec.weight_read_as(name))
        self._spec = spec
        self._max_seq_len = max_seq_len
        self._input_ids = "" if spec.embeddings.patches else graph.input("input_ids", DType.INT32, ["T"])
        self._words: str | None = None
        self._attention = AttentionEmitter(graph, core, max_seq_len, partial_keys=spec.partial_keys)
        self._convolutions = ConvolutionEmitter(graph, self._read, partial_keys=spec.partial_keys)
        self._experts = ExpertsEmitter(graph, self._read, on_all_tokens=on_all_tokens)
        self._adapters = AdapterEmitter(graph, self._read, spec.adapters, spec.weight_read_as)
        self._rotations: Rotations | None = None
        self._relative_bias: npt.NDArray[np.float32] | None = None
        self._image_parts: list[str] = []
        self.passed: list[str] = []  # the states behind each layer, before the last norm

    def write_sites(self, folder: Path) -> None:
        """Write where engines may compute attention, and round inputs, by kernels of our own, if anywhere."""
        if self._attention.sites:
            (folder / OPENVINO_ATTENTION).write_bytes(encoded(self._attention.sites))
        if self._graph.roundings:
            (folder / OPENVINO_ROUNDINGS).write_bytes(encoded_roundings(self._graph.roundings))

    def encoder(self) -> str:
        """The last states of the layers, which every model has."""
        spec = self._spec
        hidden = self._embeddings(self._input_ids, spec.embeddings, "embeddings")
        states = [hidden]
        inputs = self._layer_inputs(hidden, spec.layer_inputs) if spec.layer_inputs else ()
        for index, layer in enumerate(spec.layers):
            hidden = self._layer(hidden, layer, f"layers.{index}", own_input=inputs[index] if inputs else None)
            if index == 0 and spec.convolution:
                hidden = self._convolved(hidden, states[0], spec.convolution)
            if index < len(self._image_parts):
                hidden = self._graph.op("Add", [hidden, self._image_parts[index]], f"layers.{index}.with_images")
            states.append(hidden)
        self.passed = states[1:]
        if spec.final_norm:
            states[-1] = self._norm(hidden, spec.final_norm, "final_norm")
        return self._weighted_sum(states, spec.layer_shares) if spec.layer_shares else states[-1]

    def _layer_inputs(self, embedded: str, spec: LayerInputsSpec) -> list[str]:
        """Each layer's vectors of tokens, [T, width]."""
        graph, name, count = self._graph, "layer_inputs", len(self._spec.layers)
        product = graph.linear(f"{name}.projection", embedded, self._read(f"{name}.projection.weight"))
        parts = graph.op("Reshape", [product, graph.constant([0, count, spec.width])], f"{name}.parts")
        normed = self._norm(parts, spec.norm, f"{name}.norm")
        flat = graph.op("Reshape", [normed, graph.constant([0, count * spec.width])], f"{name}.flat")
        return graph.split(flat, [spec.width] * count, f"{name}.of_layer", axis=1)

    def _weighted_sum(self, states: Sequence[str], shares: Sequence[float]) -> str:
        """The sum of ``states``, each times its share, added in FP32."""
        graph, name, parts = self._graph, "layers.mixed", []
        for index, (state, share) in enumerate(zip(states, shares, strict=True)):
            if share:
                wide = graph.cast(state, DType.FP32, f"{name}.{index}.fp32")
                parts.append(graph.op("Mul", [wide, graph.constant(share, np.float32)], f"{name}.{index}"))
        return graph.cast(graph.op("Sum", parts, f"{name}.sum"), graph.types.compute, name)

    def decoder(self, spec: DecoderSpec, encoded: str) -> str:
        """The last states of layers that read the text shifted by one token, and ``encoded``."""
        hidden = self._embeddings(self._shifted_ids(spec), spec.embeddings, "decoder.embeddings")
        for index, layer in enumerate(spec.layers):
            hidden = self._layer(hidden, layer, f"decoder.layers.{index}", encoded)
        return self._norm(hidden, spec.final_norm, "decoder.final_norm") if spec.final_norm else hidden

    def _shifted_ids(self, spec: DecoderSpec) -> str:
        """Ids shifted by one: each token's is that of the token before it."""
        graph, name = self._graph, "decoder.moved"
        bounds = [graph.constant([bound]) for bound in (0, -1, 0)]
        before = graph.op("Slice", [self._input_ids, *bounds], f"{name}.before")
        moved = graph.op("Concat", [graph.constant([0], np.int32), before], f"{name}.all", axis=0)
        is_first = graph.op("Equal", [self._position_ids(), graph.constant(0, np.int32)], f"{name}.is_first")
        start = self._own_start(spec) if spec.start_id is None else graph.constant(spec.start_id, np.int32)
        return graph.op("Where", [is_first, start, moved], name)

    def _own_start(self, spec: DecoderSpec) -> str:
        """For each token, the id that starts its sequence's shifted text, INT32 [T]."""
        graph, name = self._graph, "decoder.start"
        assert spec.padding_id is not None
        pad_index = graph.input("pad_index", DType.INT32, ["B", "S"])
        counted = graph.input(position_ids_but(spec.padding_id), DType.INT32, ["T"])
        # Slots after a sequence's end repeat its last token's.
        in_slots = graph.op("Gather", [counted, pad_index], f"{name}.counted")
        count = graph.op("ReduceMax", [in_slots, graph.constant([1])], f"{name}.count", keepdims=0)
        places = graph.op("Sub", [count, graph.constant(1, np.int32)], f"{name}.places")
        places = graph.op("Max", [places, graph.constant(0, np.int32)], f"{name}.least")
        index = graph.op("Add", [graph.input("first_index", DType.INT32, ["B"]), places], f"{name}.index")
        start = graph.op("Gather", [self._input_ids, index], f"{name}.of_row")
        column = graph.op("Unsqueeze", [start, graph.constant([1])], f"{name}.column")
        return self._of_tokens(column, pad_index, name)

    def _of_tokens(self, column: str, pad_index: str, name: str) -> str:
        """Values of sequences, [B, 1], repeated for their tokens, [T]."""
        graph = self._graph
        by_slot = graph.op("Expand", [column, graph.op("Shape", [pad_index], f"{name}.shape")], f"{name}.by_slot")
        flat = graph.op("Reshape", [by_slot, graph.constant([-1])], f"{name}.flat")
        return graph.op("Gather", [flat, graph.input("unpad_index", DType.INT32, ["T"])], name)

    def _without_masked(self, rows: str, input_ids: str, spec: MaskDropoutSpec, name: str) -> str:
        """``rows`` [T, width] times the tokens' dropout factors, which are computed in FP32."""
        graph = self._graph
        pad_index = graph.input("pad_index", DType.INT32, ["B", "S"])
        slot_mask = graph.input("slot_mask", DType.FP32, ["B", "S"])
        is_masked = graph.op("Equal", [input_ids, graph.constant(spec.token_id, np.int32)], f"{name}.is_masked")
        others = graph.cast(graph.op("Not", [is_masked], f"{name}.is_other"), DType.FP32, f"{name}.others")
        in_slots = graph.op(
            "Mul", [graph.op("Gather", [others, pad_index], f"{name}.padded"), slot_mask], f"{name}.slots"
        )
        axis = graph.constant([1])
        counts = [graph.op("ReduceSum", [part, axis], f"{part}.count", keepdims=1) for part in (slot_mask, in_slots)]
        ratio = graph.op("Div", counts, f"{name}.ratio")
        factor = graph.op("Mul", [ratio, graph.constant(1.0 - spec.share, np.float32)], f"{name}.factor")
        factors = graph.op("Mul", [others, self._of_tokens(factor, pad_index, f"{name}.factors")], f"{name}.of_tokens")
        column = graph.op("Unsqueeze", [factors, axis], f"{name}.column")
        return graph.op("Mul", [rows, graph.cast(column, graph.types.compute, f"{name}.cast")], name)

    def _embeddings(self, input_ids: str, spec: EmbeddingsSpec, name: str) -> str:
        graph = self._graph
        if spec.patches:
            total = emit_patches(graph, self._read, spec.patches, name)
        else:
            if self._words is None:
                self._words = self._table("embeddings.word")  # also the decoder's
            total = graph.lookup(self._words, input_ids, f"{name}.words")
            total = self._adapters.looked_up(total, input_ids, "embeddings.word")
        if spec.scale != 1.0:
            total = self._scaled(total, spec.scale, f"{name}.scaled")
        if spec.reads_images:
            width = spec.width or self._spec.hidden_size
            total, self._image_parts = emit_with_images(graph, total, width, spec.image_layers, name)
        if spec.mask_dropout:
            total = self._without_masked(total, input_ids, spec.mask_dropout, f"{name}.unmasked")
        for index, part in enumerate(self._position_and_type_rows(spec, name)):
            total = graph.op("Add", [total, part], f"{name}.sum.{index}")
        if spec.norm:
            total = self._norm(total, spec.norm, f"{name}.norm")
        return self._linear(total, f"{name}.projection") if spec.width else total

    def _layer(
        self, hidden: str, spec: LayerSpec, name: str, encoded: str | None = None, own_input: str | None = None
    ) -> str:
        """Attention or a convolution, in a decoder also attention to ``encoded``, MLP, and ``own_input``, each
        ``h + f(h)`` with the norms where the spec places them."""
        if spec.entry:
            hidden = self._entered(hidden, spec.entry, f"{name}.entry")
        entering, shared = hidden, ""
        for index, part in enumerate(spec.parts):
            norm = f"{name}.{part}_norm"
            value = hidden
            if part == "mlp" and spec.parallel:
                value = shared
            elif spec.norms_input and part in spec.normed_parts:
                value = shared = self._norm(hidden, spec.norm, norm)
            value = self._part(part, value, spec, name, encoded if own_input is None else own_input)
            if spec.norms_output:
                value = self._norm(value, spec.norm, f"{name}.{part}_post_norm")
            if spec.residual_scale != 1.0:
                value = self._scaled(value, spec.residual_scale, f"{name}.{part}_scaled")
            hidden = self._graph.op("Add", [value, hidden], f"{name}.{part}_residual")
            if spec.placement == "post":
                hidden = self._norm(hidden, spec.norm, norm)
            if index == 0 and spec.second_attention_norm:
                again = self._graph.op("Add", [hidden, entering], f"{name}.second_attention_residual")
                hidden = self._norm(again, spec.norm, f"{name}.second_attention_norm")
        if spec.scaled:
            scale = self._graph.vector(f"{name}.scale.weight", self._read(f"{name}.scale.weight"))
            hidden = self._graph.op("Mul", [hidden, scale], f"{name}.scaled")
        return hidden

    def _entered(self, hidden: str, spec: EntrySpec, name: str) -> str:
        types = self._graph.input("token_type_ids", DType.INT32, ["T"])
        rows = self._graph.lookup(self._table(f"{name}.types"), types, f"{name}.rows")
        return self._graph.op("Add", [self._norm(hidden, spec.norm, f"{name}.norm"), rows], name)

    def _convolved(self, hidden: str, embedded: str, spec: ConvolutionSpec) -> str:
        graph, name = self._graph, "convolution"
        product = self._convolutions.product(embedded, spec, name)
        activated = emit_activation(graph, product, spec.activation, f"{name}.act")
        return self._norm(graph.op("Add", [hidden, activated], f"{name}.residual"), spec.norm, f"{name}.norm")

    def _part(self, part: LayerPart, value: str, spec: LayerSpec, name: str, other: str | None) -> str:
        """``part`` of ``value``; ``other``: the second value that it reads."""
        if part == "mlp":
            return self._mlp(value, spec.mlp, f"{name}.mlp")
        if part == "convolution":
            assert spec.convolution is not None
            return self._convolutions.short(value, spec.convolution, self._linear, f"{name}.convolution")
        if part == "attention":
            assert spec.attention is not None
            return self._attend(value, None, spec.attention, f"{name}.attention")
        assert other is not None
        if part == "layer_input":
            assert spec.layer_input is not None
            return self._gated_input(value, other, spec.layer_input, f"{name}.layer_input")
        assert spec.cross_attention is not None
        return self._attend(value, other, spec.cross_attention, f"{name}.cross_attention")

    def _gated_input(self, value: str, own_input: str, spec: LayerInputSpec, name: str) -> str:
        gate = emit_activation(self._graph, self._linear(value, f"{name}.gate", False), spec.activation, f"{name}.act")
        return self._linear(self._graph.op("Mul", [gate, own_input], f"{name}.inner"), f"{name}.output", False)

    def _norm(
        self,
        value: str,
        spec: NormSpec,
        name: str,
        scale: float = 1.0,
        width: int | None = None,
        order: Callable[[FloatArray], FloatArray] | None = None,
    ) -> str:
        """The norm of the last axis of ``value``, times ``scale``. ``width``: of that axis, where it has no weight.
        ``order``: puts the weights in the order of ``value``."""
        graph, factor = self._graph, np.float32(scale)
        stored = self._read(f"{name}.weight") if spec.weight else np.ones(width or self._spec.hidden_size, np.float32)
        stored = order(stored) if order else stored
        weight = graph.vector(f"{name}.weight", (stored + np.float32(spec.offset)) * factor)
        if spec.kind == "rms":
            return graph.op("RMSNormalization", [value, weight], name, axis=-1, epsilon=spec.eps)
        bias = [graph.vector(f"{name}.bias", self._read(f"{name}.bias") * factor)] if spec.bias else []
        return graph.op("LayerNormalization", [value, weight, *bias], name, axis=-1, epsilon=spec.eps)

    def _position_and_type_rows(self, spec: EmbeddingsSpec, name: str) -> list[str]:
        graph = self._graph
        parts = []
        if spec.patches and (own := spec.patches.shares):
            shares = graph.input(own.name, DType.FP32, ["T", own.num_rows])
            table = graph.fp32(f"{name}.position.weight", self._read(f"{name}.position.weight"))
            resized = graph.op("MatMul", [shares, table], f"{name}.positions")
            parts.append(graph.cast(resized, graph.types.compute, f"{name}.positions.cast"))
        elif spec.patches and spec.patches.axial:
            tables = self._read(f"{name}.axial_position.weight")
            for axis, table in zip(axial_rows(spec.patches), tables, strict=True):
                stored = graph.table(f"{name}.axial_position.{axis}", table)
                parts.append(graph.lookup(stored, graph.input(axis, DType.INT32, ["T"]), f"{name}.positions.{axis}"))
        elif spec.max_positions:
            rows = graph.input(position_rows(spec), DType.INT32, ["T"])
            parts.append(graph.lookup(self._table(f"{name}.position"), rows, f"{name}.positions"))
        if spec.type_vocab_size == 1:
            row = graph.vector(f"{name}.type.weight", self._read(f"{name}.type.weight"))
            ids = graph.input("token_type_ids", DType.INT32, ["T"]) if self._adapters.adapts(f"{name}.type") else ""
            parts.append(self._adapters.looked_up(row, ids, f"{name}.type"))
        elif spec.type_vocab_size > 1:
            token_type_ids = graph.input("token_type_ids", DType.INT32, ["T"])
            rows = graph.lookup(self._table(f"{name}.type"), token_type_ids, f"{name}.types")
            parts.append(self._adapters.looked_up(rows, token_type_ids, f"{name}.type"))
        if spec.task_vocab_size:
            parts.append(graph.vector(f"{name}.task.weight", self._read(f"{name}.task.weight")[:1]))
        return parts

    def _attend(self, hidden: str, encoded: str | None, spec: AttentionSpec, name: str) -> str:
        """Attention of tokens to each other, or to the states ``encoded``."""
        if encoded is None:
            query, key, value = self._projected(hidden, ("query", "key", "value"), spec, name)
        else:
            (query,) = self._projected(hidden, ("query",), spec, name)
            key, value = self._projected(encoded, ("key", "value"), spec, name)
        if spec.qk_norm or spec.rope:
            # The score scale is folded into the query's weights; a norm would remove it, so with one it is applied
            # after that.
            query = self._turned(query, spec, spec.num_heads, f"{name}.query", spec.scale if spec.qk_norm else 1.0)
            key = self._turned(key, spec, spec.num_kv_heads, f"{name}.key", 1.0)
        if spec.value_norm:
            split = self._graph.constant([0, spec.num_kv_heads, spec.head_dim])
            heads = self._graph.op("Reshape", [value, split], f"{name}.value.heads")
            heads = self._norm(heads, spec.value_norm, f"{name}.value_norm", width=spec.head_dim)
            value = self._graph.op("Reshape", [heads, self._graph.constant([0, spec.kv_width])], f"{name}.value.packed")
        context = self._attention.emit(query, key, value, spec, self._position_tables(spec, name), name)
        return self._linear(context, f"{name}.output", spec.output_bias)

    def _projected(self, hidden: str, roles: Sequence[str], spec: AttentionSpec, name: str) -> list[str]:
        """``hidden`` through one matrix for all ``roles``; the query's rows carry the score scale."""
        graph, joined = self._graph, f"{name}.{''.join(role[0] for role in roles)}"
        factors = {"query": 1.0 if spec.qk_norm else spec.scale}
        sizes = [spec.width if role == "query" else spec.kv_width for role in roles]

        def stacked(rows: Sequence[FloatArray]) -> FloatArray:
            return np.concatenate([in_order(rows_of, role) for rows_of, role in zip(rows, roles, strict=True)])

        def in_order(rows: FloatArray, role: str) -> FloatArray:
            rows = rows * np.float32(factors.get(role, 1.0))
            return rows_for_halves(rows, spec) if is_reordered(spec) and role != "value" else rows

        def bias(role: str) -> FloatArray:
            is_there = role != "key" or spec.key_bias
            return self._read(f"{name}.{role}.bias") if is_there else np.zeros(spec.kv_width, np.float32)

        matrices = [self._matrix(joined, f"{name}.{role}.weight") for role in roles]
        scales = [it.row_scales for it in matrices if it.row_scales is not None]
        product = graph.linear(
            joined,
            hidden,
            stacked([it.values for it in matrices]),
            stacked([bias(role) for role in roles]) if spec.bias else None,
            stacked(scales) if len(scales) == len(roles) else None,
        )
        parts = graph.split(product, sizes, f"{joined}.split", axis=1) if len(roles) > 1 else [product]
        parts = self._adapters.added(
            parts,
            hidden,
            [f"{name}.{role}" for role in roles],
            lambda rows, layer: in_order(rows, layer.rpartition(".")[2]),
        )
        if spec.clip is None:
            return parts
        bounds = [spec.clip * factors.get(role, 1.0) for role in roles]
        return [self._clipped(value, bound) for value, bound in zip(parts, bounds, strict=True)]

    def _clipped(self, value: str, bound: float) -> str:
        compute = self._graph.types.compute.numpy
        bounds = [self._graph.constant(limit, compute) for limit in (-bound, bound)]
        return self._graph.op("Clip", [value, *bounds], f"{value}.clipped")

    def _turned(self, value: str, spec: AttentionSpec, num_heads: int, name: str, scale: float) -> str:
        """``value`` [T, heads * head_dim] normalized, scaled and rotated."""
        graph = self._graph
        if spec.qk_norm and spec.qk_norm_joint:
            value = self._norm(value, spec.qk_norm, f"{name}_norm", scale)
        heads = graph.op("Reshape", [value, graph.constant([0, num_heads, spec.head_dim])], f"{name}.heads")
        if spec.qk_norm and not spec.qk_norm_joint:
            order = partial(rows_for_halves, spec=spec) if is_reordered(spec) else None
            heads = self._norm(heads, spec.qk_norm, f"{name}_norm", scale, order=order)
        if spec.rope:
            if self._rotations is None:
                self._rotations = Rotations(graph, self._max_seq_len)
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
        if spec.inner_norm:
            inner = self._norm(inner, spec.inner_norm, f"{name}.norm")
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
        """DeBERTa's table through a projection of the layer, [heads, head_dim, rows]: constant, so computed at build
        time."""
        assert spec.disentangled is not None
        rows = self._read("relative_positions.weight")
        if spec.disentangled.norm:
            weight, bias = (self._read(f"relative_positions_norm.{kind}") for kind in ("weight", "bias"))
            centred = rows - rows.mean(axis=1, keepdims=True)
            deviation = np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + np.float32(spec.disentangled.norm.eps))
            rows = centred / deviation * weight + bias
        projected = rows @ self._read(f"{name}.{role}.weight").T
        if role != "position_key" or spec.disentangled.key_bias:
            projected = projected + self._read(f"{name}.{role}.bias")
        by_head = (projected * np.float32(scale)).reshape(-1, spec.num_heads, spec.head_dim).transpose(1, 2, 0)
        return self._graph.vector(f"{name}.{role}.positions", by_head)

    def _linear(self, value: str, name: str, bias: bool = True) -> str:
        matrix = self._matrix(name, f"{name}.weight")
        offset = self._read(f"{name}.bias") if bias else None
        product = self._graph.linear(name, value, matrix.values, offset, matrix.row_scales)
        return self._adapters.added([product], value, [name])[0]

    def _matrix(self, layer: str, name: str) -> _Matrix:
        """The matrix called ``name`` of linear layer ``layer``."""
        quantization = self._graph.quantized(layer)
        if quantization is None:
            return _Matrix(self._read(name))
        return _Matrix(self._read(name), quantization.row_scales.get(name))

    def _scaled(self, value: str, factor: float, name: str) -> str:
        return self._graph.op("Mul", [value, self._graph.constant(factor, self._graph.types.compute.numpy)], name)

    def _position_ids(self) -> str:
        return self._graph.input("position_ids", DType.INT32, ["T"])

    def _table(self, name: str) -> str:
        return self._graph.table(f"{name}.weight", self._read(f"{name}.weight"))
