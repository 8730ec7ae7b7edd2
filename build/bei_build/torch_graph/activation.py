"""Activation functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from bei_build.spec import Activation

_FUNCTIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda value: functional.gelu(value, approximate="tanh"),
    "quick_gelu": lambda value: value * torch.sigmoid(1.702 * value),
    "relu": torch.relu,
    "relu2": lambda value: torch.relu(value).square(),
    "silu": functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "log1p_relu": lambda value: torch.log1p(torch.relu(value)),
    "identity": lambda value: value,
}


def activated(value: Tensor, activation: Activation) -> Tensor:
    """``activation`` of ``value``."""
    return _FUNCTIONS[activation](value)
