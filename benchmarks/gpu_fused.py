"""The steps between the products, and products in FP8, by themselves on a GPU: ours, and PyTorch's own beside them.

A fused kernel is compared with its twin, in FP32, and measured beside that twin as Inductor compiles it and as it runs
operator by operator. A product in FP8 is compared with the product of the same numbers in FP32, and measured beside the
product in BF16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from bei_build.spec.parts import Activation, NormSpec, RopeSpec
from bei_build.spec.quantization import LayerQuantization
from bei_build.torch_graph.activation import gated
from bei_build.torch_graph.fp8 import FP8, FP8Linear, Rounded, Rounding, with_ones
from bei_build.torch_graph.fusion_choice import ALL, NONE
from bei_build.torch_graph.heads import pool_by_triton, pool_tokens
from bei_build.torch_graph.norms import Norm, States
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import Linear, TensorOptions
from bei_build.torch_graph.positions import Rotation
from benchmarks.gpu_peers import require
from benchmarks.gpu_record import Found, Skipped, rounded, throughput
from benchmarks.gpu_shapes import SHAPES

Work: TypeAlias = Callable[[], Iterable[Tensor]]

_MOST_ERROR = 0.01  # of BF16, relative to all values together
_MOST_ERROR_OF_FP8 = 0.05  # a value between two numbers may go to either
_MOST_ERROR_OF_A_PRODUCT = 0.02  # of the sums of use_fast_accum, and BF16


@dataclass(frozen=True)
class Case:
    """``make`` gives, for a device and a number of tokens, the work by Triton, its twin, and the bytes that have to be
    read and written."""

    make: Callable[[torch.device, int], tuple[Work, Work, int]]
    num_tokens: int = 32_768


def _options(device: torch.device) -> tuple[TensorOptions, TensorOptions]:
    """By Triton, where that runs, and composed."""
    fusions = ALL if device.type == "cuda" else NONE
    return TensorOptions(device, torch.bfloat16, fusions), TensorOptions(device, torch.bfloat16)


def _random(device: torch.device, *shape: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).bfloat16()


def _norm(spec: NormSpec, width: int, is_pre: bool, device: torch.device, num_tokens: int) -> tuple[Work, Work, int]:
    """Sum, norm and FP8: in front of a product, where the sum goes on, or behind one, where the norm does."""
    hidden, added = _random(device, num_tokens, width), _random(device, num_tokens, width) * 0.5

    def by(options: TensorOptions) -> Work:
        norm, rounding = Norm(spec, width, options), Rounding(LayerQuantization(8.0), options)
        for parameter in norm.parameters():
            parameter.fill_(0.5)

        def work() -> Iterable[Tensor]:
            found = norm.of_sum(States(hidden, added), PackedStep({}), rounding, total=is_pre, value=not is_pre)
            kept = found.total if is_pre else found.value
            assert kept is not None
            assert found.rounded is not None
            return kept, found.rounded.codes

        return work

    ours, twin = map(by, _options(device))
    return ours, twin, num_tokens * width * (2 + 2 + 2 + 1)


def _activation(
    name: Activation, width: int, is_gated: bool, device: torch.device, num_tokens: int
) -> tuple[Work, Work, int]:
    """Both halves of one product, or one, to FP8."""
    value, *gates = torch.split(_random(device, num_tokens, width * (1 + is_gated)), width, dim=1)

    def by(options: TensorOptions) -> Work:
        rounding = Rounding(LayerQuantization(16.0), options)
        return lambda: (gated(value, gates[0] if gates else None, name, rounding, options.fusions),)

    ours, twin = map(by, _options(device))
    return ours, twin, num_tokens * width * (3 + 2 * is_gated)


def _rotation(
    heads: tuple[int, int], head_dim: int, has_norms: bool, device: torch.device, num_tokens: int
) -> tuple[Work, Work, int]:
    """Queries and keys as parts of one product with the values."""
    joined = _random(device, num_tokens, (heads[0] + 2 * heads[1]) * head_dim)
    parts = torch.split(joined, [count * head_dim for count in (*heads, heads[1])], dim=1)
    query, key = (torch.unflatten(part, 1, (-1, head_dim)) for part in parts[:2])
    spec = RopeSpec(tuple(10_000.0 ** (-2 * index / head_dim) for index in range(head_dim // 2)))
    rotation = Rotation(spec, 512, device, 0)
    positions = torch.arange(num_tokens, device=device, dtype=torch.int32) % 512
    norms = None
    if has_norms:
        norm = NormSpec(1e-6, kind="rms", bias=False)
        norms = Norm(norm, head_dim, _options(device)[1]), Norm(norm, head_dim, _options(device)[1])
        for each in norms:
            for parameter in each.parameters():
                parameter.fill_(0.5)

    def twin() -> Iterable[Tensor]:
        step = PackedStep({"position_ids": positions})
        sides = (query, key) if norms is None else (norms[0](query), norms[1](key))
        return [rotation(side, step) for side in sides]

    def ours() -> Iterable[Tensor]:
        return rotation.of_both(query, key, norms, PackedStep({"position_ids": positions}))

    num_bytes = num_tokens * sum(heads) * head_dim * 4
    return ours if device.type == "cuda" else twin, twin, num_bytes


def _pooling(width: int, device: torch.device, num_tokens: int) -> tuple[Work, Work, int]:
    """The mean over texts of 256 tokens."""
    hidden = _random(device, num_tokens, width)
    length = min(256, num_tokens)
    starts = torch.arange(0, num_tokens + 1, length, device=device, dtype=torch.int32)
    inputs = {
        "input_ids": torch.zeros(num_tokens, dtype=torch.int32, device=device),
        "token_pool_mask": torch.ones(num_tokens, device=device),
        "cu_query_lens": starts,
    }
    spec = SHAPES["minilm"].spec

    def twin() -> Iterable[Tensor]:
        return (pool_tokens("mean", hidden, spec, PackedStep(inputs)),)

    def ours() -> Iterable[Tensor]:
        return (pool_by_triton("mean", hidden, spec, PackedStep(inputs), normalizes=False),)

    return ours if device.type == "cuda" else twin, twin, num_tokens * width * 2


_LAYER, _RMS = NormSpec(1e-12), NormSpec(1e-5, kind="rms", bias=False)
FUSED = {
    "norm of a sum to FP8, BERT-large": Case(partial(_norm, _LAYER, 1024, False)),
    "norm of a sum to FP8, Mistral-7B": Case(partial(_norm, _RMS, 4096, True), 16_384),
    "GELU to FP8, BERT-large": Case(partial(_activation, "gelu", 4096, False)),
    "SwiGLU to FP8, Mistral-7B": Case(partial(_activation, "silu", 14_336, True), 16_384),
    "rotation, Mistral-7B": Case(partial(_rotation, (32, 8), 128, False), 16_384),
    "rotation and norms of heads, Qwen3-8B": Case(partial(_rotation, (32, 8), 128, True), 16_384),
    "mean pooling, BERT-large": Case(partial(_pooling, 1024)),
    "norm of a sum to FP8, Mistral-7B, 32 tokens": Case(partial(_norm, _RMS, 4096, True), 32),
    "rotation, Mistral-7B, 32 tokens": Case(partial(_rotation, (32, 8), 128, False), 32),
}


def fused(case: Case, device: torch.device, *, budget_s: float) -> Found:
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
    options, layer = _options(device)[0], LayerQuantization(8.0)
    like = Linear(inner, columns, True, options)
    assert like.bias is not None
    like.bias.copy_(_random(device, columns))
    like.weight.copy_(_random(device, columns, inner) * inner**-0.5)
    one = torch.full((columns,), float(like.weight.abs().max()) / 448).numpy() if case.has_one_scale else None
    module = FP8Linear(like, Rounding(layer, options), layer, one)
    module.fill(like.weight.float())
    value = _random(device, rows, inner)
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
