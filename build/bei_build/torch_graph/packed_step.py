"""One packed step: the host's tensors, and values derived from them once for all layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class PackedStep:
    """The tensors of ``bei.engine.packing.graph_inputs`` by name."""

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        self._inputs = inputs
        self._made: dict[object, object] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._inputs[name]

    def once(self, key: object, make: Callable[[], T]) -> T:
        """The result of ``make``, called once per ``key``."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[return-value]

    @property
    def token_index(self) -> Tensor:
        """0, 1, 2, ..., one per token, INT64 [T]."""
        ids = self["input_ids"]
        return self.once("token index", lambda: torch.arange(ids.shape[0], device=ids.device))

    def of_sequences(self, rows: Tensor, reduce: str) -> Tensor:
        """The "sum", "max" or "min" of each sequence's ``rows`` [T, ...], as [B, ...]. Reads ``cu_query_lens``.

        The order is always the same, so that equal texts have equal vectors; tokens after the last sequence belong to
        none.
        """
        lengths = self.once("lengths", lambda: self["cu_query_lens"].diff().long())
        return torch.segment_reduce(rows, reduce, lengths=lengths, axis=0, unsafe=True)

    def index_of_sequences(self, values: Tensor, reduce: str) -> Tensor:
        """``of_sequences`` for integers below 2^53, [T] to INT64 [B]: ``segment_reduce`` takes floating point only."""
        return self.of_sequences(values.double(), reduce).long()
