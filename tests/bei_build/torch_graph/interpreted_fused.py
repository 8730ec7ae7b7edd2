"""The fused Triton kernels in Triton's interpreter: their distances from their twins, as JSON by case.

TRITON_INTERPRET=1 python -m tests.bei_build.torch_graph.interpreted_fused [CASE ...]

A difference is relative to the largest value. For results in FP8, it is the share of numbers that differ from the
twin's, or 1 if one of them is more than one step away: a value between two numbers may go to either.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import ml_dtypes
import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from torch import Tensor

from bei.core import PackedBatch
from bei.engine.packing import graph_inputs
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import Activation, LayerSpec, NormalizeSpec, NormSpec, Pooling, RopeSpec
from bei_build.spec.quantization import LayerQuantization, Quantization
from bei_build.torch_graph.activation import _NOT_FUSED, gated
from bei_build.torch_graph.fp8 import Rounding
from bei_build.torch_graph.fusion_choice import ALL, NONE, Fusions
from bei_build.torch_graph.heads import Head
from bei_build.torch_graph.model import packed_model, run
from bei_build.torch_graph.norms import Norm, States
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import TensorOptions
from bei_build.torch_graph.positions import Rotation
from tests.bei_build.targets.test_fp8 import quantization_of
from tests.bei_build.targets.tiny import MAX_SEQ_LEN, VOCABULARY, random_weights, tiny_spec
from tests.support.builds import random_encodings

CPU = torch.device("cpu")
TRITON, COMPOSED = (TensorOptions(CPU, torch.float32, fusions) for fusions in (ALL, NONE))
WIDTH = 48  # no power of two
LENGTHS = [70, 1, 33, 5]  # lengths of pooled sequences: above and below a block of rows


def round_as_hardware_does() -> None:
    """Give the interpreter the GPU's conversion to FP8: its own truncates digits."""
    own = interpreter._convert_float

    def convert(values: Any, of: Any, to: Any, mode: Any) -> Any:
        if (of, to) == (tl.float32, tl.float8e4nv):
            return values.view(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return own(values, of, to, mode)

    interpreter._convert_float = convert


def away(found: Tensor, expected: Tensor) -> float:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if found.dtype != torch.float8_e4m3fn:
        return float((found - expected).abs().max() / expected.abs().max())
    steps = (in_order(found) - in_order(expected)).abs()
    return 1.0 if steps.max() > 1 else float((steps > 0).float().mean())


def in_order(codes: Tensor) -> Tensor:
    """FP8 as integers in the order of the numbers."""
    bits = codes.view(torch.uint8).int()
    return torch.where(bits >= 128, 128 - bits, bits)


def rounding(options: TensorOptions, smooth: bool) -> Rounding:
    factors = tuple(np.linspace(0.5, 2.0, WIDTH).tolist()) if smooth else None
    return Rounding(LayerQuantization(2.0, factors), options)


def of_norm(spec: NormSpec, *, added: bool = True, factor: float = 1.0, smooth: bool | None = None) -> float:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(37, WIDTH, generator=generator) for _ in range(2)]
    weights = [torch.randn(WIDTH, generator=generator) for _ in range(2)]
    found = []
    for options in (TRITON, COMPOSED):
        norm = Norm(spec, WIDTH, options)
        for parameter, values in zip((norm.weight, norm.bias), weights, strict=True):
            if parameter is not None:
                parameter.copy_(values)
        by = None if smooth is None else rounding(options, smooth)
        states = States(rows[0], rows[1] if added else None, factor)
        normed = norm.of_sum(states, PackedStep({"token_ones": torch.ones(37)}), by, total=added, value=True)
        parts = [normed.total, normed.value, None if normed.rounded is None else normed.rounded.codes]
        found.append([part for part in parts if part is not None])
    return max(away(ours, theirs) for ours, theirs in zip(*found, strict=True))


def of_activation(activation: Activation, *, is_gated: bool = False, smooth: bool | None = None) -> float:
    generator = torch.Generator().manual_seed(1)
    # Halves of one product: rows are farther apart than they are long.
    value, gate = (6 * torch.randn(21, 2 * WIDTH, generator=generator)).chunk(2, dim=1)
    found = [
        gated(
            value,
            gate if is_gated else None,
            activation,
            None if smooth is None else rounding(options, smooth),
            options.fusions,
        )
        for options in (TRITON, COMPOSED)
    ]
    return away(*found)


