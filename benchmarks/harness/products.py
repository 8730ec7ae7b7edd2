"""What this CPU attains in products of matrices alone, in oneDNN by PyTorch: the ceiling of an engine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bei.utils.cpu_count import usable_cores
from benchmarks.harness.rounds import seconds

_SIZES = {"large": (4096, 4096, 4096), "of a step": (1024, 384, 1536)}  # rows, inner dimension, columns
_OPERATIONS = 4e11  # of one measurement


def products(precision: str) -> dict[str, Callable[[], float]]:
    """GFLOP/s of a large product, and of one whose matrices stay in the caches: neither is always the faster."""
    return {f"product {precision}, {name}": _product(precision, *size) for name, size in _SIZES.items()}


def operations_per_token(config: Mapping[str, Any], lengths: Sequence[int]) -> float:
    """Of the layers of BERT or of Qwen2: linear layers, and attention of sequences of these lengths. Norms and the like
    do not count."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    decoder = config["model_type"] == "qwen2"  # causal, with a gate beside the first product of its feed-forward part
    keys = hidden * config["num_key_value_heads"] // config["num_attention_heads"] if decoder else hidden
    linear = 2 * hidden * (2 * hidden + 2 * keys + (3 if decoder else 2) * intermediate)
    pairs = sum(length * (length + 1) / 2 if decoder else length**2 for length in lengths)  # of a query and a key
    return float(config["num_hidden_layers"] * (linear + 4 * hidden * pairs / sum(lengths)))


def share_of_products(results: Mapping[str, Mapping[str, Any]], side: str, precision: str, per_token: float) -> float:
    """The operations a second of ``side`` (tokens a second) over those of the faster product, within repetitions."""
    ceilings = zip(*(results[f"product {precision}, {name}"]["values"] for name in _SIZES), strict=True)
    rates = (tokens * per_token / 1e9 for tokens in results[side]["values"])
    share = statistics.median(rate / max(both) for rate, both in zip(rates, ceilings, strict=True))
    return round(float(share), 3)


def _product(precision: str, rows: int, inner: int, columns: int) -> Callable[[], float]:
    import torch

    torch.set_num_threads(usable_cores())
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    inputs, weight = (torch.randn(size, inner).to(dtype) for size in (rows, columns))
    multiply = partial(torch.nn.functional.linear, inputs, weight)
    operations = 2 * rows * inner * columns
    count = max(1, round(_OPERATIONS / operations))
    return lambda: count * operations / seconds(lambda: [multiply() for _ in range(count)]) / 1e9
