"""Lowerings of the attention core, chosen for each layer. Inputs and outputs are packed tokens, ``[T, width]``.

``padded``: two Gathers around a padded core; all other parts of the model stay packed. The core depends on the target,
because different patterns fuse best (docs/decisions.md): OpenVINO recognizes MatMul-Add-Softmax-MatMul, TensorRT has
its own attention op with per-sequence lengths. ``masked``: the same op with a mask (windows, biases by position).
``primitive``: TensorRT's op does not support soft caps and DeBERTa's scores; those are composed of primitives, as is
attention within windows of images.
``packed``: the op on packed tokens, with the starts of sequences, for GPUs that have a kernel for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from bei.engine.packed_attention import AttentionSite
from bei_build.onnx_graph.attention_functions import DOMAIN, OP, Form, body_of
from bei_build.onnx_graph.positions import RELATIVE_BIAS, ScoreBiases
from bei_build.onnx_graph.writer import GraphWriter
from bei_build.spec.dtypes import DType
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import AttentionSpec, DisentangledSpec
from bei_build.spec.position_tables import alibi_slopes

Lowering: TypeAlias = Literal["packed", "padded", "masked", "primitive"]

HEAD_DIM_STEP = 8  # TensorRT-RTX fails on attention over heads of other widths (rubert-tiny has 26)


class AttentionCore(Enum):
    """Form of the core: primitives, TensorRT's op, or that op on packed tokens wherever possible."""

    MATMUL_SOFTMAX = "matmul_softmax"
    TRT_ATTENTION = "trt_attention"
    TRT_PACKED = "trt_packed"


@dataclass(frozen=True)
class PositionTables:
    """Position tables of one layer's scores.

    ``relative_bias`` float32 [2 * max_seq_len - 1, heads], shared by all layers; DeBERTa's tables through the layer's
    own projections, as names of values: ``keys`` [heads, head_dim, rows] for the queries, ``queries`` the same for the
    keys.
    """

    relative_bias: npt.NDArray[np.float32] | None = None
    keys: str | None = None
    queries: str | None = None


def lowerings(spec: ModelSpec, core: AttentionCore) -> list[Lowering]:
    """The lowering of each attention of ``spec`` with ``core``, in the graph's order."""
    return [_lowering(attention, core, partial_keys=spec.partial_keys) for attention in spec.attentions]


def _lowering(spec: AttentionSpec, core: AttentionCore, *, partial_keys: bool) -> Lowering:
    """The lowering of one attention. Packed keys lie end to end, so the packed form cannot exclude some tokens of a
    sequence."""
    if core is AttentionCore.MATMUL_SOFTMAX or spec.softcap is not None or spec.disentangled or spec.image_windows:
        return "primitive"
    if spec.window is not None or spec.alibi or spec.relative_bias is not None:
        return "masked"
    return "packed" if core is AttentionCore.TRT_PACKED and not partial_keys else "padded"


