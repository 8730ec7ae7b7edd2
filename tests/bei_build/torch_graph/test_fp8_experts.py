"""Experts in FP8: the numbers of the ONNX graph's emulation, one product for all of them, and the choice between
both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bei.core import Encoding, Float32Array, Limits, PackedBatch
from bei_build.quantization.emulation import emulated_engine
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.quantization import Quantization
from bei_build.torch_graph import fp8_experts
from bei_build.torch_graph.experts import Experts
from bei_build.torch_graph.fp8 import ProductChoice, choose_product
from bei_build.torch_graph.fp8_experts import FP8Experts
from bei_build.torch_graph.model import PackedModel, packed_model
from bei_build.torch_graph.parameters import ExpertMatrices, TensorOptions
from tests.bei_build.targets.test_fp8 import quantization_of
from tests.bei_build.targets.tiny import MAX_SEQ_LEN, VOCABULARY, random_weights, tiny_spec, with_experts
from tests.bei_build.torch_graph.test_fp8 import LENGTHS, assert_close, flat
from tests.support.builds import random_encodings

UP, DOWN = (f"layers.1.mlp.experts.{{}}.{role}" for role in ("up", "down"))
SOME_HIGH = frozenset({UP.format(3), DOWN.format(0), DOWN.format(7)})


def quantized(spec: ModelSpec, quantization: Quantization, dtype: torch.dtype = torch.float32) -> PackedModel:
    return packed_model(spec, random_weights(spec), MAX_SEQ_LEN, dtype=dtype, quantization=quantization)


def experts_of(model: PackedModel) -> Experts:
    (experts,) = (module for module in model.modules() if isinstance(module, Experts))
    return experts


def embeddings(model: PackedModel) -> Float32Array:
    return flat(model.spec, model, random_encodings(LENGTHS, VOCABULARY))["embedding"]


def of_the_emulation(
    spec: ModelSpec, quantization: Quantization, encodings: list[Encoding], folder: Path
) -> dict[str, Float32Array]:
    """ONNX Runtime on the graph with the same quantization; rows of sequences end to end."""
    with emulated_engine(spec, random_weights(spec), quantization, Limits(256, 16, MAX_SEQ_LEN), folder) as engine:
        return dict(engine.run(PackedBatch.from_encodings(encodings)))


@pytest.mark.parametrize("left_high", [frozenset(), SOME_HIGH], ids=["all", "some"])
@pytest.mark.parametrize("smooth", [False, True])
def test_the_module_computes_what_the_quantized_graph_does(
    smooth: bool, left_high: frozenset[str], tmp_path: Path
) -> None:
    spec = with_experts(tiny_spec(), normalized=smooth)
    quantization = quantization_of(spec, "fp8", smooth=smooth).without(left_high)
    encodings = random_encodings(LENGTHS, VOCABULARY)
    expected = of_the_emulation(spec, quantization, encodings, tmp_path)
    model = quantized(spec, quantization)
    exact = packed_model(spec, random_weights(spec), MAX_SEQ_LEN)
    assert_close(flat(spec, model, encodings), expected, flat(spec, exact, encodings))
    up, down = experts_of(model).experts.up, experts_of(model).experts.down
    assert isinstance(up, FP8Experts)
    assert isinstance(down, FP8Experts)
    assert (len(up.codes), len(down.codes)) == ((7, 6) if left_high else (8, 8))


def test_experts_that_are_all_left_high_stay_as_they_are() -> None:
    spec = with_experts(tiny_spec())
    quantization = quantization_of(spec, "fp8")
    downs = frozenset(DOWN.format(index) for index in range(8))
    model = quantized(spec, quantization.without(downs))
    assert isinstance(experts_of(model).experts.up, FP8Experts)
    assert isinstance(experts_of(model).experts.down, ExpertMatrices)
    assert "layers.1.mlp.experts.down.weight" in model.weights_by_name()
    assert "layers.1.mlp.experts.up.weight" not in model.weights_by_name()


def scaled_grouped_mm(
    a: Tensor, b: Tensor, of_rows: Tensor, of_columns: Tensor, *, offs: Tensor, **settings: Any
) -> Tensor:
    """The documented computation in FP32, after PyTorch's own description of the operator has checked the call."""
    arguments = (tensor.to("meta") for tensor in (a, b, of_rows, of_columns, offs))
    described = torch.ops.aten._scaled_grouped_mm(*arguments, **settings)
    assert settings["use_fast_accum"]
    ends = offs.tolist()
    groups = zip([0, *ends], ends, b, of_columns, strict=False)
    parts = [a[start:end].float() @ matrix.float() * columns for start, end, matrix, columns in groups]
    product = (torch.cat(parts) * of_rows[:, None]).to(settings["out_dtype"])
    assert (product.shape, product.dtype) == (described.shape, described.dtype)
    return product


@pytest.mark.parametrize("smooth", [False, True])
def test_one_product_for_all_experts_computes_what_each_by_itself_does(
    smooth: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = with_experts(tiny_spec())
    model = quantized(spec, quantization_of(spec, "fp8", smooth=smooth), torch.bfloat16)
    by_each = embeddings(model)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm)
    experts_of(model)._grouped = True
    grouped = embeddings(model)
    # Up to the order of sums in BF16, and values between two numbers of FP8.
    assert 0 < np.abs(grouped - by_each).max() <= 0.02
    high = packed_model(spec, random_weights(spec), MAX_SEQ_LEN, dtype=torch.bfloat16)
    assert np.abs(grouped - by_each).mean() < 0.25 * np.abs(embeddings(high) - by_each).mean()


@pytest.mark.parametrize(
    ("capability", "left_high", "dtype", "product", "reason"),
    [
        ((9, 0), frozenset(), torch.bfloat16, "grouped", None),
        ((8, 9), frozenset(), torch.bfloat16, "rowwise", "capability 9.0, and this GPU has 8.9"),
        ((12, 0), frozenset(), torch.bfloat16, "rowwise", "this GPU has 12.0"),
        ((9, 0), SOME_HIGH, torch.bfloat16, "rowwise", "2 of 8 experts are not quantized"),
        ((9, 0), frozenset(), torch.float16, "rowwise", "gives bfloat16, and the model computes in torch.float16"),
        ((9, 0), frozenset(), torch.float32, "plain", "the model computes in torch.float32"),
    ],
)
def test_the_choice_of_a_product_says_why_it_is_not_one_for_all(
    capability: tuple[int, int],
    left_high: frozenset[str],
    dtype: torch.dtype,
    product: str,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU: the layers have no values when the choice is made."""
    cuda = torch.device("cuda")

    def on_cuda(
        in_features: int, out_features: int, device: torch.device, *rest: Any, **settings: Any
    ) -> ProductChoice:
        return choose_product(in_features, out_features, cuda, *rest, **settings)

    monkeypatch.setattr(fp8_experts, "choose_product", on_cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    spec = with_experts(tiny_spec())
    quantization = quantization_of(spec, "fp8").without(left_high)
    model = PackedModel(spec, MAX_SEQ_LEN, TensorOptions(torch.device("cpu"), dtype), quantization=quantization)
    choices = {path: choice for path, choice in model.products.items() if ".experts." in path}
    assert choices.keys() == {"layers.1.mlp.experts.up", "layers.1.mlp.experts.down"}
    for choice in choices.values():
        assert choice.product == product
        assert (reason or "") in " ".join(choice.reasons)
        assert bool(choice.reasons) == (reason is not None)
