"""Inputs that several linear layers read."""

from __future__ import annotations

from collections.abc import Mapping


def shared_by_gate_and_up(amax: Mapping[str, float]) -> dict[str, float]:
    """``amax`` of the inputs of linear layers, by name, with one for an MLP's gate and up: they read the same."""
    shared = dict(amax)
    for name in amax:
        mlp, _, role = name.rpartition(".")
        up = f"{mlp}.up"
        if role == "gate" and up in amax:
            shared[name] = shared[up] = max(amax[name], amax[up])
    return shared