def of_extremes() -> float:
    """Too large values become the largest number, and NaN stays."""
    rows = torch.tensor([[1e30, -1e30, float("nan"), float("inf"), 0.0, -0.0, 1e-30, 2.0]])
    layer = LayerQuantization(448.0)
    found, expected = (Rounding(layer, options)(rows).view(torch.uint8) for options in (TRITON, COMPOSED))
    assert expected[0, :4].tolist() == [0x7E, 0xFE, 0x7F, 0x7E]
    return float((found != expected).float().mean())


def of_rotation(
    rope: RopeSpec, norm: NormSpec | None = None, *, heads: tuple[int, int] = (6, 2), head_dim: int = 16
) -> float:
    generator = torch.Generator().manual_seed(2)
    tokens = 9
    joined = torch.randn(tokens, sum(heads) * head_dim, generator=generator)
    parts = torch.split(joined, [count * head_dim for count in heads], dim=1)
    query, key = (torch.unflatten(part, 1, (count, head_dim)) for part, count in zip(parts, heads, strict=True))
    norms = [Norm(norm, head_dim, COMPOSED) for _ in range(2)] if norm else []
    for each in norms:
        for parameter in each.parameters():
            parameter.copy_(torch.randn(head_dim, generator=generator))
    rotation = Rotation(rope, 64, CPU, 0)
    positions = torch.randint(0, 64, (tokens,), generator=generator, dtype=torch.int32)
    step = PackedStep({"position_ids": positions, "token_seq_lens": torch.full((tokens,), 40, dtype=torch.int32)})
    found = rotation.of_both(query, key, (norms[0], norms[1]) if norms else None, step)
    if norms:
        query, key = norms[0](query), norms[1](key)
    return max(away(ours, rotation(part, step)) for ours, part in zip(found, (query, key), strict=True))


def of_pooling(mode: Pooling, *, normalizes: bool = False, prompts: bool = True) -> float:
    spec = replace(tiny_spec(pooling=(mode,)), marked_id=3, pools_prompt=prompts)
    if normalizes:
        spec = replace(spec, heads=(replace(spec.heads[0], layers=(NormalizeSpec(),)),))
    encodings = [one._replace(num_unpooled=min(2, one.num_tokens - 1)) for one in random_encodings(LENGTHS, VOCABULARY)]
    batch = PackedBatch.from_encodings(encodings)
    heads = [Head(spec.heads[0], spec, torch.nn.Module(), options) for options in (TRITON, COMPOSED)]
    arrays = graph_inputs(batch, sorted({"input_ids", *heads[0].reads}))
    step = PackedStep({name: torch.from_numpy(array) for name, array in arrays.items()})
    hidden = torch.randn(len(arrays["input_ids"]), 200, generator=torch.Generator().manual_seed(3))
    found, expected = (head(hidden, step)[: batch.batch_size] for head in heads)
    return away(found, expected)


def of_nan() -> float:
    """A text with NaN has a vector of NaN in all modes, and no other text has."""
    hidden = torch.randn(10, 8, generator=torch.Generator().manual_seed(4))
    hidden[7] = torch.nan
    from bei_build.torch_graph.fused.pool import pool

    starts, ones = torch.tensor([0, 5, 10], dtype=torch.int32), torch.ones(10)
    found = [pool(hidden, starts, ones, mode, 0.0, False) for mode in ("max", "sum", "mean", "mean_sqrt_len")]
    return float(sum(rows[0].isnan().any() or not rows[1].isnan().all() for rows in found))


def of_model(spec: ModelSpec, *, quantized: bool, smooth: bool = False) -> float:
    """The distance of a whole model's outputs."""
    quantization: Quantization | None = quantization_of(spec, "fp8", smooth=smooth) if quantized else None
    batch = PackedBatch.from_encodings(random_encodings([17, 1, 5], VOCABULARY))

    def outputs(fusions: Fusions) -> Tensor:
        model = packed_model(spec, random_weights(spec), MAX_SEQ_LEN, quantization=quantization, fusions=fusions)
        return torch.from_numpy(run(model, batch)["embedding"])

    return away(outputs(ALL), outputs(NONE))


