"""``trt::TRT_Attention`` in standard operators: a local function for each form of the op.

TensorRT's parser goes by the op's name and uses its own importer; ONNX Runtime inlines the body, so graphs for TensorRT
can be tested without a GPU (TensorRT documentation: TRT_custom_ops). The forms are overloads of one function, so every
layer has the form that it needs. A parser that used the bodies, and confused them, would leave attentions without their
lengths: the compiler checks for that.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from onnx import FunctionProto, NodeProto, TensorProto, helper

from bei_build.onnx_graph.writer import OPSET

DOMAIN = "trt"
OP = "TRT_Attention"
_INPUTS = ["Q", "K", "V", "attn_mask", "query_lengths", "kv_lengths"]


class Form(Enum):
    """Forms of the op. Padded ones [B, heads, S, head_dim] have the lengths of keys, ``kv_lengths`` [B]; packed ones
    [T, heads, head_dim] have the starts of each sequence's queries and keys, [B + 1]."""

    PADDED = "padded"
    PADDED_CAUSAL = "padded_causal"
    BOOLEAN = "boolean"
    ADDITIVE = "additive"
    PACKED = "packed"
    PACKED_CAUSAL = "packed_causal"

    @property
    def attributes(self) -> dict[str, Any]:
        """The op's attributes. It must not be decomposed, so that TensorRT fails where it has no kernel."""
        packed = {"query_form": "packed_nhd", "kv_form": "packed_nhd"} if self in _PACKED else {}
        causal = {"causal_kind": "upper_left"} if self in _CAUSAL else {}
        return {"TRT_decomposable": 1, **packed, **causal}


_PACKED = (Form.PACKED, Form.PACKED_CAUSAL)
_CAUSAL = (Form.PADDED_CAUSAL, Form.PACKED_CAUSAL)


def body_of(form: Form) -> FunctionProto:
    """The function of ``form``, an overload with its name."""
    body = _Body()
    if form in _PACKED:
        body.packed(causal=form in _CAUSAL)
    else:
        body.padded(form)
    opsets = [helper.make_opsetid("", OPSET)]
    return helper.make_function(
        DOMAIN, OP, _INPUTS, ["Y"], body.nodes, opsets, attributes=list(form.attributes), overload=form.value
    )


class _Body:
    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self._node("Constant", [], "axis_zero", value_ints=[0])
        self._node("Constant", [], "axis_one", value_ints=[1])
        self._node("Constant", [], "zero", value_int=0)
        self._node("Constant", [], "one", value_int=1)

    def padded(self, form: Form) -> None:
        """Attention where the mask is True; the standard op needs it as [B, 1, S, S]."""
        self._node("Constant", [], "axes", value_ints=[1, 2, 3])
        self._slots("key", "K", axis=2)
        self._slots("query", "Q", axis=2)
        self._node("Cast", ["kv_lengths"], "lengths", to=TensorProto.INT64)
        self._node("Unsqueeze", ["lengths", "axes"], "lengths_4d")
        self._node("Less", ["key_slots", "lengths_4d"], "in_sequence")
        self._node("Concat", ["axis_one", "axis_one", "num_query", "axis_one"], "mask_shape", axis=0)
        self._node("Expand", ["in_sequence", "mask_shape"], "full")
        final = "full"
        if form is Form.PADDED_CAUSAL:
            self._node("Unsqueeze", ["query_slots", "axis_one"], "query_column")
            self._node("LessOrEqual", ["key_slots", "query_column"], "not_later")
            final = self._node("And", ["full", "not_later"], "full_causal")
        elif form is Form.BOOLEAN:
            final = self._node("And", ["full", "attn_mask"], "full_visible")
        elif form is Form.ADDITIVE:
            self._node("Constant", [], "hidden_f32", value_float=-6e4)
            self._node("CastLike", ["hidden_f32", "attn_mask"], "hidden")
            final = self._node("Where", ["full", "attn_mask", "hidden"], "full_bias")
        self._node("Attention", ["Q", "K", "V", final], "Y", scale=1.0)

    def packed(self, *, causal: bool) -> None:
        """Attention of all tokens to all, with a mask for pairs within one sequence."""
        for role, tensor, lengths in (("query", "Q", "query_lengths"), ("key", "K", "kv_lengths")):
            self._slots(role, tensor, axis=0)
            self._sequences(role, lengths)
        self._node("Unsqueeze", ["query_sequence", "axis_one"], "query_sequence_column")
        final = self._node("Equal", ["query_sequence_column", "key_sequence"], "same_sequence")
        if causal:
            self._node("Unsqueeze", ["query_position", "axis_one"], "query_position_column")
            self._node("LessOrEqual", ["key_position", "query_position_column"], "not_later")
            final = self._node("And", ["same_sequence", "not_later"], "visible")
        for tensor in ("Q", "K", "V"):
            self._node("Transpose", [tensor], f"{tensor}_by_head", perm=[1, 0, 2])
            self._node("Unsqueeze", [f"{tensor}_by_head", "axis_zero"], f"{tensor}_4d")
        self._node("Attention", ["Q_4d", "K_4d", "V_4d", final], "Y_4d", scale=1.0)
        self._node("Squeeze", ["Y_4d", "axis_zero"], "Y_by_head")
        self._node("Transpose", ["Y_by_head"], "Y", perm=[1, 0, 2])

    def _slots(self, role: str, tensor: str, axis: int) -> None:
        """``{role}_slots``: 0, 1, 2, ... along ``axis`` of ``tensor``, and their count, ``num_{role}`` [1]."""
        self._node("Shape", [tensor], f"num_{role}", start=axis, end=axis + 1)
        self._node("Squeeze", [f"num_{role}", "axis_zero"], f"num_{role}_scalar")
        self._node("Range", ["zero", f"num_{role}_scalar", "one"], f"{role}_slots")

    def _sequences(self, role: str, lengths: str) -> None:
        """``{role}_sequence`` and ``{role}_position`` of every token. Tokens after the last sequence form another
        one."""
        self._node("Constant", [], f"{role}_far", value_ints=[2**31])
        self._node("Cast", [lengths], f"{role}_starts", to=TensorProto.INT64)
        self._node("Slice", [f"{role}_starts", "axis_one", f"{role}_far", "axis_zero"], f"{role}_ends")
        self._node("Unsqueeze", [f"{role}_slots", "axis_one"], f"{role}_column")
        self._node("LessOrEqual", [f"{role}_ends", f"{role}_column"], f"{role}_is_behind")
        self._node("Cast", [f"{role}_is_behind"], f"{role}_behind", to=TensorProto.INT64)
        self._node("ReduceSum", [f"{role}_behind", "axis_one"], f"{role}_sequence", keepdims=0)
        self._node("Gather", [f"{role}_starts", f"{role}_sequence"], f"{role}_start")
        self._node("Sub", [f"{role}_slots", f"{role}_start"], f"{role}_position")

    def _node(self, op_type: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [output], **attributes))
        return output
