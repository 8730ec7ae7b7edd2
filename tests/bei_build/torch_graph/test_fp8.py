"""Linear layers in FP8: numbers as in the ONNX graph, products as in its emulation, and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from torch import nn

from bei.core import Encoding, Float32Array
from bei.errors import CompileError
from bei_build.onnx_graph.attention import AttentionCore
from bei_build.onnx_graph.transformer import write_graph
from bei_build.onnx_graph.writer import GraphTypes
from bei_build.quantization.checkpoint_scales import stored_ranges, stored_row_scales
from bei_build.spec.dtypes import DType
from bei_build.spec.linear_layers import linear_layers
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.quantization import LayerQuantization, Quantization
from bei_build.torch_graph.fp8 import FP8Linear, JoinedFP8Linear, Rounding, choose_product
from bei_build.torch_graph.model import PackedModel, packed_model
from bei_build.torch_graph.parameters import Linear, TensorOptions, join_linear_layers
from bei_build.torch_graph.quantize import check
from tests.bei_build.quantization.test_checkpoint_scales import pair
from tests.bei_build.targets.test_fp8 import MODULES, hf_states, quantization_of
from tests.bei_build.targets.tiny import (
    MAX_SEQ_LEN,
    VOCABULARY,
    case_named,
    random_weights,
    read_case,
    tiny_spec,
)
from tests.bei_build.torch_graph.numbers import numbers_of_the_graph, take_numbers
from tests.bei_build.torch_graph.rig import of_the_module
from tests.support.builds import random_encodings
from tests.support.reading import read
from tests.support.zoo import Case, by_tier, encodings_of

CPU = torch.device("cpu")
LENGTHS = [17, 1, 5, 33]
FIRST = (
    "BertModel",
    "AlbertModel",  # layers share weights, and have scales of their own
    "BartModel",  # a decoder
    "DebertaV2Model",  # the table of positions goes through the projections
    "Gemma2Model",  # norms in front and behind, gated
    "GPTJModel",  # attention and MLP read one norm, with scales of their own
    "LlamaModel-stored_in_bfloat16",  # weights that are equally near to two numbers
    "Olmo2Model",  # no norms in front
    "T5EncoderModel",  # ReLU in front of a rounded product
)


def flat(spec: ModelSpec, model: PackedModel, encodings: list[Encoding]) -> dict[str, Float32Array]:
    """The module's outputs, rows of sequences end to end."""
    return {
        name: np.concatenate([np.atleast_2d(row) for row in rows])
        for name, rows in of_the_module(model, encodings).items()
    }


def assert_close(
    actual: Mapping[str, Float32Array], expected: Mapping[str, Float32Array], exact: Mapping[str, Float32Array]
) -> None:
    """Within a tenth of the rounding's change: a value between two numbers may go to either."""
    assert actual.keys() == expected.keys()
    for name, rows in expected.items():
        away = np.abs(exact[name] - rows).mean()
        assert away > 1e-6
        assert np.abs(actual[name] - rows).mean() < 0.1 * away, name


@pytest.mark.parametrize("case", by_tier(*map(case_named, FIRST)))
def test_the_module_computes_what_the_quantized_graph_does(case: Case, tmp_path: Path) -> None:
    """From the same numbers, which differ only where two are equally near (``tests.bei_build.torch_graph.numbers``)."""
    checkpoint = read_case(case, tmp_path)
    spec, max_seq_len = checkpoint.spec, checkpoint.max_seq_len
    quantization = quantization_of(spec, "fp8")
    encodings = encodings_of(case, LENGTHS, spec.embeddings.vocab_size)
    with checkpoint.weights() as weights:
        graph = numbers_of_the_graph(spec, weights.read, quantization, max_seq_len, encodings, tmp_path)
        model = packed_model(spec, weights.read, max_seq_len, quantization=quantization)
        roundings = take_numbers(model, weights.read, quantization, graph)
    assert sum(isinstance(module, FP8Linear) for module in model.modules()) == sum(
        len(layer.parts) for layer in linear_layers(spec)
    )
    have_run: set[nn.Module] = set()
    for rounding in roundings.values():
        rounding.register_forward_hook(lambda module, *_: have_run.add(module))
    actual = flat(spec, model, encodings)
    assert have_run == set(roundings.values())
    assert actual.keys() == graph.outputs.keys()
    for name, rows in graph.outputs.items():
        np.testing.assert_allclose(actual[name], rows, rtol=0, atol=1e-5 * max(1.0, float(np.abs(rows).max())))


