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


def operations_per_token(config: Mapping[str, int], lengths: Sequence[int]) -> float:
    """Of BERT's layers: linear layers, and attention of sequences of these lengths. Norms and the like do not count."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    linear = 2 * (4 * hidden**2 + 2 * hidden * intermediate)
    attention = 4 * hidden * sum(length**2 for length in lengths) / sum(lengths)
    return config["num_hidden_layers"] * (linear + attention)


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
