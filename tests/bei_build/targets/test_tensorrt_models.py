"""Every supported model and head, compiled by TensorRT-RTX, and its lowering."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from bei.errors import CompileError
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.onnx_graph.attention import AttentionCore, Lowering, lowerings
from bei_build.spec.dtypes import DType
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import AttentionSpec
from bei_build.targets.tensorrt.network import attentions_of, layers_of
from bei_build.targets.tensorrt.plan import NoPlanError
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
from tests.support.zoo import CASES, Case, by_tier, spec_of

NUM_LAYERS = 3  # in the zoo's models without a decoder


WORDS: dict[str, Lowering] = {
    "padded": "padded",
    "causal": "padded",
    "additive mask": "masked",
    "boolean mask": "masked",
    "primitive": "primitive",
}


def form_of(attention: AttentionSpec) -> str:
    """The required form of a layer: TensorRT's op with lengths ("padded"), causal, or with a mask; or primitives."""
    if attention.softcap or attention.disentangled:
        return "primitive"
    if attention.relative_bias or attention.alibi:
        return "additive mask"
    if attention.window is not None:
        return "boolean mask"
    return "causal" if attention.causal else "padded"


def forms_of(spec: ModelSpec) -> list[str]:
    return [form_of(attention) for attention in spec.attentions]


def lowerings_of(spec: ModelSpec) -> list[Lowering]:
    """The forms by ``form_of``, in the manifest's words."""
    return [WORDS[form] for form in forms_of(spec)]


def forms_read_by_tensorrt(trt: ModuleType, path: Path, spec: ModelSpec) -> list[str]:
    """Forms of the layers that are not primitives, from the network; causality is read from the file (see its test)."""
    with parsed(trt, path, lowerings_of(spec)) as network:
        masks = [layer.get_input(3) for layer in attentions_of(trt, network)]
        types = [mask and mask.dtype.name for mask in masks]
    nodes = attention_nodes(onnx.load(path, load_external_data=False))
    causal = [any(attribute.name == "causal_kind" for attribute in node.attribute) for node in nodes]
    forms = []
    for mask, is_causal in zip(types, causal, strict=True):
        assert not (mask and is_causal)
        forms.append(("boolean mask" if mask == "BOOL" else "additive mask") if mask else "padded")
        if is_causal:
            forms[-1] = "causal"
    return forms


def in_types(first: DType, *others: DType) -> list[Any]:
    """Parameters: the first tier takes ``first``. Of all three, it has models and lowerings in the tests below."""
    return [first, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in others)]


def compile_checkpoint(trt: ModuleType, checkpoint: Checkpoint, path: Path) -> bytes:
    return compiled(trt, path, lowerings_of(checkpoint.spec), checkpoint.max_seq_len)


@needs_rtx
@pytest.mark.parametrize("name", ["LlamaModel", "ModernBertModel", "MPNetModel", "DebertaV2Model", "Gemma2Model"])
def test_every_lowering_compiles_in_fp32(trt: ModuleType, tmp_path: Path, name: str) -> None:
    checkpoint = read_case(case_named(name), tmp_path)
    path = graph_of_checkpoint(checkpoint, tmp_path, DType.FP32)
    assert compile_checkpoint(trt, checkpoint, path)


# A case for each lowering, said here and not read from the spec: a setting that a family loses would change both sides.
FORMS = {
    "BertModel": ["padded"] * 3,
    "LlamaModel-bidirectional": ["padded"] * 3,
    "LlamaModel": ["causal"] * 3,
    "MistralModel": ["boolean mask"] * 3,
    "MPNetModel": ["additive mask"] * 3,
    "DebertaV2Model": ["primitive"] * 3,
    "Gemma2Model": ["primitive"] * 3,
    "ModernBertModel": ["padded", "boolean mask", "padded"],
    "Gemma2Model-no_soft_cap": ["boolean mask", "causal", "boolean mask"],
}