def changed(**changes: Any) -> ModelSpec:
    """A tiny BERT with other layers."""

    def layer(spec: LayerSpec) -> LayerSpec:
        mlp = replace(spec.mlp, **{key: changes[key] for key in ("gated", "activation") if key in changes})
        spec = spec.with_attention(**{key: changes[key] for key in ("rope", "qk_norm") if key in changes})
        rest = {key: changes[key] for key in ("placement", "parallel", "residual_scale", "norm") if key in changes}
        return replace(spec, mlp=mlp, **rest)

    spec = tiny_spec()
    return replace(spec, layers=tuple(map(layer, spec.layers)), final_norm=changes.get("norm"))


ROPE = RopeSpec(tuple(np.geomspace(1.0, 1e-3, 8).tolist()))
RMS = NormSpec(1e-6, kind="rms", bias=False)
LLAMA: dict[str, Any] = {"placement": "pre", "gated": True, "activation": "silu", "norm": RMS, "rope": ROPE}
CASES: dict[str, Callable[[], float]] = {
    "norm: LayerNorm of a sum": partial(of_norm, NormSpec(1e-5)),
    "norm: LayerNorm without bias, rounded": partial(of_norm, NormSpec(1e-5, bias=False), smooth=False),
    "norm: LayerNorm without weights, smoothed": partial(of_norm, NormSpec(1e-5, weight=False), smooth=True),
    "norm: RMSNorm, rounded": partial(of_norm, RMS, smooth=False),
    "norm: RMSNorm with an offset, of no sum, smoothed": partial(
        of_norm, replace(RMS, offset=1.0), added=False, smooth=True
    ),
    "norm: a scaled sum": partial(of_norm, RMS, factor=0.25),
    **{f"activation: {name}": partial(of_activation, name) for name in get_args(Activation) if name not in _NOT_FUSED},
    "activation: SwiGLU": partial(of_activation, "silu", is_gated=True),
    "activation: GeGLU, rounded": partial(of_activation, "gelu_tanh", is_gated=True, smooth=False),
    "activation: GELU, smoothed": partial(of_activation, "gelu", smooth=True),
    "activation: none, rounded": partial(of_activation, "identity", smooth=False),
    "rounding: extremes": of_extremes,
    "rotation: halves": partial(of_rotation, ROPE),
    "rotation: neighbours": partial(of_rotation, replace(ROPE, interleaved=True)),
    "rotation: a part of each head": partial(of_rotation, RopeSpec((1.0, 0.1, 0.01)), head_dim=26),
    "rotation: norms of heads": partial(of_rotation, ROPE, RMS),
    "rotation: norms with an offset": partial(of_rotation, ROPE, replace(RMS, offset=1.0)),
    "rotation: LayerNorms of heads, neighbours": partial(
        of_rotation, replace(ROPE, interleaved=True), NormSpec(1e-5), heads=(3, 1)
    ),
    "rotation: long texts": partial(
        of_rotation, replace(ROPE, long_inv_freq=tuple(0.5 * it for it in ROPE.inv_freq), long_from=20)
    ),
    **{
        f"pooling: {mode}": partial(of_pooling, mode)
        for mode in ("cls", "last", "max", "mean", "sum", "mean_sqrt_len", "weighted_mean", "last_marked")
    },
    "pooling: mean without prompts, unit length": partial(of_pooling, "mean", normalizes=True, prompts=False),
    "pooling: last, unit length": partial(of_pooling, "last", normalizes=True),
    "pooling: NaN": of_nan,
    "model: BERT": partial(of_model, tiny_spec(), quantized=False),
    "model: BERT, FP8": partial(of_model, tiny_spec(), quantized=True),
    "model: Llama, FP8": partial(of_model, changed(**LLAMA), quantized=True),
    "model: Llama, FP8, smoothed": partial(of_model, changed(**LLAMA), quantized=True, smooth=True),
    "model: Qwen 3": partial(of_model, changed(**LLAMA, qk_norm=RMS), quantized=False),
    "model: Gemma 2": partial(of_model, changed(**{**LLAMA, "placement": "both"}), quantized=False),
    "model: OLMo 2": partial(of_model, changed(**{**LLAMA, "placement": "output"}), quantized=False),
    "model: Granite": partial(of_model, changed(**LLAMA, residual_scale=0.2), quantized=False),
    "model: GPT-J, FP8": partial(of_model, changed(placement="pre", parallel=True, rope=ROPE), quantized=True),
}


def main() -> None:
    round_as_hardware_does()
    json.dump({name: CASES[name]() for name in sys.argv[1:] or CASES}, sys.stdout)


if __name__ == "__main__":
    main()
