"""Kernels of target cuda in the sizes of real models: attention, and the steps between the products, each with the work
that it replaces. ``test_gpu`` compares them on a GPU, and ``benchmarks.gpu`` measures them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from bei.engine.packing import graph_inputs
from bei_build.spec.parts import Activation, AttentionSpec, DisentangledSpec, NormSpec, RelativeBiasSpec, RopeSpec
from bei_build.spec.position_tables import alibi_slopes, disentangled_rows
from bei_build.spec.quantization import LayerQuantization
from bei_build.torch_graph import attention_kernels
from bei_build.torch_graph.activation import gated
from bei_build.torch_graph.fp8 import Rounding
from bei_build.torch_graph.fusion_choice import ALL, NONE
from bei_build.torch_graph.heads import pool_by_triton, pool_tokens
from bei_build.torch_graph.norms import Norm, States
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import TensorOptions
from bei_build.torch_graph.positions import Rotation, ScoreTerms
from benchmarks.gpu.shapes import SHAPES, batch_of

Work: TypeAlias = Callable[[], Iterable[Tensor]]
Parts: TypeAlias = tuple[Tensor, ...]

LONGEST = 512


@dataclass(frozen=True)
class Attention:
    """An attention as models have it, and the kernel that is to compute it."""

    spec: AttentionSpec
    kernel: attention_kernels.Kernel


@dataclass(frozen=True)
class Fused:
    """``make`` gives, for a device and a number of tokens, the work by Triton, its twin, and the bytes that have to be
    read and written."""

    make: Callable[[torch.device, int], tuple[Work, Work, int]]
    num_tokens: int = 32_768


def _spec(heads: int, head_dim: int, kv_heads: int | None = None, **settings: object) -> AttentionSpec:
    return AttentionSpec(heads, head_dim, kv_heads or heads, head_dim**-0.5, **settings)  # type: ignore[arg-type]


_DEBERTA = DisentangledSpec(256, True, 512, True, True, True, None)

ATTENTION = {
    "BERT-large": Attention(_spec(16, 64), "flash"),
    "BERT-large, by Triton": Attention(_spec(16, 64), "ragged"),
    "Mistral-7B": Attention(_spec(32, 128, 8, causal=True), "flash"),
    "Mistral-7B, by Triton": Attention(_spec(32, 128, 8, causal=True), "ragged"),
    "ModernBERT's windows": Attention(_spec(12, 64, window=64), "flash"),
    "ModernBERT's windows, by Triton": Attention(_spec(12, 64, window=64), "ragged"),
    "Gemma 2": Attention(_spec(8, 256, 4, causal=True, softcap=50.0), "ragged"),
    "ALiBi": Attention(_spec(12, 64, alibi=True), "ragged"),
    "MPNet": Attention(_spec(12, 64, relative_bias=RelativeBiasSpec(32, 128)), "ragged"),
    "DeBERTa v3": Attention(_spec(12, 64, disentangled=_DEBERTA), "ragged"),
    "heads of 26": Attention(_spec(12, 26), "ragged"),
}


def attention_inputs(case: Attention, lengths: list[int], device: torch.device) -> tuple[PackedStep, Parts, ScoreTerms]:
    """A step, random BF16 queries, keys and values as one product gives them, and random terms."""
    spec = case.spec
    names = {
        *attention_kernels.tensors_read("plain", spec, partial_keys=False),
        *attention_kernels.tensors_read(case.kernel, spec, partial_keys=False),
        "input_ids",
    }
    arrays = graph_inputs(batch_of(lengths, 1000), sorted(names))
    step = PackedStep({name: torch.from_numpy(array).to(device) for name, array in arrays.items()})
    generator = torch.Generator(device).manual_seed(0)
    num_tokens, heads = len(arrays["input_ids"]), (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    joined = torch.randn(num_tokens, sum(heads) * spec.head_dim, generator=generator, device=device).bfloat16()
    split = torch.split(joined, [count * spec.head_dim for count in heads], dim=-1)
    parts = tuple(torch.unflatten(part, -1, (count, spec.head_dim)) for part, count in zip(split, heads, strict=True))
    return step, parts, _terms(spec, num_tokens, generator)


def _terms(spec: AttentionSpec, num_tokens: int, generator: torch.Generator) -> ScoreTerms:
    device = generator.device
    if spec.alibi:
        return ScoreTerms(slopes=torch.from_numpy(alibi_slopes(spec.num_heads)).to(device))
    if spec.relative_bias:
        shape = 2 * spec.relative_bias.max_distance + 1, spec.num_heads
        return ScoreTerms(relative_bias=torch.randn(shape, generator=generator, device=device))
    if not spec.disentangled:
        return ScoreTerms()
    shape3 = num_tokens, spec.num_heads, 2 * spec.disentangled.span
    products = [torch.randn(shape3, generator=generator, device=device).bfloat16() for _ in range(2)]
    rows = torch.from_numpy(disentangled_rows(spec.disentangled, LONGEST)).int().to(device)
    return ScoreTerms(by_query=products[0], by_key=products[1], rows=rows)


def attention_of(case: Attention, parts: Parts, terms: ScoreTerms, step: PackedStep) -> Callable[[], Tensor]:
    query, key, value = parts
    if case.kernel == "flash":
        return lambda: attention_kernels.flash(query, key, value, case.spec, step, partial_keys=False)
    from bei_build.torch_graph.ragged_attention import ragged

    return lambda: ragged(query, key, value, case.spec, terms, step, partial_keys=False)


def storages(device: torch.device) -> tuple[TensorOptions, TensorOptions]:
    """By Triton, where that runs, and composed."""
    fusions = ALL if device.type == "cuda" else NONE
    return TensorOptions(device, torch.bfloat16, fusions), TensorOptions(device, torch.bfloat16)


def random_numbers(device: torch.device, *shape: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).bfloat16()


def _norm(spec: NormSpec, width: int, is_pre: bool, device: torch.device, num_tokens: int) -> tuple[Work, Work, int]:
    """Sum, norm and FP8: in front of a product, where the sum goes on, or behind one, where the norm does."""
    hidden, added = random_numbers(device, num_tokens, width), random_numbers(device, num_tokens, width) * 0.5

    def by(storage: TensorOptions) -> Work:
        norm, rounding = Norm(spec, width, storage), Rounding(LayerQuantization(8.0), storage)
        step = PackedStep({"token_ones": torch.ones(num_tokens, device=device)})
        for parameter in norm.parameters():
            parameter.fill_(0.5)

        def work() -> Iterable[Tensor]:
            found = norm.of_sum(States(hidden, added), step, rounding, total=is_pre, value=not is_pre)
            kept = found.total if is_pre else found.value
            assert kept is not None
            assert found.rounded is not None
            return kept, found.rounded.codes

        return work

    ours, twin = map(by, storages(device))
    return ours, twin, num_tokens * width * (2 + 2 + 2 + 1)


def _activation(
    name: Activation, width: int, is_gated: bool, device: torch.device, num_tokens: int
) -> tuple[Work, Work, int]:
    """Both halves of one product, or one, to FP8."""
    value, *gates = torch.split(random_numbers(device, num_tokens, width * (1 + is_gated)), width, dim=1)

    def by(storage: TensorOptions) -> Work:
        rounding = Rounding(LayerQuantization(16.0), storage)
        return lambda: (gated(value, gates[0] if gates else None, name, rounding, storage.fusions),)

    ours, twin = map(by, storages(device))
    return ours, twin, num_tokens * width * (3 + 2 * is_gated)


def _rotation(
    heads: tuple[int, int], head_dim: int, has_norms: bool, device: torch.device, num_tokens: int
) -> tuple[Work, Work, int]:
    """Queries and keys as parts of one product with the values."""
    joined = random_numbers(device, num_tokens, (heads[0] + 2 * heads[1]) * head_dim)
    parts = torch.split(joined, [count * head_dim for count in (*heads, heads[1])], dim=1)
    query, key = (torch.unflatten(part, 1, (-1, head_dim)) for part in parts[:2])
    spec = RopeSpec(tuple(10_000.0 ** (-2 * index / head_dim) for index in range(head_dim // 2)))
    rotation = Rotation(spec, 512, device, 0)
    positions = torch.arange(num_tokens, device=device, dtype=torch.int32) % 512
    norms = None
    if has_norms:
        norm = NormSpec(1e-6, kind="rms", bias=False)
        norms = Norm(norm, head_dim, storages(device)[1]), Norm(norm, head_dim, storages(device)[1])
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
    hidden = random_numbers(device, num_tokens, width)
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
    "norm of a sum to FP8, BERT-large": Fused(partial(_norm, _LAYER, 1024, False)),
    "norm of a sum to FP8, Mistral-7B": Fused(partial(_norm, _RMS, 4096, True), 16_384),
    "GELU to FP8, BERT-large": Fused(partial(_activation, "gelu", 4096, False)),
    "SwiGLU to FP8, Mistral-7B": Fused(partial(_activation, "silu", 14_336, True), 16_384),
    "rotation, Mistral-7B": Fused(partial(_rotation, (32, 8), 128, False), 16_384),
    "rotation and norms of heads, Qwen3-8B": Fused(partial(_rotation, (32, 8), 128, True), 16_384),
    "mean pooling, BERT-large": Fused(partial(_pooling, 1024)),
    "norm of a sum to FP8, Mistral-7B, 32 tokens": Fused(partial(_norm, _RMS, 4096, True), 32),
    "rotation, Mistral-7B, 32 tokens": Fused(partial(_rotation, (32, 8), 128, False), 32),
}
