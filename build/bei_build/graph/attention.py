"""Lowerings of the attention core. All take and give packed tokens, ``[T, width]``.

``padded``: two Gathers around a padded core; everything else of the model stays packed. The core is a function of the
target, because what fuses best differs (docs/decisions.md): OpenVINO recognizes MatMul-Add-Softmax-MatMul, TensorRT
wants its own attention op with per-sequence lengths. ``masked``: the same op with a mask (windows, biases by
position). ``primitive``: TensorRT's op has no place for soft caps and DeBERTa's scores; those are written out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import FunctionProto, NodeProto, helper

from bei_build.graph.positions import ScoreBiases
from bei_build.graph.writer import OPSET, DType, GraphWriter
from bei_build.spec import AttentionSpec

_TRT_DOMAIN = "trt"
_HEAD_DIM_STEP = 8  # TensorRT-RTX fails on attention over heads of other widths (rubert-tiny has 26)


class AttentionCore(Enum):
    """How the padded core is written."""

    MATMUL_SOFTMAX = "matmul_softmax"
    TRT_ATTENTION = "trt_attention"


@dataclass(frozen=True)
class PositionTables:
    """What one layer's scores get from weights about positions.

    ``relative_bias`` float32 [2 * max_seq_len - 1, heads], of all layers; DeBERTa's tables through the layer's own
    projections, names of values: ``keys`` [heads, head_dim, rows] for the queries, ``queries`` the same for the keys.
    """

    relative_bias: npt.NDArray[np.float32] | None = None
    keys: str | None = None
    queries: str | None = None


def is_primitive(spec: AttentionSpec) -> bool:
    """Whether TensorRT's attention op cannot express ``spec``."""
    return spec.softcap is not None or spec.disentangled is not None


def needs_mask(spec: AttentionSpec) -> bool:
    """Whether TensorRT's attention op needs a mask beside the lengths for ``spec``."""
    return spec.window is not None or spec.alibi or spec.relative_bias is not None