class AttentionEmitter:
    """Emits the attention of all layers. One instance per graph: indices and masks are shared.

    ``partial_keys``: tokens at the end of a sequence may be queries only, not keys. ``sites``: what was emitted for
    OpenVINO, whose engine may compute it otherwise; DeBERTa's is not among them, nor that within windows of images.
    """

    def __init__(self, graph: GraphWriter, core: AttentionCore, max_seq_len: int, *, partial_keys: bool) -> None:
        self._graph = graph
        self._core = core
        self._partial_keys = partial_keys
        self._biases = ScoreBiases(graph, max_seq_len, partial_keys=partial_keys)
        self.sites: list[AttentionSite] = []

    def emit(self, query: str, key: str, value: str, spec: AttentionSpec, tables: PositionTables, name: str) -> str:
        """Attention over packed ``query`` [T, width], which is scaled already, ``key`` and ``value`` [T, kv_width]."""
        lowering = _lowering(spec, self._core, partial_keys=self._partial_keys)
        if lowering == "packed":
            return self._packed(query, key, value, spec, name)
        graph = self._graph
        fused = lowering != "primitive"
        repeat = 1 if fused else spec.num_heads // spec.num_kv_heads
        queries = self._pad(query, spec.num_heads, spec, f"{name}.q")
        keys, values = (
            self._pad(tensor, spec.num_kv_heads, spec, f"{name}.{role}", repeat)
            for tensor, role in ((key, "k"), (value, "v"))
        )
        context = (self._fused if fused else self._written_out)(queries, keys, values, spec, tables, name)
        by_slot = graph.op("Transpose", [context], f"{name}.by_slot", perm=[0, 2, 1, 3])
        flat = graph.op("Reshape", [by_slot, graph.constant([-1, spec.width])], f"{name}.flat")
        unpad = spec.image_windows.unpad_index if spec.image_windows else "unpad_index"
        packed = graph.op("Gather", [flat, graph.input(unpad, DType.INT32, ["T"])], f"{name}.unpadded", axis=0)
        if self._partial_keys and spec.window is not None:
            # Rows without a key in their window: the core's result comes from padding, or is NaN. Torch's attention
            # gives zeros.
            nothing = graph.constant(0.0, graph.types.compute.numpy)
            packed = graph.op("Where", [self._biases.near_a_key(spec.window), packed, nothing], f"{name}.seen")
        if self._core is AttentionCore.MATMUL_SOFTMAX and not spec.disentangled and not spec.image_windows:
            self.sites.append(self._site(query, key, value, packed, spec, tables))
        return packed

    def _site(
        self, query: str, key: str, value: str, context: str, spec: AttentionSpec, tables: PositionTables
    ) -> AttentionSite:
        has_table = tables.relative_bias is not None
        return AttentionSite(
            query=query,
            key=key,
            value=value,
            context=context,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            causal=spec.causal,
            window=spec.window,
            softcap=spec.softcap,
            biases=RELATIVE_BIAS if has_table else None,
            alibi_slopes=alibi_slopes(spec.num_heads).tolist() if spec.alibi else None,
            partial_keys=self._partial_keys,
        )

    def _packed(self, query: str, key: str, value: str, spec: AttentionSpec, name: str) -> str:
        graph = self._graph
        heads = []
        for tensor, num_heads, role in (
            (query, spec.num_heads, "q"),
            (key, spec.num_kv_heads, "k"),
            (value, spec.num_kv_heads, "v"),
        ):
            split = graph.op("Reshape", [tensor, graph.constant([0, num_heads, spec.head_dim])], f"{name}.{role}.heads")
            heads.append(self._widened(split, spec.head_dim, rank=3))
        # Two inputs with equal values: TensorRT has crashed on one tensor wired to both.
        lengths = [graph.input(f"cu_{role}_lens", DType.INT32, ["B+1"]) for role in ("query", "key")]
        form = Form.PACKED_CAUSAL if spec.causal else Form.PACKED
        context = self._attention_op(form, [*heads, "", *lengths], spec, f"{name}.attention", rank=3)
        return graph.op("Reshape", [context, graph.constant([0, spec.width])], f"{name}.flat")

    def _pad(self, tensor: str, num_heads: int, spec: AttentionSpec, name: str, repeat: int = 1) -> str:
        graph = self._graph
        if spec.image_windows:
            pad_index = graph.input(spec.image_windows.pad_index, DType.INT32, ["W", "V"])
        else:
            pad_index = graph.input("pad_index", DType.INT32, ["B", "S"])
        padded = graph.op("Gather", [tensor, pad_index], f"{name}.padded", axis=0)
        shape = graph.constant([0, 0, num_heads, spec.head_dim])
        split = graph.op("Reshape", [padded, shape], f"{name}.heads")
        if repeat > 1:
            heads = graph.constant(np.repeat(np.arange(num_heads), repeat), np.int32)
            split = graph.op("Gather", [split, heads], f"{name}.repeated", axis=2)
        return graph.op("Transpose", [split], f"{name}.by_head", perm=[0, 2, 1, 3])

    def _fused(self, query: str, key: str, value: str, spec: AttentionSpec, tables: PositionTables, name: str) -> str:
        lengths = self._graph.input("key_lens" if self._partial_keys else "seq_lens", DType.INT32, ["B"])
        mask, form = "", Form.PADDED_CAUSAL if spec.causal else Form.PADDED
        if _lowering(spec, self._core, partial_keys=self._partial_keys) == "masked":  # the mask includes causality
            mask = self._biases.without_empty_slots(spec, tables.relative_bias)
            form = Form.ADDITIVE if spec.alibi or tables.relative_bias is not None else Form.BOOLEAN
        heads = [self._widened(tensor, spec.head_dim, rank=4) for tensor in (query, key, value)]
        return self._attention_op(form, [*heads, mask, "", lengths], spec, f"{name}.attention", rank=4)

    def _attention_op(self, form: Form, inputs: list[str], spec: AttentionSpec, name: str, rank: int) -> str:
        """The op with ``inputs``: Q, K, V, mask, query_lengths, kv_lengths."""
        graph = self._graph
        graph.function(body_of(form))
        graph.op(OP, inputs, name, domain=DOMAIN, overload=form.value, **form.attributes)
        if spec.head_dim % HEAD_DIM_STEP == 0:
            return name
        window = [graph.constant([bound]) for bound in (0, spec.head_dim, rank - 1)]
        return graph.op("Slice", [name, *window], f"{name}.narrowed")

    def _widened(self, heads: str, head_dim: int, rank: int) -> str:
        """``heads`` [..., head_dim] with zeros after each head, up to a width that the attention op supports."""
        if head_dim % HEAD_DIM_STEP == 0:
            return heads
        filler = self._graph.constant([0] * (2 * rank - 1) + [-head_dim % HEAD_DIM_STEP])
        return self._graph.op("Pad", [heads, filler], f"{heads}.widened")

    def _written_out(
        self, query: str, key: str, value: str, spec: AttentionSpec, tables: PositionTables, name: str
    ) -> str:
        graph = self._graph
        key_t = graph.op("Transpose", [key], f"{name}.key_t", perm=[0, 1, 3, 2])
        scores = graph.op("MatMul", [query, key_t], f"{name}.scores")
        if spec.disentangled:
            if tables.keys:
                table, rows = self._relative(tables.keys, spec.disentangled, f"{name}.c2p", by_key=False)
                scores = self._add_by_row(scores, query, table, rows, f"{name}.c2p", transposed=False)
            if tables.queries:
                table, rows = self._relative(tables.queries, spec.disentangled, f"{name}.p2c", by_key=True)
                scores = self._add_by_row(scores, key, table, rows, f"{name}.p2c", transposed=True)
        if spec.softcap is not None:
            cap = graph.constant(spec.softcap, graph.types.compute.numpy)
            bounded = graph.op("Tanh", [graph.op("Div", [scores, cap], f"{name}.relative")], f"{name}.bounded")
            scores = graph.op("Mul", [bounded, cap], f"{name}.capped")
        bias = self._biases.additive(spec, tables.relative_bias)
        weights = graph.op("Softmax", [graph.op("Add", [scores, bias], f"{name}.masked")], f"{name}.weights", axis=-1)
        return graph.op("MatMul", [weights, value], f"{name}.context")

    def _relative(self, table: str, spec: DisentangledSpec, name: str, *, by_key: bool) -> tuple[str, str]:
        """DeBERTa's ``table``, and the row of it for each pair of slots; for OpenVINO only of rows that there are."""
        if self._core is not AttentionCore.MATMUL_SOFTMAX:
            return table, self._biases.disentangled_rows(spec, by_key=by_key)
        return self._biases.reached(table, spec, f"{name}.reached"), self._biases.reached_rows(spec, by_key=by_key)

    def _add_by_row(self, scores: str, value: str, table: str, rows: str, name: str, *, transposed: bool) -> str:
        """Add ``value @ table`` [B, heads, S, rows] to the scores, with the entries at ``rows`` [S, S] for each pair of
        slots."""
        graph = self._graph
        of_all_rows = graph.op("MatMul", [value, table], f"{name}.all")
        shape = graph.op("Shape", [scores], f"{name}.shape")
        index = graph.op("Expand", [rows, shape], f"{name}.index")
        term = graph.op("GatherElements", [of_all_rows, index], f"{name}.term", axis=3)
        if transposed:
            term = graph.op("Transpose", [term], f"{name}.term_t", perm=[0, 1, 3, 2])
        return graph.op("Add", [scores, term], name)
