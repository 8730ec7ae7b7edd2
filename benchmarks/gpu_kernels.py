"""The attention kernels by themselves on a GPU: each against the plain one in FP32, and its speed on mixed lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bei.engine.packing import graph_inputs
from bei_build.spec.flops import visible_pairs
from bei_build.spec.parts import AttentionSpec, DisentangledSpec, RelativeBiasSpec
from bei_build.spec.position_tables import alibi_slopes, disentangled_rows
from bei_build.torch_graph import attention_kernels
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.positions import ScoreTerms
from benchmarks.gpu_peers import require
from benchmarks.gpu_record import Found, Skipped, rounded, throughput
from benchmarks.gpu_shapes import batch_of, uniform

_PARITY_LENGTHS = [70, 1, 33, 128, 5, 512]
_MOST_ERROR = 0.02  # of BF16, relative to all values together; a wrong mask is off by 0.1 and more
_LONGEST = 512


@dataclass(frozen=True)
class Case:
    """An attention as models have it, and the kernel that is to compute it."""

    spec: AttentionSpec
    kernel: attention_kernels.Kernel


def _spec(heads: int, head_dim: int, kv_heads: int | None = None, **settings: object) -> AttentionSpec:
    return AttentionSpec(heads, head_dim, kv_heads or heads, head_dim**-0.5, **settings)  # type: ignore[arg-type]


_DEBERTA = DisentangledSpec(256, True, 512, True, True, True, None)

CASES = {
    "BERT-large": Case(_spec(16, 64), "flash"),
    "BERT-large, by Triton": Case(_spec(16, 64), "ragged"),
    "Mistral-7B": Case(_spec(32, 128, 8, causal=True), "flash"),
    "Mistral-7B, by Triton": Case(_spec(32, 128, 8, causal=True), "ragged"),
    "ModernBERT's windows": Case(_spec(12, 64, window=64), "flash"),
    "ModernBERT's windows, by Triton": Case(_spec(12, 64, window=64), "ragged"),
    "Gemma 2": Case(_spec(8, 256, 4, causal=True, softcap=50.0), "ragged"),
    "ALiBi": Case(_spec(12, 64, alibi=True), "ragged"),
    "MPNet": Case(_spec(12, 64, relative_bias=RelativeBiasSpec(32, 128)), "ragged"),
    "DeBERTa v3": Case(_spec(12, 64, disentangled=_DEBERTA), "ragged"),
    "heads of 26": Case(_spec(12, 26), "ragged"),
}


def measured(case: Case, device: torch.device, *, budget_s: float) -> Found:
    """The error of ``case`` on short texts, and its speed on 16,384 tokens. Raises ValueError where it is wrong."""
    if device.type != "cuda":
        raise Skipped("packed kernels need a GPU")
    if case.kernel == "ragged":
        require("triton")
    step, parts, terms = _inputs(case, _PARITY_LENGTHS, device)
    query, key, value = (part.float() for part in parts)
    expected = attention_kernels.plain(query, key, value, case.spec, terms, step, partial_keys=False)
    num_tokens = sum(_PARITY_LENGTHS)
    error = (_computed(case, parts, terms, step)() - expected)[:num_tokens].norm() / expected[:num_tokens].norm()
    if not error < _MOST_ERROR:
        raise ValueError(f"off by {error:.3f} of all values")
    lengths = uniform(16_384, 16, _LONGEST)
    step, parts, terms = _inputs(case, lengths, device)
    timed = throughput(_computed(case, parts, terms, step), device, budget_s=budget_s)
    operations = sum(visible_pairs(case.spec, length) for length in lengths) * 4 * case.spec.width
    rate = rounded(operations / timed["ms"] / 1e9)
    return {**timed, "tflops": rate, "relative_error": round(float(error), 5), "tokens": sum(lengths)}


def _inputs(case: Case, lengths: list[int], device: torch.device) -> tuple[PackedStep, tuple[Tensor, ...], ScoreTerms]:
    """A step, random BF16 queries, keys and values as one product gives them, and random terms."""
    spec = case.spec
    names = {
        *attention_kernels.tensors_read("plain", partial_keys=False),
        *attention_kernels.tensors_read(case.kernel, partial_keys=False),
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
    rows = torch.from_numpy(disentangled_rows(spec.disentangled, _LONGEST)).int().to(device)
    return ScoreTerms(by_query=products[0], by_key=products[1], rows=rows)


def _computed(case: Case, parts: tuple[Tensor, ...], terms: ScoreTerms, step: PackedStep) -> Callable[[], Tensor]:
    query, key, value = parts
    if case.kernel == "flash":
        return lambda: attention_kernels.flash(query, key, value, case.spec, step, partial_keys=False)
    from bei_build.torch_graph.ragged_attention import ragged

    return lambda: ragged(query, key, value, case.spec, terms, step, partial_keys=False)