@needs_rtx
@pytest.mark.parametrize("case", by_tier(case_named("MistralModel")))
def test_every_model_and_head_compiles_in_fp16(trt: ModuleType, tmp_path: Path, case: Case) -> None:
    checkpoint = read_case(case, tmp_path)
    path = graph_of_checkpoint(checkpoint, tmp_path, DType.FP16)
    assert compile_checkpoint(trt, checkpoint, path)


@needs_rtx
@pytest.mark.parametrize("case", by_tier(*map(case_named, FORMS)))
def test_every_model_and_head_compiles_in_bf16(trt: ModuleType, tmp_path: Path, case: Case) -> None:
    checkpoint = read_case(case, tmp_path)
    path = graph_of_checkpoint(checkpoint, tmp_path, DType.BF16)
    written = [form for form in forms_of(checkpoint.spec) if form != "primitive"]
    assert forms_read_by_tensorrt(trt, path, checkpoint.spec) == written
    assert lowerings(checkpoint.spec, AttentionCore.TRT_ATTENTION) == lowerings_of(checkpoint.spec)
    assert compile_checkpoint(trt, checkpoint, path)


def test_the_zoo_has_every_form() -> None:
    assert {name: forms_of(spec_of(case_named(name))) for name in FORMS} == FORMS
    of_zoo = {form for case in CASES for form in forms_of(spec_of(case))}
    assert of_zoo == {form for forms in FORMS.values() for form in forms}


