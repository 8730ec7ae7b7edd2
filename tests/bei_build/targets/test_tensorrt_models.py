"""Every supported model and head, compiled by TensorRT-RTX, and the lowering that each gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from bei.errors import CompileError
from bei_build.checkpoint import Checkpoint
from bei_build.graph.writer import DType
from tests.bei_build.targets.rtx import attention_nodes, compiled, edited, forbid_decomposition, needs_rtx, parsed
from tests.bei_build.targets.tiny import (
    BY_POSITION,
    PARTIAL_KEYS,
    case_named,
    graph_of,
    graph_of_checkpoint,
    latent_spec,
    read_case,
    static_spec,
    tiny_spec,
    with_experts,
    with_heads_on_tokens,
)
from tests.zoo import CASES, FIRST_OF_FAMILY, SPECIAL, Case, by_tier, spec_of

NUM_LAYERS = 3  # of the zoo's models but those with a decoder


def lowering_of(case: Case) -> str:
    """How attention must be written: TensorRT's op with lengths ("padded"), causal, or with a mask; or primitives.

    All layers alike: the op's function has one body.
    """
    layers = spec_of(case).attentions
    if any(attention.softcap or attention.disentangled for attention in layers):
        return "primitive"
    if any(attention.relative_bias or attention.alibi for attention in layers):
        return "additive mask"
    if any(attention.window is not None for attention in layers):
        return "boolean mask"
    if len({attention.causal for attention in layers}) > 1:
        return "boolean mask"
    return "causal" if layers[0].causal else "padded"


def lowering_read_by_tensorrt(trt: ModuleType, path: Path, num_attentions: int) -> str:
    """Of all layers, from the network; that the op is causal is read from the file (see the test of it)."""
    with parsed(trt, path) as layers:
        attentions = [layer for layer in layers if layer.type == trt.LayerType.ATTENTION_INPUT]
        masks = [layer.get_input(3) for layer in attentions]
        types = {mask and mask.dtype.name for mask in masks}
    if not attentions:
        return "primitive"
    assert len(attentions) == num_attentions
    (mask,) = types  # the function has one body, so all layers have the same
    if mask:
        return "boolean mask" if mask == "BOOL" else "additive mask"
    nodes = attention_nodes(onnx.load(path, load_external_data=False))
    (causal,) = {any(attribute.name == "causal_kind" for attribute in node.attribute) for node in nodes}
    return "causal" if causal else "padded"


def compile_checkpoint(trt: ModuleType, checkpoint: Checkpoint, path: Path, lowering: str) -> bytes:
    num_attentions = 0 if lowering == "primitive" else len(checkpoint.spec.attentions)
    return compiled(trt, path, num_attentions, checkpoint.max_seq_len)


@needs_rtx
@pytest.mark.parametrize("case", by_tier(*SPECIAL))
def test_every_model_and_head_compiles_in_fp16(trt: ModuleType, tmp_path: Path, case: Case) -> None:
    checkpoint = read_case(case, tmp_path)
    path = graph_of_checkpoint(checkpoint, tmp_path, DType.FP16)
    assert lowering_read_by_tensorrt(trt, path, len(checkpoint.spec.attentions)) == lowering_of(case)
    assert compile_checkpoint(trt, checkpoint, path, lowering_of(case))


@needs_rtx
@pytest.mark.parametrize("case", by_tier(*FIRST_OF_FAMILY))
def test_every_model_and_head_compiles_in_bf16(trt: ModuleType, tmp_path: Path, case: Case) -> None:
    checkpoint = read_case(case, tmp_path)
    path = graph_of_checkpoint(checkpoint, tmp_path, DType.BF16)
    assert compile_checkpoint(trt, checkpoint, path, lowering_of(case))


@needs_rtx
@pytest.mark.parametrize("name", ["LlamaModel", "ModernBertModel", "MPNetModel", "DebertaV2Model", "Gemma2Model"])
def test_every_lowering_compiles_in_fp32(trt: ModuleType, tmp_path: Path, name: str) -> None:
    checkpoint = read_case(case_named(name), tmp_path)
    path = graph_of_checkpoint(checkpoint, tmp_path, DType.FP32)
    assert compile_checkpoint(trt, checkpoint, path, lowering_of(case_named(name)))


# A case for each lowering, said here and not read from the spec: a setting that a family loses would change both sides.
LOWERINGS = {
    "BertModel": "padded",
    "LlamaModel-bidirectional": "padded",
    "LlamaModel": "causal",
    "MistralModel": "boolean mask",
    "MPNetModel": "additive mask",
    "DebertaV2Model": "primitive",
    "Gemma2Model": "primitive",
    "Gemma2Model-no_soft_cap": "boolean mask",
}


def test_the_zoo_has_every_lowering() -> None:
    assert {name: lowering_of(case_named(name)) for name in LOWERINGS} == LOWERINGS
    assert {lowering_of(case) for case in CASES} == set(LOWERINGS.values())


@needs_rtx
@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
@pytest.mark.parametrize("attention", BY_POSITION.values(), ids=BY_POSITION)
def test_biases_by_position_compile(trt: ModuleType, tmp_path: Path, attention: dict[str, Any], dtype: DType) -> None:
    path = graph_of(tiny_spec(**attention), tmp_path, dtype)
    assert compiled(trt, edited(path, forbid_decomposition))


@needs_rtx
@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16, DType.BF16])
def test_latent_attention_and_means_behind_a_prompt_compile(trt: ModuleType, tmp_path: Path, dtype: DType) -> None:
    assert compiled(trt, graph_of(latent_spec(), tmp_path, dtype))


@needs_rtx
@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16, DType.BF16])
@pytest.mark.parametrize("unpooled_id", [None, 1])
def test_static_embeddings_compile(trt: ModuleType, tmp_path: Path, unpooled_id: int | None, dtype: DType) -> None:
    """Without attention, and so without its inputs: the compiler refuses what nothing reads."""
    path = graph_of(static_spec(unpooled_id), tmp_path, dtype)
    assert compiled(trt, path, num_attentions=0)
    inputs = {tensor.name for tensor in onnx.load(path, load_external_data=False).graph.input}
    assert inputs == {"input_ids", "pad_index", "slot_mask"}


@needs_rtx
@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16, DType.FP32])
@pytest.mark.parametrize("attention", PARTIAL_KEYS.values(), ids=PARTIAL_KEYS)
def test_sequences_that_end_in_tokens_without_keys_compile(
    trt: ModuleType, tmp_path: Path, attention: dict[str, Any], dtype: DType
) -> None:
    path = graph_of(replace(with_heads_on_tokens(tiny_spec(**attention)), partial_keys=True), tmp_path, dtype)
    names = {tensor.name for tensor in onnx.load(path, load_external_data=False).graph.input}
    assert {"key_lens", "key_mask"} & names
    assert ("token_key_lens" in names) == ("window" in attention)
    assert compiled(trt, path, 0 if "softcap" in attention else 2)


@needs_rtx
@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16, DType.BF16])
@pytest.mark.parametrize("normalized", [False, True])
def test_experts_compile(trt: ModuleType, tmp_path: Path, normalized: bool, dtype: DType) -> None:
    """All of them on all tokens; who is best is decided in FP32."""
    path = graph_of(with_experts(tiny_spec(), normalized=normalized), tmp_path, dtype)
    with parsed(trt, path) as layers:
        (router,) = (layer for layer in layers if layer.type == trt.LayerType.TOPK)
        assert router.get_input(0).dtype.name == "FLOAT"
        assert not [layer for layer in layers if layer.type in (trt.LayerType.NON_ZERO, trt.LayerType.SCATTER)]
    assert compiled(trt, path)


@needs_rtx
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("BertModel", {"hidden_size": 4 * 64}),
        ("BertModel", {"hidden_size": 4 * 26}),
        ("LlamaModel", {"head_dim": 128}),
        ("LlamaModel-bidirectional", {"head_dim": 128}),
        ("MistralModel", {"head_dim": 128}),
        ("ModernBertModel", {"hidden_size": 4 * 64}),
        ("Gemma3TextModel", {"head_dim": 256}),
        ("MPNetModel", {"hidden_size": 4 * 64}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
def test_attention_of_usual_widths_has_a_fused_kernel(
    trt: ModuleType, tmp_path: Path, name: str, settings: dict[str, Any], dtype: DType
) -> None:
    """Without leave to decompose it TensorRT-RTX fails where it has no kernel, grouped heads and masks included."""
    checkpoint = read_case(case_named(name), tmp_path, **settings)
    path = edited(graph_of_checkpoint(checkpoint, tmp_path, dtype), forbid_decomposition)
    assert compiled(trt, path, NUM_LAYERS, checkpoint.max_seq_len)


@needs_rtx
def test_tensorrt_reads_that_attention_is_causal(trt: ModuleType, tmp_path: Path) -> None:
    """The network does not show it, but TensorRT refuses a mask beside it."""
    mask = helper.make_tensor("mask", TensorProto.BOOL, [1, 1, 1, 1], [True])

    def add_mask(model: onnx.ModelProto) -> None:
        model.graph.initializer.append(mask)
        for node in attention_nodes(model):
            node.input[3] = "mask"

    assert compiled(trt, edited(graph_of(tiny_spec(), tmp_path), add_mask)), "the mask alone is fine"
    with pytest.raises(CompileError, match="mask"):
        compiled(trt, edited(graph_of(tiny_spec(causal=True), tmp_path), add_mask))


@needs_rtx
@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
@pytest.mark.parametrize("name", ["LlamaModel", "Qwen3Model", "Gemma2Model", "Gemma3TextModel"])
def test_tensorrt_squares_states_in_fp32(trt: ModuleType, tmp_path: Path, name: str, dtype: DType) -> None:
    """The squares of a state of 256 overflow FP16, and their sum is short of digits in BF16."""
    path = graph_of_checkpoint(read_case(case_named(name), tmp_path), tmp_path, dtype)
    with parsed(trt, path) as layers:
        means = [layer for layer in layers if layer.type == trt.LayerType.REDUCE and "norm" in layer.name]
        types = {layer.get_input(0).dtype.name for layer in means}
    assert len(means) >= 2 * NUM_LAYERS
    assert types == {"FLOAT"}


@needs_rtx
@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
def test_heads_that_need_fp32_compile(trt: ModuleType, tmp_path: Path, dtype: DType) -> None:
    """BGE-M3's three outputs, ColBERT's lengths and SPLADE's logarithms, which are on tokens."""
    path = graph_of(with_heads_on_tokens(tiny_spec()), tmp_path, dtype)
    assert compiled(trt, path)
    outputs = onnx.load(path, load_external_data=False).graph.output
    assert {output.type.tensor_type.elem_type for output in outputs} == {TensorProto.FLOAT}


@needs_rtx
@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16, DType.BF16])
@pytest.mark.parametrize("tokens", [("t", "he"), ("he",)], ids=["two", "one"])
def test_scores_of_tokens_behind_a_soft_cap_compile(
    trt: ModuleType, tmp_path: Path, tokens: tuple[str, ...], dtype: DType
) -> None:
    """In FP32: near the cap two scores differ in digits that 16 bits do not have."""
    checkpoint = read_case(case_named("Gemma2ForCausalLM"), tmp_path, score_tokens=tokens, final_logit_softcapping=30.0)
    path = graph_of_checkpoint(checkpoint, tmp_path, dtype)
    with parsed(trt, path) as layers:
        types = {layer.get_output(0).dtype.name for layer in layers if layer.name.startswith("logits.layers.")}
        (cap,) = (layer for layer in layers if layer.name == "logits.layers.0.act")
    assert cap.type == trt.LayerType.ACTIVATION
    assert types == {"FLOAT"}
    assert compile_checkpoint(trt, checkpoint, path, "primitive")
