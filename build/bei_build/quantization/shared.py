"""Shared inputs of linear layers."""

from __future__ import annotations

from collections.abc import Mapping


def shared_by_gate_and_up(amax: Mapping[str, float]) -> dict[str, float]:
    """``amax`` of the inputs of linear layers, by name, with one value for an MLP's gate and up, which read the same
    input."""
    shared = dict(amax)
    for name in amax:
        mlp, _, role = name.rpartition(".")
        up = f"{mlp}.up"
        if role == "gate" and up in amax:
            shared[name] = shared[up] = max(amax[name], amax[up])
    return shared
