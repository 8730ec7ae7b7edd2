"""Choice of the steps between matrix products that are one Triton kernel each, with the reasons against the others.

``norm``: residual sum, norm, rounding to FP8. ``activation``: activation, gate, rounding. ``rotation``: norms of heads
and rotation of queries and keys. ``pooling``: pooling and unit length. Each has a twin in PyTorch's own operators.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import torch

Part: TypeAlias = Literal["norm", "activation", "rotation", "pooling"]
PARTS: tuple[Part, ...] = get_args(Part)

# Inductor fuses every step without a sum over a row into one kernel itself (docs/decisions.md).
_ELEMENT_BY_ELEMENT: frozenset[Part] = frozenset({"activation"})


@dataclass(frozen=True)
class Fusions:
    """``by_triton``: the parts that Triton computes. ``reasons``: the reasons against the others."""

    by_triton: frozenset[Part] = frozenset()
    reasons: Mapping[Part, str] = field(default_factory=dict, compare=False)

    def has(self, part: Part) -> bool:
        """True if Triton computes ``part`` here: while a graph is recorded, parts that Inductor fuses as well are left
        to it."""
        return part in self.by_triton and not (part in _ELEMENT_BY_ELEMENT and torch.compiler.is_compiling())


ALL = Fusions(frozenset(PARTS))
NONE = Fusions()


def choose_fusions(device: torch.device) -> Fusions:
    """Triton's kernels wherever they run."""
    if device.type != "cuda":
        return _none_because(f"Triton's kernels need CUDA, and the device is {device.type}")
    if importlib.util.find_spec("triton") is None:
        return _none_because("Triton is not installed")
    return ALL


def _none_because(reason: str) -> Fusions:
    return Fusions(reasons=dict.fromkeys(PARTS, reason))