class PaddedAttention:
    """Emits the attention of all layers. Made once per graph: indices and masks are shared.

    ``partial_keys``: tokens at the end of a sequence may be no keys, and queries all the same.
    """

    def __init__(
        self,
        graph: GraphWriter,
        core: AttentionCore,
        attentions: tuple[AttentionSpec, ...],
        max_seq_len: int,
        *,
        partial_keys: bool,
    ) -> None:
        self._graph = graph
        self._core = core
        self._partial_keys = partial_keys
        self._biases = ScoreBiases(graph, max_seq_len, partial_keys=partial_keys)
        self._pad_index = graph.input("pad_index", DType.INT32, ["B", "S"])
        self._unpad_index = graph.input("unpad_index", DType.INT32, ["T"])
        fused = [attention for attention in attentions if not is_primitive(attention)]
        # One body for the op: all layers have masks or none, and what is causal in some only is a mask.
        some_causal = len({attention.causal for attention in fused}) > 1
        self._masked = some_causal or any(needs_mask(attention) for attention in fused)
        if core is AttentionCore.TRT_ATTENTION and fused:
            additive = any(attention.alibi or attention.relative_bias for attention in fused)
            mask = ("additive" if additive else "boolean") if self._masked else None
            graph.function(_trt_attention_body(mask, causal=fused[0].causal and not self._masked))

    def emit(self, query: str, key: str, value: str, spec: AttentionSpec, tables: PositionTables, name: str) -> str:
        """Attention over packed ``query`` [T, width], scaled already, ``key`` and ``value`` [T, kv_width]."""
        graph = self._graph
        fused = self._core is AttentionCore.TRT_ATTENTION and not is_primitive(spec)
        repeat = 1 if fused else spec.num_heads // spec.num_kv_heads
        query = self._pad(query, spec.num_heads, spec.head_dim, f"{name}.q")
        key, value = (
            self._pad(tensor, spec.num_kv_heads, spec.head_dim, f"{name}.{role}", repeat)
            for tensor, role in ((key, "k"), (value, "v"))
        )
        context = (self._fused if fused else self._written_out)(query, key, value, spec, tables, name)
        by_slot = graph.op("Transpose", [context], f"{name}.by_slot", perm=[0, 2, 1, 3])
        flat = graph.op("Reshape", [by_slot, graph.constant([-1, spec.width])], f"{name}.flat")
        packed = graph.op("Gather", [flat, self._unpad_index], f"{name}.unpadded", axis=0)
        if not self._partial_keys or spec.window is None:
            return packed
        # No key in its window: what the core gives is of its padding, or NaN. Torch's attention gives zeros.
        nothing = graph.constant(0.0, graph.types.compute.numpy)
        return graph.op("Where", [self._biases.near_a_key(spec.window), packed, nothing], f"{name}.seen")

    def _pad(self, tensor: str, num_heads: int, head_dim: int, name: str, repeat: int = 1) -> str:
        graph = self._graph
        padded = graph.op("Gather", [tensor, self._pad_index], f"{name}.padded", axis=0)
        shape = graph.constant([0, 0, num_heads, head_dim])
        split = graph.op("Reshape", [padded, shape], f"{name}.heads")
        if repeat > 1:
            heads = graph.constant(np.repeat(np.arange(num_heads), repeat), np.int32)
            split = graph.op("Gather", [split, heads], f"{name}.repeated", axis=2)
        return graph.op("Transpose", [split], f"{name}.by_head", perm=[0, 2, 1, 3])

    def _fused(self, query: str, key: str, value: str, spec: AttentionSpec, tables: PositionTables, name: str) -> str:
        graph = self._graph
        lengths = graph.input("key_lens" if self._partial_keys else "seq_lens", DType.INT32, ["B"])
        mask = self._biases.without_empty_slots(spec, tables.relative_bias) if self._masked else ""
        causal = {"causal_kind": "upper_left"} if spec.causal and not self._masked else {}
        query, key, value = (self._widened(tensor, spec.head_dim) for tensor in (query, key, value))
        inputs = [query, key, value, mask, "", lengths]  # Q K V mask query_lengths kv_lengths
        attended = f"{name}.attention"
        graph.op("TRT_Attention", inputs, attended, domain=_TRT_DOMAIN, TRT_decomposable=1, **causal)
        if spec.head_dim % _HEAD_DIM_STEP == 0:
            return attended
        window = [graph.constant([bound]) for bound in (0, spec.head_dim, 3)]
        return graph.op("Slice", [attended, *window], f"{name}.narrowed")

    def _widened(self, heads: str, head_dim: int) -> str:
        """``heads`` [B, heads, S, head_dim] with zeros behind each head, up to a width that the attention op takes."""
        if head_dim % _HEAD_DIM_STEP == 0:
            return heads
        filler = self._graph.constant([0] * 7 + [-head_dim % _HEAD_DIM_STEP])
        return self._graph.op("Pad", [heads, filler], f"{heads}.widened")

    def _written_out(
        self, query: str, key: str, value: str, spec: AttentionSpec, tables: PositionTables, name: str
    ) -> str:
        graph = self._graph
        key_t = graph.op("Transpose", [key], f"{name}.key_t", perm=[0, 1, 3, 2])
        scores = graph.op("MatMul", [query, key_t], f"{name}.scores")
        if spec.disentangled:
            if tables.keys:
                rows = self._biases.disentangled_rows(spec.disentangled, by_key=False)
                scores = self._add_by_row(scores, query, tables.keys, rows, f"{name}.c2p", transposed=False)
            if tables.queries:
                rows = self._biases.disentangled_rows(spec.disentangled, by_key=True)
                scores = self._add_by_row(scores, key, tables.queries, rows, f"{name}.p2c", transposed=True)
        if spec.softcap is not None:
            cap = graph.constant(spec.softcap, graph.types.compute.numpy)
            bounded = graph.op("Tanh", [graph.op("Div", [scores, cap], f"{name}.relative")], f"{name}.bounded")
            scores = graph.op("Mul", [bounded, cap], f"{name}.capped")
        bias = self._biases.additive(spec, tables.relative_bias)
        weights = graph.op("Softmax", [graph.op("Add", [scores, bias], f"{name}.masked")], f"{name}.weights", axis=-1)
        return graph.op("MatMul", [weights, value], f"{name}.context")

    def _add_by_row(self, scores: str, value: str, table: str, rows: str, name: str, *, transposed: bool) -> str:
        """Add ``value @ table`` [B, heads, S, rows], each slot's row read at ``rows`` [S, S], to the scores."""
        graph = self._graph
        of_all_rows = graph.op("MatMul", [value, table], f"{name}.all")
        shape = graph.op("Shape", [scores], f"{name}.shape")
        index = graph.op("Expand", [rows, shape], f"{name}.index")
        term = graph.op("GatherElements", [of_all_rows, index], f"{name}.term", axis=3)
        if transposed:
            term = graph.op("Transpose", [term], f"{name}.term_t", perm=[0, 1, 3, 2])
        return graph.op("Add", [scores, term], name)