@pytest.mark.parametrize("of", ["inputs", "matrices"])
def test_a_number_that_is_farther_from_the_value_is_found(of: str, tmp_path: Path) -> None:
    """The control of the test above: the largest number of a matrix or an input of the graph is made one smaller."""
    spec = tiny_spec()
    quantization = quantization_of(spec, "fp8")
    encodings = random_encodings(LENGTHS, VOCABULARY)
    graph = numbers_of_the_graph(spec, random_weights(spec), quantization, MAX_SEQ_LEN, encodings, tmp_path)
    numbers = getattr(graph, of)["layers.1.mlp.up"]
    numbers.view(torch.uint8).view(-1)[numbers.float().abs().argmax()] -= 1
    model = packed_model(spec, random_weights(spec), MAX_SEQ_LEN, quantization=quantization)

    def run() -> None:
        take_numbers(model, random_weights(spec), quantization, graph)
        flat(spec, model, encodings)

    with pytest.raises(AssertionError, match=r"layers\.1\.mlp\.up: 1 of \d+ numbers are not the nearest"):
        run()


@pytest.mark.parametrize(
    ("name", "smooth"),
    [
        pytest.param(name, smooth, marks=() if not smooth or name == next(iter(MODULES)) else pytest.mark.slow)
        for name in MODULES
        for smooth in (False, True)
    ],
)
def test_the_module_computes_what_the_rounded_hf_model_does(name: str, smooth: bool, tmp_path: Path) -> None:
    case = case_named(name)
    checkpoint = read_case(case, tmp_path, pooling="mean")
    encodings = encodings_of(case, LENGTHS, checkpoint.spec.embeddings.vocab_size)
    quantization = quantization_of(checkpoint.spec, "fp8", smooth=smooth)
    with checkpoint.weights() as weights:
        model = packed_model(checkpoint.spec, weights.read, checkpoint.max_seq_len, quantization=quantization)
    expected, exact = (
        {"embedding": np.stack(hf_states(checkpoint, name, encodings, it))} for it in (quantization, None)
    )
    assert_close(flat(checkpoint.spec, model, encodings), expected, exact)


def test_matrices_have_the_numbers_and_scales_of_the_graph(tmp_path: Path) -> None:
    """The score scale is in the graph's scales of queries, and not in the module's."""
    spec = tiny_spec(scale=0.25)  # a power of two, so that scales are equal to the bit
    quantization = quantization_of(spec, "fp8", amax=448.0, smooth=True)
    types = GraphTypes(DType.FP32, DType.FP32, quantization)
    path = write_graph(spec, random_weights(spec), tmp_path, types, AttentionCore.TRT_ATTENTION, MAX_SEQ_LEN)
    stored = {tensor.name: tensor for tensor in onnx.load(path).graph.initializer}
    model = packed_model(spec, random_weights(spec), MAX_SEQ_LEN, quantization=quantization)
    join_linear_layers(model)
    for layer in linear_layers(spec):
        path_of_module = layer.name.replace(".qkv", ".query_key_value")
        module = model.get_submodule(path_of_module)
        assert isinstance(module, FP8Linear)
        codes = np.frombuffer(stored[f"{layer.name}.weight.fp8"].raw_data, np.uint8).reshape(module.codes.shape)
        np.testing.assert_array_equal(module.codes.view(torch.uint8).numpy(), codes, err_msg=layer.name)
        scales = np.frombuffer(stored[f"{layer.name}.weight.scale"].raw_data, np.float32).copy()
        if layer.name.endswith("qkv"):
            scales[: spec.hidden_size] /= 0.25
        np.testing.assert_array_equal(module.scales[0].numpy(), scales, err_msg=layer.name)


