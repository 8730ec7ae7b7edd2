"""The graphs for TensorRT, compiled by TensorRT-RTX ahead of time for SM89, and the compiler's properties.

TensorRT-RTX has TensorRT's parser and type rules and needs no GPU to compile. It does not show that TensorRT has the
same kernels, nor their speed.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from onnx import ModelProto, TensorProto, helper

from bei.errors import CompileError
from bei_build.onnx_graph.attention import AttentionCore
from bei_build.spec.dtypes import DType
from bei_build.spec.parts import POOLINGS, Pooling
from tests.bei_build.targets.rtx import (
    AheadOfTimeBuilder,
    attention_nodes,
    compiled,
    edited,
    forbid_decomposition,
    limits_of,
    module_like,
    needs_rtx,
)
from tests.bei_build.targets.tiny import HEADS, MAX_SEQ_LEN, graph_of, tiny_spec, with_tail, with_window

LIMITS = limits_of(MAX_SEQ_LEN)


@needs_rtx
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one == "bert" else pytest.mark.slow) for one in HEADS]
)
def test_every_family_and_pooling_compiles(trt: ModuleType, tmp_path: Path, family: str, pooling: Pooling) -> None:
    assert compiled(trt, graph_of(tiny_spec(family, (pooling,)), tmp_path))


@needs_rtx
@pytest.mark.parametrize("family", HEADS)
def test_concatenated_poolings_and_a_tail_compile(trt: ModuleType, tmp_path: Path, family: str) -> None:
    assert compiled(trt, graph_of(with_tail(tiny_spec(family, POOLINGS)), tmp_path))


@needs_rtx
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP32])
def test_other_types_compile(trt: ModuleType, tmp_path: Path, dtype: DType) -> None:
    assert compiled(trt, graph_of(with_tail(tiny_spec()), tmp_path, dtype))


@needs_rtx
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_16_bit_attention_has_a_fused_kernel(trt: ModuleType, tmp_path: Path, dtype: DType) -> None:
    """If it must not decompose it, TensorRT-RTX fails where it has no kernel, as in fp32."""
    assert compiled(trt, edited(graph_of(tiny_spec(), tmp_path, dtype), forbid_decomposition))


@needs_rtx
def test_attention_may_be_decomposed(trt: ModuleType, tmp_path: Path) -> None:
    path = graph_of(tiny_spec(), tmp_path, DType.FP32)
    with pytest.raises(CompileError, match="not supported by a dedicated kernel"):
        compiled(trt, edited(path, forbid_decomposition))


# Errors that TensorRT accepts silently, or reports only in its log.


@needs_rtx
def test_an_unused_input_fails(trt: ModuleType, tmp_path: Path) -> None:
    path = edited(graph_of(tiny_spec(), tmp_path), add_input)
    with pytest.raises(CompileError, match="reads the input never_read"):
        compiled(trt, path)


@needs_rtx
def test_an_input_that_leads_nowhere_fails(trt: ModuleType, tmp_path: Path) -> None:
    def edit(model: ModelProto) -> None:
        add_input(model)
        model.graph.node.append(helper.make_node("Cast", ["never_read"], ["nowhere"], to=TensorProto.FLOAT))

    with pytest.raises(CompileError, match="Input Tensor never_read is unused"):
        compiled(trt, edited(graph_of(tiny_spec(), tmp_path), edit))


def add_input(model: ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("never_read", TensorProto.INT32, ["T"]))


@needs_rtx
@pytest.mark.parametrize(
    "lengths",
    [[], ["", "seq_lens"], ["", "", "", "", "seq_lens"], ["slot_mask_4d"]],
    ids=["dropped", "as query lengths", "where TensorRT 11.0 had them", "as a mask"],
)
def test_lengths_that_are_not_wired_fail(trt: ModuleType, tmp_path: Path, lengths: list[str]) -> None:
    def edit(model: ModelProto) -> None:
        for node in attention_nodes(model):
            node.input[3:] = lengths
        mask = helper.make_node("Unsqueeze", ["slot_mask_16", "mask_axes"], ["slot_mask_4d"])
        model.graph.node.insert(0, mask)
        model.graph.node.insert(0, helper.make_node("Cast", ["slot_mask"], ["slot_mask_16"], to=TensorProto.FLOAT16))
        model.graph.initializer.append(helper.make_tensor("mask_axes", TensorProto.INT64, [2], [1, 2]))

    with pytest.raises(CompileError, match="key/value lengths: it would attend to padding"):
        compiled(trt, edited(graph_of(tiny_spec(), tmp_path), edit))


@needs_rtx
def test_attention_that_is_not_fused_fails(trt: ModuleType, tmp_path: Path) -> None:
    path = graph_of(tiny_spec(), tmp_path, DType.FP32, AttentionCore.MATMUL_SOFTMAX)
    with pytest.raises(CompileError, match="0 attention layers of 2"):
        compiled(trt, path)


@needs_rtx
def test_a_mask_that_is_not_expected_fails(trt: ModuleType, tmp_path: Path) -> None:
    """An unexpected mask costs a layer its faster kernel, and a missing one its window."""
    path = graph_of(with_window(tiny_spec()), tmp_path)
    with pytest.raises(CompileError, match=r"layers\.1.*is to be padded, and TensorRT gave it a mask"):
        compiled(trt, path)
    with pytest.raises(CompileError, match=r"layers\.0.*is to be masked, and TensorRT gave it no mask"):
        compiled(trt, path, ["masked", "masked"])
    assert compiled(trt, path, ["padded", "masked"])


@needs_rtx
def test_a_form_that_is_not_expected_fails(trt: ModuleType, tmp_path: Path) -> None:
    packed = graph_of(tiny_spec(), tmp_path / "packed", core=AttentionCore.TRT_PACKED)
    with pytest.raises(CompileError, match="is to be padded, and TensorRT reads it otherwise"):
        compiled(trt, packed)
    with pytest.raises(CompileError, match="is to be packed, and TensorRT reads it otherwise"):
        compiled(trt, graph_of(tiny_spec(), tmp_path / "padded"), ["packed", "packed"])


@needs_rtx
def test_an_ill_typed_graph_fails_with_the_parsers_words(trt: ModuleType, tmp_path: Path) -> None:
    def edit(model: ModelProto) -> None:
        index = next(i for i, node in enumerate(model.graph.node) if node.name == "layers.0.mlp_residual")
        add = model.graph.node[index]
        cast_up = helper.make_node("Cast", [add.input[1]], ["wide"], to=TensorProto.FLOAT)
        add.input[1] = "wide"
        model.graph.node.insert(index, cast_up)

    with pytest.raises(CompileError) as failure:
        compiled(trt, edited(graph_of(tiny_spec(), tmp_path), edit))
    message = str(failure.value)
    assert "layers.0.mlp_residual (Add)" in message
    assert "must have same input types" in message
    assert "\n" not in message


@needs_rtx
def test_a_file_that_is_not_a_graph_fails(trt: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not ONNX")
    with pytest.raises(CompileError, match="refused the graph"):
        compiled(trt, tmp_path / "model.onnx")


@needs_rtx
def test_an_error_in_the_log_fails_although_there_is_a_plan(trt: ModuleType, tmp_path: Path) -> None:
    class Builder(AheadOfTimeBuilder):
        def create_builder_config(self) -> Any:
            config = super().create_builder_config()
            config.get_compute_capability(7)  # there is no eighth: an ERROR line and nothing else
            return config

    path = graph_of(tiny_spec(), tmp_path)
    with pytest.raises(CompileError, match="Index of compute capability is not in a valid range"):
        compiled(module_like(trt, Builder=lambda logger: Builder(trt, logger)), path)
    assert compiled(trt, path), "the log of one build is not held against the next"


@needs_rtx
def test_no_builder_fails(trt: ModuleType, tmp_path: Path) -> None:
    def no_builder(logger: object) -> None:
        raise TypeError("pybind11::init(): factory function returned nullptr")

    with pytest.raises(CompileError, match="has no builder here"):
        compiled(module_like(trt, Builder=no_builder), tmp_path / "model.onnx")