def _trt_attention_body(mask: str | None, *, causal: bool) -> FunctionProto:
    """What ``trt::TRT_Attention`` computes in its padded form, in standard operators.

    TensorRT's parser ignores the body and uses its own importer; ONNX Runtime inlines it, which is how the graph
    for TensorRT is tested without a GPU (TensorRT documentation: TRT_custom_ops, input 5 is kv_lengths). ``mask``:
    None, boolean or additive, all layers alike.
    """
    nodes: list[NodeProto] = []

    def node(op_type: str, inputs: list[str], output: str, **attributes: Any) -> None:
        nodes.append(helper.make_node(op_type, inputs, [output], **attributes))

    node("Constant", [], "axis_zero", value_ints=[0])
    node("Constant", [], "axis_one", value_ints=[1])
    node("Constant", [], "zero", value_int=0)
    node("Constant", [], "one", value_int=1)
    node("Constant", [], "axes", value_ints=[1, 2, 3])
    node("Shape", ["K"], "num_keys", start=2, end=3)
    node("Shape", ["Q"], "num_queries", start=2, end=3)
    node("Squeeze", ["num_keys", "axis_zero"], "num_keys_scalar")
    node("Range", ["zero", "num_keys_scalar", "one"], "key_slots")
    node("Cast", ["kv_lengths"], "lengths", to=7)
    node("Unsqueeze", ["lengths", "axes"], "lengths_4d")
    node("Less", ["key_slots", "lengths_4d"], "in_sequence")
    node("Concat", ["axis_one", "axis_one", "num_queries", "axis_one"], "mask_shape", axis=0)
    node("Expand", ["in_sequence", "mask_shape"], "full")
    final = "full"
    if causal:
        node("Squeeze", ["num_queries", "axis_zero"], "num_queries_scalar")
        node("Range", ["zero", "num_queries_scalar", "one"], "query_slots")
        node("Unsqueeze", ["query_slots", "axis_one"], "query_column")
        node("LessOrEqual", ["key_slots", "query_column"], "not_later")
        node("And", ["full", "not_later"], "full_causal")
        final = "full_causal"
    if mask == "boolean":
        node("And", ["full", "attn_mask"], "full_visible")
        final = "full_visible"
    elif mask == "additive":
        node("Constant", [], "hidden_f32", value_float=-6e4)
        node("CastLike", ["hidden_f32", "attn_mask"], "hidden")
        node("Where", ["full", "attn_mask", "hidden"], "full_bias")
        final = "full_bias"
    node("Attention", ["Q", "K", "V", final], "Y", scale=1.0)
    return helper.make_function(
        _TRT_DOMAIN,
        "TRT_Attention",
        ["Q", "K", "V", "attn_mask", "query_lengths", "kv_lengths"],
        ["Y"],
        nodes,
        [helper.make_opsetid("", OPSET)],
        attributes=["TRT_decomposable", "causal_kind"] if causal else ["TRT_decomposable"],
    )