@pytest.mark.parametrize("per_row", [False, True])
def test_a_checkpoint_in_fp8_keeps_its_numbers(per_row: bool, tmp_path: Path) -> None:
    quantized, _ = pair(tmp_path, "Qwen3Model", per_row=per_row)
    checkpoint = read(quantized)
    with checkpoint.weights() as weights:
        ranges, given = stored_ranges(weights, checkpoint.spec), stored_row_scales(weights, checkpoint.spec)
        layers = {
            name: LayerQuantization(ranges[name] if ranges else 3.0, row_scales=scales)
            for name, scales in given.items()
        }
        model = packed_model(
            checkpoint.spec, weights.read, checkpoint.max_seq_len, quantization=Quantization("fp8", layers)
        )
        for layer in linear_layers(checkpoint.spec):
            for part, name in zip(layer.parts, layer.weights, strict=True):
                expected = (weights.read(name) / given[layer.name][part][:, None]).astype(ml_dtypes.float8_e4m3fn)
                module = model.get_submodule(part.removesuffix(".weight"))
                assert isinstance(module, FP8Linear)
                np.testing.assert_array_equal(module.codes.view(torch.uint8).numpy(), expected.view(np.uint8))
                assert (len(set(module.scales[0].tolist())) > 1) is per_row


def test_layers_left_high_stay_as_they_are() -> None:
    spec = tiny_spec()
    left = frozenset({"layers.0.attention.qkv", "layers.1.mlp.down"})
    quantization = quantization_of(spec, "fp8").without(left)
    model = packed_model(spec, random_weights(spec), MAX_SEQ_LEN, quantization=quantization)
    high = {name for name, module in model.named_modules() if type(module) is Linear and name.startswith("layers")}
    assert high == {*(f"layers.0.attention.{role}" for role in ("query", "key", "value")), "layers.1.mlp.down"}
    weights = model.weights_by_name()
    np.testing.assert_array_equal(
        weights["layers.1.mlp.down.weight"].numpy(), random_weights(spec)("layers.1.mlp.down.weight")
    )
    assert "layers.0.mlp.down.weight" not in weights


