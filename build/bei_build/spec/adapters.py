"""Low-rank adapters (LoRA, arXiv:2106.09685) of a model's matrices and tables, as data.

A matrix W [out, in] has the factors of all adapters stacked: ``lora_a`` [R, in] and ``lora_b`` [out, R], R the sum of
their ranks; ``lora_b`` holds each adapter's scale. The product of x is W x + lora_b (m * (lora_a x)), m being 1 for the
rows of the sequence's own adapter. A table [rows, width] has ``lora_a`` [rows, R] and ``lora_b`` [width, R].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from bei_build.spec.weight_shapes import Shape

A, B = "lora_a", "lora_b"


@dataclass(frozen=True)
class AdaptersSpec:
    """``names``: in the order of their ids, from 1 on. ``ranks``: by the name of the layer that has the weight
    (``layers.3.attention.query``), the rank of each adapter's factors, 0 where it leaves the weight alone."""

    names: tuple[str, ...]
    ranks: tuple[tuple[str, tuple[int, ...]], ...]

    @cached_property
    def by_layer(self) -> Mapping[str, tuple[int, ...]]:
        """``ranks`` by layer."""
        return dict(self.ranks)


def owners(ranks: tuple[int, ...]) -> npt.NDArray[np.int32]:
    """The id of the adapter that each of the stacked rows belongs to, int32 [R]."""
    return np.repeat(np.arange(1, len(ranks) + 1, dtype=np.int32), ranks)


def is_table(layer: str) -> bool:
    """True if the weight of ``layer`` is a table of rows to look up, no matrix to multiply with."""
    return layer.startswith("embeddings.") and not layer.endswith(".projection")


def factor_weights(adapters: AdaptersSpec, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of all factors, of weights with ``shapes``."""
    for layer, ranks in adapters.ranks:
        rows, columns = shapes[f"{layer}.weight"]
        rank = sum(ranks)
        yield f"{layer}.{A}", ((rows, rank) if is_table(layer) else (rank, columns))
        yield f"{layer}.{B}", ((columns if is_table(layer) else rows), rank)
