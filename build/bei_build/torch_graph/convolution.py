"""Convolutions over the tokens of a sequence: the one after the first layer, and gated short ones in layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from bei_build.spec.parts import ConvolutionSpec
from bei_build.spec.short_convolution import ShortConvolutionSpec
from bei_build.torch_graph.activation import activated
from bei_build.torch_graph.fp8 import LinearInput, Rounding, round_once, rounding_of
from bei_build.torch_graph.norms import Norm
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import Linear, TensorOptions


class Convolution(nn.Module):
    """``norm(h + act(c))``, with c a convolution over each token's neighbours in its sequence."""

    reads = ("position_ids", "token_seq_lens")

    def __init__(self, spec: ConvolutionSpec, hidden_size: int, options: TensorOptions) -> None:
        super().__init__()
        self._spec = spec
        self.weight = options.empty(hidden_size, hidden_size, spec.kernel_size)
        self.bias = options.empty(hidden_size)
        self.norm = Norm(spec.norm, hidden_size, options)

    def forward(self, hidden: Tensor, embedded: Tensor, step: PackedStep) -> Tensor:
        """States after the convolution, from ``hidden`` [T, hidden], the states after the first layer, and
        ``embedded``, those before it."""
        reach = self._spec.kernel_size // 2
        beside = torch.cat([_neighbours(embedded, offset, step) for offset in range(-reach, reach + 1)], dim=1)
        product = functional.linear(beside, self.weight.transpose(1, 2).flatten(1), self.bias)
        return self.norm(hidden + activated(product, self._spec.activation))  # type: ignore[no-any-return]


class ShortConvolution(nn.Module):
    """``output(c * conv(b * x))`` with b, c and x of one linear layer. ``partial_keys`` as in ``ModelSpec``."""

    def __init__(
        self, spec: ShortConvolutionSpec, hidden_size: int, options: TensorOptions, *, partial_keys: bool
    ) -> None:
        super().__init__()
        self._spec = spec
        self._drops = spec.drops_unattended and partial_keys
        self.reads = ("position_ids", "token_seq_lens", *(("token_key_lens",) if self._drops else ()))
        self.input = Linear(hidden_size, 3 * hidden_size, spec.bias, options)
        self.kernel = _Kernel(hidden_size, spec, options)
        self.output = Linear(hidden_size, hidden_size, spec.bias, options)

    @property
    def rounding(self) -> Rounding | None:
        """Rounding of the input. None where some tokens' inputs are replaced first."""
        return None if self._drops else rounding_of(self.input)

    def forward(self, value: LinearInput, step: PackedStep) -> Tensor:
        """Result [T, hidden] for ``value`` [T, hidden]."""
        if self._drops:
            assert isinstance(value, Tensor)
            value = value * (step["position_ids"] < step["token_key_lens"]).unsqueeze(1)
        gate, factor, inner = self.input(round_once(value, rounding_of(self.input), step)).chunk(3, dim=1)
        result = factor * self.kernel(gate * inner, step)
        return self.output(round_once(result, rounding_of(self.output), step))  # type: ignore[no-any-return]


class _Kernel(nn.Module):
    """A convolution of each channel, ``weight`` [hidden, 1, kernel_size]."""

    def __init__(self, hidden_size: int, spec: ShortConvolutionSpec, options: TensorOptions) -> None:
        super().__init__()
        self._offsets = spec.offsets
        self.weight = options.empty(hidden_size, 1, spec.kernel_size)
        self.bias = options.empty(hidden_size) if spec.bias else None

    def forward(self, rows: Tensor, step: PackedStep) -> Tensor:
        """Result [T, hidden] for ``rows`` [T, hidden], added in the order of the kernel."""
        factors = self.weight.squeeze(1).unbind(1)
        first, *others = zip(self._offsets, factors, strict=True)
        total = _neighbours(rows, first[0], step) * first[1]
        for offset, factor in others:
            total = total + _neighbours(rows, offset, step) * factor
        return total if self.bias is None else total + self.bias


def _neighbours(rows: Tensor, offset: int, step: PackedStep) -> Tensor:
    """For each token the row of the token ``offset`` later, zeros where its sequence has none."""
    if offset == 0:
        return rows
    index, is_there = step.once(("neighbours", offset), lambda: _places(offset, step))
    return rows.index_select(0, index) * is_there


def _places(offset: int, step: PackedStep) -> tuple[Tensor, Tensor]:
    """For each token the place of the token ``offset`` later, [T], and if its sequence has one, [T, 1]."""
    position = step["position_ids"] + offset
    is_there = (position >= 0) & (position < step["token_seq_lens"])
    return (step.token_index + offset).clamp(0, position.shape[0] - 1), is_there.unsqueeze(1)