@pytest.mark.parametrize("attention", [{}, {"key_bias": False}, {"num_kv_heads": 1}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_joined_layers_compute_the_same(attention: dict[str, Any], dtype: torch.dtype) -> None:
    spec = tiny_spec(**attention)
    layers = tuple(replace(layer, mlp=replace(layer.mlp, gated=True)) for layer in spec.layers)
    spec = replace(spec, layers=layers)
    model = packed_model(
        spec, random_weights(spec), MAX_SEQ_LEN, dtype=dtype, quantization=quantization_of(spec, "fp8")
    )
    encodings = random_encodings(LENGTHS, VOCABULARY)
    separate = flat(spec, model, encodings)["embedding"]
    join_linear_layers(model)
    joined = model.get_submodule("layers.0.mlp.gate_up")
    assert isinstance(joined, JoinedFP8Linear)
    assert joined.sizes == [128, 128]
    np.testing.assert_allclose(flat(spec, model, encodings)["embedding"], separate, atol=1e-5)


def test_layers_of_which_one_is_left_high_are_not_joined() -> None:
    spec = tiny_spec()
    layers = tuple(replace(layer, mlp=replace(layer.mlp, gated=True)) for layer in spec.layers)
    spec = replace(spec, layers=layers)
    quantization = quantization_of(spec, "fp8").without(frozenset({"layers.0.mlp.gate"}))
    model = packed_model(spec, random_weights(spec), MAX_SEQ_LEN, quantization=quantization)
    encodings = random_encodings(LENGTHS, VOCABULARY)
    separate = flat(spec, model, encodings)["embedding"]
    join_linear_layers(model)
    assert not hasattr(model.layers["0"].mlp, "gate_up")
    assert hasattr(model.layers["1"].mlp, "gate_up")
    np.testing.assert_allclose(flat(spec, model, encodings)["embedding"], separate, atol=1e-5)


def test_in_bf16_the_result_stays_close_to_that_in_fp32() -> None:
    spec = tiny_spec()
    quantization = quantization_of(spec, "fp8")
    encodings = random_encodings(LENGTHS, VOCABULARY)
    narrow, wide = (
        flat(
            spec, packed_model(spec, random_weights(spec), MAX_SEQ_LEN, dtype=it, quantization=quantization), encodings
        )
        for it in (torch.bfloat16, torch.float32)
    )
    (ours, theirs) = narrow["embedding"], wide["embedding"]
    cosines = (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    assert 0.999 <= cosines.min() < 1.0


def test_values_are_rounded_to_the_nearest_number_and_bounded() -> None:
    rounding = Rounding(LayerQuantization(2 * 448.0, smoothing=(1.0, 2.0)), TensorOptions(CPU, torch.float32))
    values = torch.tensor([[2.0, 4.0], [34.0, 68.0], [38.0, -1e9], [float("nan"), 1e9]])
    # 17 and 19 lie between two numbers, 16 and 18 and 20; ties go to even.
    expected = [[1.0, 1.0], [16.0, 16.0], [20.0, -448.0], [np.nan, 448.0]]
    np.testing.assert_array_equal(rounding(values).float().numpy(), expected)


@pytest.mark.parametrize(
    ("sizes", "device", "dtype", "one_scale", "product", "reason"),
    [
        ((64, 64), "cuda", torch.bfloat16, True, "tensorwise", None),
        ((64, 64), "cuda", torch.float16, False, "rowwise", "scales of their own"),
        ((64, 64), "cpu", torch.bfloat16, False, "plain", "the device is cpu"),
        ((64, 64), "cuda", torch.float32, False, "plain", "torch.float32"),
        ((64, 40), "cuda", torch.bfloat16, False, "plain", "40 x 64"),
        ((40, 64), "cuda", torch.bfloat16, False, "plain", "64 x 40"),
    ],
)
def test_the_choice_of_a_product_says_why_it_is_no_faster_one(
    sizes: tuple[int, int], device: str, dtype: torch.dtype, one_scale: bool, product: str, reason: str | None
) -> None:
    choice = choose_product(*sizes, torch.device(device), dtype, has_one_scale=one_scale)
    assert choice.product == product
    assert (reason is None and not choice.reasons) or any(str(reason) in each for each in choice.reasons)


@pytest.mark.parametrize("one_scale", [True, False])
def test_the_fast_product_is_asked_for_what_the_slow_one_computes(
    one_scale: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``torch._scaled_mm`` by its documented shapes and scales, in FP32; its layouts are those that CUDA requires."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(48, 32, generator=generator)
    scales = np.full(48, 0.01, np.float32) if one_scale else None
    layer = LayerQuantization(3.0)
    storage = TensorOptions(CPU, torch.bfloat16)
    like = Linear(32, 48, True, storage)
    like.bias.copy_(torch.randn(48, generator=generator))
    module = FP8Linear(like, Rounding(layer, storage), layer, scales)
    module.fill(matrix)
    value = torch.randn(5, 32, generator=generator).bfloat16()
    expected = module(value)

    def scaled_mm(
        a: torch.Tensor, b: torch.Tensor, of_rows: torch.Tensor, of_columns: torch.Tensor, **settings: Any
    ) -> torch.Tensor:
        assert (a.stride(1), b.stride(0)) == (1, 1)
        assert (of_rows.shape, of_columns.shape) == (((1, 1), (1, 1)) if one_scale else ((5, 1), (1, 48)))
        assert of_rows.is_contiguous()
        assert one_scale or of_columns.is_contiguous()
        assert (settings["out_dtype"], settings["use_fast_accum"]) == (torch.bfloat16, True)
        product: torch.Tensor = (a.float() @ b.float()) * of_rows * of_columns + settings["bias"].float()
        return product.bfloat16()

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    module._product = "tensorwise" if one_scale else "rowwise"
    torch.testing.assert_close(module(value), expected)


def test_what_the_module_does_not_compute_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny_spec()
    name = linear_layers(spec)[0].name

    def refused(quantization: Quantization, match: str, device: str = "cpu") -> None:
        with pytest.raises(CompileError, match=match):
            check(spec, quantization, torch.device(device))

    refused(Quantization("int8", {name: LayerQuantization(3.0)}), "no products in INT8: build with --precision fp8 or")
    refused(Quantization("fp8", {name: LayerQuantization(1.0, per_token=True)}), f"{name} .* a range for each token")
    refused(Quantization("fp8", {name: LayerQuantization(1.0, output_amax=2.0)}), "products that are rounded too")
    refused(Quantization("fp8", {"layers.9.mlp.up": LayerQuantization(1.0)}), "no linear layer layers.9.mlp.up")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    refused(Quantization("fp8", {}), "A100 does not compute in FP8.*--precision bf16", device="cuda")
    with pytest.raises(CompileError, match="INT8"):
        PackedModel(spec, MAX_SEQ_LEN, TensorOptions(CPU, torch.float32), quantization=Quantization("int8", {}))
