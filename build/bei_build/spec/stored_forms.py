"""How a family's tensors are stored, where that differs from what its specs read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StoredForms:
    """``ranks``: tensors, by the ends of their names, that have so many axes behind leading ones of length 1.

    ``factors``: tensors [width] that multiply the outputs of a linear layer; their names and the possible names of
    the layer are relative to a common module. ``joined``: linear layers that are read as one, rows one after the other,
    by the one's name. ``summed``: tensors, by the ends of their names, that are read as their sum over an axis.
    ``shifted``: what the model's own code adds to the outputs of a layer whose bias has this name.
    """

    ranks: Mapping[str, int] = field(default_factory=dict)
    factors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    summed: Mapping[str, int] = field(default_factory=dict)
    shifted: Mapping[str, float] = field(default_factory=dict)
