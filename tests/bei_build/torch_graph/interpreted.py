"""The Triton kernel in Triton's interpreter: its distance from the plain one, as JSON by case; where it rounds to
FP8, as in ``interpreted_fused``.

TRITON_INTERPRET=1 python -m tests.bei_build.torch_graph.interpreted [CASE ...]
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from bei.core import PackedBatch
from bei.engine.packing import graph_inputs
from bei_build.spec.parts import AttentionSpec, DisentangledSpec
from bei_build.spec.position_tables import alibi_slopes, disentangled_rows
from bei_build.torch_graph.attention_kernels import plain, tensors_read
from bei_build.torch_graph.fp8 import to_fp8
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.positions import ScoreTerms
from bei_build.torch_graph.ragged_attention import ragged
from tests.bei_build.torch_graph.interpreted_fused import away, round_as_hardware_does
from tests.support.builds import random_encodings

LENGTHS = [70, 1, 33, 64, 5]  # both sides of a block of 64 queries
SPEC = AttentionSpec(num_heads=4, head_dim=16, num_kv_heads=2, scale=0.3)
DISENTANGLED = DisentangledSpec(8, True, 32, True, True, True, None)
MAX_SEQ_LEN = 72
CASES: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "causal": {"causal": True},
    "window": {"window": 9},
    "window of one": {"window": 0},
    "causal window": {"causal": True, "window": 20},
    "soft cap": {"softcap": 2.0},
    "a head dimension that is no power of two": {"head_dim": 26},
    "ALiBi": {"alibi": True},
    "ALiBi, causal window": {"alibi": True, "causal": True, "window": 9},
    "relative bias": {"relative_bias": True},
    "disentangled": {"disentangled": True, "num_kv_heads": 4},
    "all at once": {"relative_bias": True, "alibi": True, "softcap": 2.0, "causal": True, "window": 30},
    "partial keys": {"partial": True},
    "partial keys, window": {"partial": True, "window": 9},
    "partial keys, causal": {"partial": True, "causal": True},
    "rounded": {"inverse": 1},
    "rounded, smoothed, heads of 26": {"inverse": SPEC.num_heads * 26, "head_dim": 26, "alibi": True},
}


def terms_of(spec: AttentionSpec, case: dict[str, Any], num_tokens: int, generator: torch.Generator) -> ScoreTerms:
    terms = ScoreTerms()
    if case.get("alibi"):
        terms = replace(terms, slopes=torch.from_numpy(alibi_slopes(spec.num_heads)))
    if case.get("relative_bias"):
        terms = replace(terms, relative_bias=torch.randn(2 * 12 + 1, spec.num_heads, generator=generator))
    if case.get("disentangled"):
        shape = num_tokens, spec.num_heads, 2 * DISENTANGLED.span
        terms = replace(
            terms,
            by_query=torch.randn(shape, generator=generator),
            by_key=torch.randn(shape, generator=generator),
            rows=torch.from_numpy(disentangled_rows(DISENTANGLED, MAX_SEQ_LEN).astype(np.int32)),
        )
    return terms


def difference(case: dict[str, Any]) -> float:
    """The largest difference between the two kernels, over all tokens of sequences."""
    generator = torch.Generator().manual_seed(0)
    known = {name: case[name] for name in ("causal", "window", "softcap", "head_dim", "num_kv_heads") if name in case}
    spec, is_partial = replace(SPEC, **known), bool(case.get("partial"))
    encodings = random_encodings(LENGTHS, 100)
    if is_partial:
        encodings = [one._replace(num_keys=max(1, one.num_tokens // 3)) for one in encodings]
    batch = PackedBatch.from_encodings(encodings)
    names = {name for kernel in ("plain", "ragged") for name in tensors_read(kernel, spec, partial_keys=is_partial)}
    arrays = graph_inputs(batch, sorted({*names, "input_ids"}))
    step = PackedStep({name: torch.from_numpy(array) for name, array in arrays.items()})
    num_tokens = len(arrays["input_ids"])
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    # Parts of one product, as joined layers give them: tokens are farther apart than their heads.
    joined = torch.randn(num_tokens, sum(heads) * spec.head_dim, generator=generator)
    parts = torch.split(joined, [count * spec.head_dim for count in heads], dim=-1)
    query, key, value = (
        torch.unflatten(part, -1, (count, spec.head_dim)) for part, count in zip(parts, heads, strict=True)
    )
    terms = terms_of(spec, case, num_tokens, generator)
    arguments = query, key, value, spec, terms, step
    expected = plain(*arguments, partial_keys=is_partial)[: batch.num_tokens]
    if "inverse" not in case:
        found = ragged(*arguments, partial_keys=is_partial)[: batch.num_tokens]
        return float((found - expected).abs().max())
    # Some results are too large for FP8, and become its largest.
    inverse = 448.0 / torch.linspace(0.5, 2.0, case["inverse"])[None]
    codes = ragged(*arguments, partial_keys=is_partial, inverse=inverse)[: batch.num_tokens]
    return away(codes.flatten(1), to_fp8(expected.flatten(1), inverse))


def main() -> None:
    round_as_hardware_does()
    json.dump({name: difference(CASES[name]) for name in sys.argv[1:] or CASES}, sys.stdout)


if __name__ == "__main__":
    main()
