"""Attention kernels, the steps between the products, and products in FP8, by themselves on a GPU.

An attention kernel is compared with the plain one in FP32. A fused kernel is compared with its twin, and measured
beside that twin as Inductor compiles it and as it runs operator by operator. A product in FP8 is compared with the
product of the same numbers in FP32, and measured beside the product in BF16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bei_build.spec.flops import visible_pairs
from bei_build.spec.quantization import LayerQuantization
from bei_build.torch_graph import attention_kernels
from bei_build.torch_graph.fp8 import FP8, FP8Linear, Rounded, Rounding, with_ones
from bei_build.torch_graph.parameters import Linear
from benchmarks.gpu.peers import require
from benchmarks.gpu.record import Found, Skipped, rounded, throughput
from benchmarks.gpu.shapes import uniform
from tests.bei_build.torch_graph.gpu_cases import (
    LONGEST,
    Attention,
    Fused,
    attention_inputs,
    attention_of,
    random_numbers,
    storages,
)

_PARITY_LENGTHS = [70, 1, 33, 128, 5, 512]
# Relative to all values together.
_MOST_ERROR_OF_ATTENTION = 0.02  # of BF16; a wrong mask is off by 0.1 and more
_MOST_ERROR = 0.01  # of BF16
_MOST_ERROR_OF_FP8 = 0.05  # a value between two numbers may go to either
_MOST_ERROR_OF_A_PRODUCT = 0.02  # of the sums of use_fast_accum, and BF16


def attention(
    case: Attention,
    device: torch.device,
    *,
    budget_s: float,
    work_of: Callable[..., Callable[[], Tensor]] = attention_of,
) -> Found:
    """The error of ``case`` on short texts, and its speed on 16,384 tokens, as ``work_of`` computes it. Raises
    ValueError where it is wrong."""
    if device.type != "cuda":
        raise Skipped("packed kernels need a GPU")
    if case.kernel == "ragged":
        require("triton")
    step, parts, terms = attention_inputs(case, _PARITY_LENGTHS, device)
    query, key, value = (part.float() for part in parts)
    expected = attention_kernels.plain(query, key, value, case.spec, terms, step, partial_keys=False)
    num_tokens = sum(_PARITY_LENGTHS)
    error = (work_of(case, parts, terms, step)() - expected)[:num_tokens].norm() / expected[:num_tokens].norm()
    if not error < _MOST_ERROR_OF_ATTENTION:
        raise ValueError(f"off by {error:.3f} of all values")
    lengths = uniform(16_384, 16, LONGEST)
    step, parts, terms = attention_inputs(case, lengths, device)
    timed = throughput(work_of(case, parts, terms, step), device, budget_s=budget_s)
    operations = sum(visible_pairs(case.spec, length) for length in lengths) * 4 * case.spec.width
    rate = rounded(operations / timed["ms"] / 1e9)
    return {**timed, "tflops": rate, "relative_error": round(float(error), 5), "tokens": sum(lengths)}


def fused(case: Fused, device: torch.device, *, budget_s: float) -> Found:
    """The error of ``case``, and its speed beside its twin's. Raises ValueError where it is wrong."""
    is_dry = device.type != "cuda"
    if not is_dry:
        require("triton")
    ours, twin, num_bytes = case.make(device, 64 if is_dry else case.num_tokens)
    with torch.inference_mode():
        errors = [_error(found, expected) for found, expected in zip(ours(), twin(), strict=True)]
        for error, bound in errors:
            if not error < bound:
                raise ValueError(f"the kernel is off by {error:.3f}")
        found = throughput(lambda: ours(), device, budget_s=budget_s)
        beside = {"eager_ms": throughput(lambda: twin(), device, budget_s=budget_s / 4)["ms"]}
        if not is_dry:
            by_inductor = torch.compile(twin, dynamic=False, fullgraph=True)
            beside["inductor_ms"] = throughput(lambda: by_inductor(), device, budget_s=budget_s)["ms"]
    worst = max(error for error, _ in errors)
    return {**found, **beside, "gb_per_s": rounded(num_bytes / found["ms"] / 1e6), "relative_error": round(worst, 5)}


def _error(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Relative to all values together, and the largest that is allowed."""
    bound = _MOST_ERROR_OF_FP8 if found.dtype == FP8 else _MOST_ERROR
    wide, exact = (part.float().double() for part in (found, expected))
    return float((wide - exact).norm() / exact.norm()), bound


@dataclass(frozen=True)
class Product:
    """A product in FP8 of ``rows`` tokens; ``has_one_scale``: of the matrix, not one a row of it."""

    rows: int
    in_features: int
    out_features: int
    has_one_scale: bool = False


PRODUCTS = {
    f"{name}{', one scale' * has_one_scale}": Product(*sizes, has_one_scale)
    for name, sizes in {
        "Mistral-7B, gate and up": (16_384, 4096, 28_672),
        "Mistral-7B, down": (16_384, 14_336, 4096),
        "BERT-large, up": (32_768, 1024, 4096),
        "Mistral-7B, gate and up, 32 tokens": (32, 4096, 28_672),
    }.items()
    for has_one_scale in (False, True)
}


def product(case: Product, device: torch.device, *, budget_s: float) -> Found:
    """A linear layer's error and speed, and that of the same in BF16. Raises ValueError where it is wrong."""
    is_dry = device.type != "cuda"
    if not is_dry and torch.cuda.get_device_capability(device) < (8, 9):
        raise Skipped("FP8 products need a GPU of compute capability 8.9 or later")
    divisor = 64 if is_dry else 1
    rows, inner, columns = (max(16, size // divisor) for size in (case.rows, case.in_features, case.out_features))
    storage, layer = storages(device)[0], LayerQuantization(8.0)
    like = Linear(inner, columns, True, storage)
    assert like.bias is not None
    like.bias.copy_(random_numbers(device, columns))
    like.weight.copy_(random_numbers(device, columns, inner) * inner**-0.5)
    one = torch.full((columns,), float(like.weight.abs().max()) / 448).numpy() if case.has_one_scale else None
    module = FP8Linear(like, Rounding(layer, storage), layer, one)
    module.fill(like.weight.float())
    value = random_numbers(device, rows, inner)
    with torch.inference_mode():
        reading = with_ones(module.rounding(value))
        expected = module.plain(Rounded(*(part[:256] for part in reading))).double()
        error = float((module(reading)[:256].double() - expected).norm() / expected.norm())
        if not error < _MOST_ERROR_OF_A_PRODUCT:
            raise ValueError(f"the product is off by {error:.3f}")
        found = throughput(lambda: module(reading), device, budget_s=budget_s)
        in_bf16 = throughput(lambda: like(value), device, budget_s=budget_s)["ms"]
    return {
        **found,
        "tflops": rounded(2 * rows * inner * columns / found["ms"] / 1e9),
        "bf16_ms": in_bf16,
        "product": module.choice.product,
        "relative_error": round(error, 5),
    }
