"""The packed kernels and the module on a GPU, against the plain kernel in FP32 on the same GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bei.core import PackedBatch
from bei_build.spec.model_spec import ModelSpec
from bei_build.torch_graph.model import PackedModel, packed_model, run, tensors_of
from benchmarks.gpu.engines import CapturedEngine
from benchmarks.gpu.kernels import PRODUCTS, attention, fused, product
from tests.bei_build.targets.test_fp8 import quantization_of
from tests.bei_build.targets.tiny import MAX_SEQ_LEN, random_weights
from tests.bei_build.torch_graph.gpu_cases import ATTENTION, FUSED
from tests.bei_build.torch_graph.test_parity_graph import SPECS, encodings_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif("not torch.cuda.is_available()", reason="needs an NVIDIA GPU")]


def on_the_gpu(spec: ModelSpec, dtype: torch.dtype) -> PackedModel:
    return packed_model(spec, random_weights(spec), MAX_SEQ_LEN, dtype=dtype, device="cuda")


@pytest.mark.parametrize("name", ATTENTION)
def test_a_kernel_computes_what_the_plain_one_does(name: str) -> None:
    attention(ATTENTION[name], torch.device("cuda"), budget_s=0.05)  # raises where it does not


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_kernel_computes_what_its_twin_does(name: str) -> None:
    fused(FUSED[name], torch.device("cuda"), budget_s=0.05)  # raises where it does not


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_in_fp8_is_that_of_the_same_numbers(name: str) -> None:
    product(PRODUCTS[name], torch.device("cuda"), budget_s=0.05)  # raises where it is not


@pytest.mark.parametrize("name", ["positions: causal, window", "experts", "all poolings"])
def test_the_module_in_fp8_computes_what_it_does_on_a_cpu(name: str) -> None:
    spec = SPECS[name]
    batch = PackedBatch.from_encodings(encodings_of(spec))
    actual, expected = (
        run(
            packed_model(
                *(spec, random_weights(spec), MAX_SEQ_LEN),
                dtype=torch.bfloat16,
                device=device,
                quantization=quantization_of(spec, "fp8"),
            ),
            batch,
        )
        for device in ("cuda", "cpu")
    )
    for output, rows in expected.items():
        products = (actual[output] * rows).sum(1)
        norms = np.linalg.norm(actual[output], axis=1) * np.linalg.norm(rows, axis=1)
        assert (products >= 0.99 * norms).all(), output


@pytest.mark.parametrize("name", SPECS)
def test_the_module_in_bf16_stays_close_to_fp32(name: str) -> None:
    spec = SPECS[name]
    batch = PackedBatch.from_encodings(encodings_of(spec))
    actual, expected = (run(on_the_gpu(spec, dtype), batch) for dtype in (torch.bfloat16, torch.float32))
    for output, rows in expected.items():
        products = (actual[output] * rows).sum(1)
        norms = np.linalg.norm(actual[output], axis=1) * np.linalg.norm(rows, axis=1)
        assert (products >= 0.99 * norms).all(), output


def test_a_captured_step_answers_as_the_module_does() -> None:
    spec = SPECS["all poolings"]
    model = on_the_gpu(spec, torch.bfloat16)
    first, second = (PackedBatch.from_encodings(encodings_of(spec)[::order]) for order in (1, -1))
    with torch.inference_mode():
        captured = CapturedEngine(model, tensors_of(model, first), torch.device("cuda"))
        for batch in (first, second, first):
            inputs = tensors_of(model, batch)
            actual, expected = captured(inputs)["embedding"].clone(), model(inputs)["embedding"]
            torch.testing.assert_close(actual[: batch.batch_size], expected[: batch.batch_size])
