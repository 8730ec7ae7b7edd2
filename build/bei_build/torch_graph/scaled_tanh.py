"""A tanh with factors and offsets for every component (``ScaledTanhSpec``)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bei_build.spec.head_layers import ScaledTanhSpec
from bei_build.torch_graph.parameters import TensorOptions


class ScaledTanh(nn.Module):
    """The layer ``spec`` of a head."""

    def __init__(self, spec: ScaledTanhSpec, options: TensorOptions) -> None:
        super().__init__()
        self.alpha, self.beta, self.bias = (options.empty(spec.width) for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        """``value`` [..., width] to the same shape."""
        return self.beta * torch.tanh(self.alpha * value + self.bias)
