"""Activation functions, and an MLP's product of activation and gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from bei_build.spec.parts import Activation
from bei_build.torch_graph.fp8 import Rounding
from bei_build.torch_graph.fusion_choice import Fusions

_FUNCTIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda value: functional.gelu(value, approximate="tanh"),
    "gelu_10": lambda value: functional.gelu(value).clamp(-10.0, 10.0),
    "quick_gelu": lambda value: value * torch.sigmoid(1.702 * value),
    "relu": torch.relu,
    "relu2": lambda value: torch.relu(value).square(),
    "relu6": functional.relu6,
    "leaky_relu": functional.leaky_relu,
    "elu": functional.elu,
    "silu": functional.silu,
    "hardswish": functional.hardswish,
    "mish": functional.mish,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "log1p_relu": lambda value: torch.log1p(torch.relu(value)),
    "identity": lambda value: value,
}
# SPLADE's only: no fused kernel and no MLP has it.
_NOT_FUSED: frozenset[Activation] = frozenset({"log1p_relu"})


def activated(value: Tensor, activation: Activation) -> Tensor:
    """``activation(value)``."""
    return _FUNCTIONS[activation](value)


def gated(
    value: Tensor, gate: Tensor | None, activation: Activation, rounding: Rounding | None, fusions: Fusions
) -> Tensor:
    """``activation(value) * gate``, [T, width], in the type of ``value`` or as ``rounding`` rounds it. Computed in
    FP32."""
    if fusions.has("activation") and activation not in _NOT_FUSED:
        from bei_build.torch_graph.fused.activate import activate  # Triton is not always installed

        made: Tensor = activate(value, gate, None if rounding is None else rounding.inverse, activation)
        return made
    wide = activated(value.float(), activation)
    if gate is not None:
        wide = wide * gate.float()
    return wide.to(value.dtype) if rounding is None else rounding(wide)