@needs_rtx
@pytest.mark.parametrize(
    ("name", "settings"), [("ModernBertModel", {"hidden_size": 4 * 64}), ("Gemma3TextModel", {"head_dim": 256})]
)
def test_a_windowed_layer_leaves_the_others_without_masks(
    trt: ModuleType, tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    """They keep the kernel without masks, because the op must not be decomposed."""
    checkpoint = read_case(case_named(name), tmp_path, **settings)
    forms = forms_of(checkpoint.spec)
    assert len(set(forms)) == 2
    path = edited(graph_of_checkpoint(checkpoint, tmp_path, DType.BF16), forbid_decomposition)
    assert forms_read_by_tensorrt(trt, path, checkpoint.spec) == forms
    assert compile_checkpoint(trt, checkpoint, path)


# Packed attention: TensorRT-RTX reads it, and has a kernel for it on none of its GPUs.


@needs_rtx
@pytest.mark.parametrize("case", by_tier(*(case_named(name) for name in FORMS)))
def test_every_model_is_read_with_packed_attention(trt: ModuleType, tmp_path: Path, case: Case) -> None:
    checkpoint = read_case(case, tmp_path)
    path = graph_of_checkpoint(checkpoint, tmp_path, DType.BF16, AttentionCore.TRT_PACKED)
    written = lowerings(checkpoint.spec, AttentionCore.TRT_PACKED)
    words: dict[str, Lowering] = {"causal": "packed", "padded": "packed"}
    if not checkpoint.spec.partial_keys:
        assert written == [
            words.get(form, lowering)
            for form, lowering in zip(forms_of(checkpoint.spec), lowerings_of(checkpoint.spec), strict=True)
        ]
    with parsed(trt, path, written) as network:  # which looks at lengths and masks
        assert len(attentions_of(trt, network)) == len(written) - written.count("primitive")


def test_packed_graphs_declare_no_index_of_the_padded_view(tmp_path: Path) -> None:
    spec = replace(tiny_spec(), heads=(HeadSpec("embedding", ("cls",)),))
    model = onnx.load(graph_of(spec, tmp_path, core=AttentionCore.TRT_PACKED), load_external_data=False)
    names = {tensor.name for tensor in model.graph.input}
    assert names == {"input_ids", "token_type_ids", "position_ids", "first_index", "cu_query_lens", "cu_key_lens"}


def test_partial_keys_cannot_be_packed() -> None:
    spec = replace(tiny_spec(), partial_keys=True)
    assert lowerings(spec, AttentionCore.TRT_PACKED) == ["padded", "padded"]


@needs_rtx
def test_there_is_no_plan_with_packed_attention(trt: ModuleType, tmp_path: Path) -> None:
    """If this fails, TensorRT-RTX supports it now: add its GPUs to the table of those with a kernel."""
    with pytest.raises(NoPlanError, match="no fused kernel is available"):
        compiled(trt, graph_of(tiny_spec(), tmp_path, core=AttentionCore.TRT_PACKED), ["packed", "packed"])


@needs_rtx
@pytest.mark.parametrize("dtype", in_types(DType.BF16, DType.FP16))
@pytest.mark.parametrize("attention", BY_POSITION.values(), ids=BY_POSITION)
def test_biases_by_position_compile(trt: ModuleType, tmp_path: Path, attention: dict[str, Any], dtype: DType) -> None:
    path = graph_of(tiny_spec(**attention), tmp_path, dtype)
    assert compiled(trt, edited(path, forbid_decomposition), ["masked", "masked"])


@needs_rtx
@pytest.mark.parametrize("dtype", in_types(DType.BF16, DType.FP16, DType.FP32))
def test_latent_attention_and_means_behind_a_prompt_compile(trt: ModuleType, tmp_path: Path, dtype: DType) -> None:
    assert compiled(trt, graph_of(latent_spec(), tmp_path, dtype))


@needs_rtx
@pytest.mark.parametrize("dtype", in_types(DType.BF16, DType.FP16, DType.FP32))
@pytest.mark.parametrize("unpooled_id", [None, 1])
def test_static_embeddings_compile(trt: ModuleType, tmp_path: Path, unpooled_id: int | None, dtype: DType) -> None:
    """Without attention, and so without its inputs: the compiler refuses unused ones."""
    path = graph_of(static_spec(unpooled_id), tmp_path, dtype)
    assert compiled(trt, path, [])
    inputs = {tensor.name for tensor in onnx.load(path, load_external_data=False).graph.input}
    assert inputs == {"input_ids", "pad_index", "slot_mask"}


@needs_rtx
@pytest.mark.parametrize("dtype", in_types(DType.BF16, DType.FP16, DType.FP32))
@pytest.mark.parametrize("attention", PARTIAL_KEYS.values(), ids=PARTIAL_KEYS)
def test_sequences_that_end_in_tokens_without_keys_compile(
    trt: ModuleType, tmp_path: Path, attention: dict[str, Any], dtype: DType
) -> None:
    spec = replace(with_heads_on_tokens(tiny_spec(**attention)), partial_keys=True)
    path = graph_of(spec, tmp_path, dtype)
    names = {tensor.name for tensor in onnx.load(path, load_external_data=False).graph.input}
    assert {"key_lens", "key_mask"} & names
    assert ("token_key_lens" in names) == ("window" in attention)
    assert compiled(trt, path, lowerings_of(spec))


@needs_rtx
@pytest.mark.parametrize("dtype", in_types(DType.FP16, DType.BF16, DType.FP32))
@pytest.mark.parametrize("normalized", [False, True])
def test_experts_compile(trt: ModuleType, tmp_path: Path, normalized: bool, dtype: DType) -> None:
    """All experts on all tokens; the best are chosen in FP32."""
    path = graph_of(with_experts(tiny_spec(), normalized=normalized), tmp_path, dtype)
    with parsed(trt, path) as network:
        layers = layers_of(network)
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
@pytest.mark.parametrize("dtype", in_types(DType.BF16, DType.FP16))
def test_attention_of_usual_widths_has_a_fused_kernel(
    trt: ModuleType, tmp_path: Path, name: str, settings: dict[str, Any], dtype: DType
) -> None:
    """If it must not decompose it, TensorRT-RTX fails where it has no kernel, with grouped heads and masks too."""
    checkpoint = read_case(case_named(name), tmp_path, **settings)
    path = edited(graph_of_checkpoint(checkpoint, tmp_path, dtype), forbid_decomposition)
    assert compile_checkpoint(trt, checkpoint, path)


@needs_rtx
def test_tensorrt_reads_that_attention_is_causal(trt: ModuleType, tmp_path: Path) -> None:
    """The network does not show it, but TensorRT refuses a mask beside it."""
    mask = helper.make_tensor("mask", TensorProto.BOOL, [1, 1, 1, 1], [True])

    def add_mask(model: onnx.ModelProto) -> None:
        model.graph.initializer.append(mask)
        for node in attention_nodes(model):
            node.input[3] = "mask"

    path = edited(graph_of(tiny_spec(), tmp_path), add_mask)
    assert compiled(trt, path, ["masked", "masked"]), "the mask alone is fine"
    with pytest.raises(CompileError, match="mask"):
        compiled(trt, edited(graph_of(tiny_spec(causal=True), tmp_path), add_mask))


@needs_rtx
@pytest.mark.parametrize("dtype", in_types(DType.FP16, DType.BF16))
@pytest.mark.parametrize("name", ["LlamaModel", "Qwen3Model", "Gemma2Model", "Gemma3TextModel"])
def test_tensorrt_squares_states_in_fp32(trt: ModuleType, tmp_path: Path, name: str, dtype: DType) -> None:
    """The squares of a state of 256 overflow FP16, and their sum is short of digits in BF16."""
    checkpoint = read_case(case_named(name), tmp_path)
    path = graph_of_checkpoint(checkpoint, tmp_path, dtype)
    with parsed(trt, path, lowerings_of(checkpoint.spec)) as network:
        layers = layers_of(network)
        means = [layer for layer in layers if layer.type == trt.LayerType.REDUCE and "norm" in layer.name]
        types = {layer.get_input(0).dtype.name for layer in means}
    assert len(means) >= 2 * NUM_LAYERS
    assert types == {"FLOAT"}


@needs_rtx
@pytest.mark.parametrize("dtype", in_types(DType.FP16, DType.BF16))
def test_heads_that_need_fp32_compile(trt: ModuleType, tmp_path: Path, dtype: DType) -> None:
    """BGE-M3's three outputs, ColBERT's lengths and SPLADE's logarithms, which are on tokens."""
    path = graph_of(with_heads_on_tokens(tiny_spec()), tmp_path, dtype)
    assert compiled(trt, path)
    outputs = onnx.load(path, load_external_data=False).graph.output
    assert {output.type.tensor_type.elem_type for output in outputs} == {TensorProto.FLOAT}


@needs_rtx
@pytest.mark.parametrize("dtype", in_types(DType.BF16, DType.FP16, DType.FP32))
@pytest.mark.parametrize("tokens", [("t", "he"), ("he",)], ids=["two", "one"])
def test_scores_of_tokens_behind_a_soft_cap_compile(
    trt: ModuleType, tmp_path: Path, tokens: tuple[str, ...], dtype: DType
) -> None:
    """In FP32: near the cap two scores differ in digits that 16 bits do not have."""
    checkpoint = read_case(case_named("Gemma2ForCausalLM"), tmp_path, score_tokens=tokens, final_logit_softcapping=30.0)
    path = graph_of_checkpoint(checkpoint, tmp_path, dtype)
    with parsed(trt, path, lowerings_of(checkpoint.spec)) as network:
        layers = layers_of(network)
        types = {layer.get_output(0).dtype.name for layer in layers if layer.name.startswith("logits.layers.")}
        (cap,) = (layer for layer in layers if layer.name == "logits.layers.0.act")
    assert cap.type == trt.LayerType.ACTIVATION
    assert types == {"FLOAT"}
    assert compile_checkpoint(trt, checkpoint, path)
