"""Lowerings of the attention core. All take and give packed tokens, ``[T, width]``.

``padded``: two Gathers around a padded core; everything else of the model stays packed. The core is a function of the
target, because what fuses best differs (docs/decisions.md): OpenVINO recognizes MatMul-Add-Softmax-MatMul, TensorRT
wants its own attention op with per-sequence lengths.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
from onnx import FunctionProto, helper

from bei_build.graph.writer import OPSET, DType, GraphWriter
from bei_build.spec import AttentionSpec

_TRT_DOMAIN = "trt"
_MASKED = -1e9  # added to scores of empty slots; finite, so that no row of a softmax can be NaN


class AttentionCore(Enum):
    """How the padded core is written."""

    MATMUL_SOFTMAX = "matmul_softmax"
    TRT_ATTENTION = "trt_attention"


class PaddedAttention:
    """Emits the ``padded`` lowering. Made once per graph: index inputs and mask are shared by all layers."""

    def __init__(self, graph: GraphWriter, core: AttentionCore) -> None:
        self._graph = graph
        self._core = core
        self._pad_index = graph.input("pad_index", DType.INT32, ["B", "S"])
        self._unpad_index = graph.input("unpad_index", DType.INT32, ["T"])
        if core is AttentionCore.TRT_ATTENTION:
            self._seq_lens = graph.input("seq_lens", DType.INT32, ["B"])
            graph.function(_trt_attention_body())
        else:
            self._bias = self._additive_mask()

    def emit(self, query: str, key: str, value: str, spec: AttentionSpec, name: str) -> str:
        """Attention over ``query``, ``key``, ``value`` ([T, width] each, query already scaled); [T, width]."""
        graph = self._graph
        query, key, value = (
            self._pad(x, spec, f"{name}.{role}") for x, role in ((query, "q"), (key, "k"), (value, "v"))
        )
        context = self._attend(query, key, value, name)
        by_slot = graph.op("Transpose", [context], f"{name}.by_slot", perm=[0, 2, 1, 3])
        flat = graph.op("Reshape", [by_slot, graph.constant([-1, spec.width])], f"{name}.flat")
        return graph.op("Gather", [flat, self._unpad_index], f"{name}.unpadded", axis=0)

    def _pad(self, tensor: str, spec: AttentionSpec, name: str) -> str:
        graph = self._graph
        padded = graph.op("Gather", [tensor, self._pad_index], f"{name}.padded", axis=0)
        shape = graph.constant([0, 0, spec.num_heads, spec.head_dim])
        split = graph.op("Reshape", [padded, shape], f"{name}.heads")
        return graph.op("Transpose", [split], f"{name}.by_head", perm=[0, 2, 1, 3])

    def _attend(self, query: str, key: str, value: str, name: str) -> str:
        graph = self._graph
        if self._core is AttentionCore.TRT_ATTENTION:
            inputs = [query, key, value, "", "", self._seq_lens]  # Q K V mask query_lengths kv_lengths
            return graph.op("TRT_Attention", inputs, f"{name}.attention", domain=_TRT_DOMAIN, TRT_decomposable=1)
        key_t = graph.op("Transpose", [key], f"{name}.key_t", perm=[0, 1, 3, 2])
        scores = graph.op("MatMul", [query, key_t], f"{name}.scores")
        masked = graph.op("Add", [scores, self._bias], f"{name}.masked")
        weights = graph.op("Softmax", [masked], f"{name}.weights", axis=-1)
        return graph.op("MatMul", [weights, value], f"{name}.context")

    def _additive_mask(self) -> str:
        graph = self._graph
        one, scale = graph.constant(1.0, np.float32), graph.constant(-_MASKED, np.float32)
        shifted = graph.op("Sub", [graph.input("slot_mask", DType.FP32, ["B", "S"]), one], "mask.shifted")
        additive = graph.op("Mul", [shifted, scale], "mask.additive")
        return graph.op("Unsqueeze", [additive, graph.constant([1, 2])], "mask.bias")


def _trt_attention_body() -> FunctionProto:
    """What ``trt::TRT_Attention`` computes in its padded form, in standard operators.

    TensorRT's parser ignores the body and uses its own importer; ONNX Runtime inlines it, which is how the graph
    for TensorRT is tested without a GPU (TensorRT documentation: TRT_custom_ops, input 5 is kv_lengths).
    """
    nodes = [
        helper.make_node("Shape", ["K"], ["num_slots"], start=2, end=3),
        helper.make_node("Constant", [], ["zero"], value_int=0),
        helper.make_node("Constant", [], ["one"], value_int=1),
        helper.make_node("Constant", [], ["axes"], value_ints=[1, 2, 3]),
        helper.make_node("Constant", [], ["axis"], value_ints=[0]),
        helper.make_node("Squeeze", ["num_slots", "axis"], ["num_slots_scalar"]),
        helper.make_node("Range", ["zero", "num_slots_scalar", "one"], ["slots"]),
        helper.make_node("Cast", ["kv_lengths"], ["lengths"], to=7),
        helper.make_node("Unsqueeze", ["lengths", "axes"], ["lengths_4d"]),
        helper.make_node("Less", ["slots", "lengths_4d"], ["mask_row"]),
        helper.make_node("Shape", ["Q"], ["num_queries"], start=2, end=3),
        helper.make_node("Concat", ["axis_one", "axis_one", "num_queries", "axis_one"], ["mask_shape"], axis=0),
        helper.make_node("Expand", ["mask_row", "mask_shape"], ["mask"]),
        helper.make_node("Attention", ["Q", "K", "V", "mask"], ["Y"], scale=1.0),
    ]
    nodes.insert(0, helper.make_node("Constant", [], ["axis_one"], value_ints=[1]))
    return helper.make_function(
        _TRT_DOMAIN,
        "TRT_Attention",
        ["Q", "K", "V", "attn_mask", "query_lengths", "kv_lengths"],
        ["Y"],
        nodes,
        [helper.make_opsetid("", OPSET)],
        attributes=["TRT_decomposable"],
    )
