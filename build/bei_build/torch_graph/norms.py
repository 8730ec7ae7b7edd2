"""LayerNorm and RMSNorm of a tensor, or of a residual sum that is not computed yet, over the last axis."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from bei_build.spec.parts import NormSpec
from bei_build.torch_graph.fp8 import LinearInput, Rounded, Rounding, with_ones
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import TensorOptions

_WIDEST = 16_384  # columns: the Triton kernel holds a row in registers


class States(NamedTuple):
    """Token states between two parts of a model: the sum ``hidden + added * factor``, [T, hidden]. The next norm
    computes the sum, in its own kernel if it is fused.

    ``rounded``: the sum rounded to FP8, as the input of linear layers; None if it was not rounded before.
    """

    hidden: Tensor
    added: Tensor | None = None
    factor: float = 1.0
    rounded: Rounded | None = None

    @property
    def total(self) -> Tensor:
        """The sum, computed."""
        if self.added is None:
            return self.hidden
        return self.hidden + (self.added if self.factor == 1.0 else self.added * self.factor)

    def plus(self, value: Tensor, factor: float = 1.0) -> States:
        """The states with ``value * factor`` added."""
        return States(self.total, value, factor)


class NormResult(NamedTuple):
    """The sum that a norm has read, the norm's value, and that value rounded to FP8; None: not requested."""

    total: Tensor | None
    value: Tensor | None
    rounded: Rounded | None

    @property
    def linear_input(self) -> LinearInput:
        """The input of the next linear layers: ``rounded`` if there is one, else ``value``."""
        found = self.value if self.rounded is None else self.rounded
        assert found is not None
        return found


class Norm(nn.Module):
    """The norm ``spec`` over ``width``. PyTorch's kernels compute its statistics in FP32.

    If the spec has an offset, everything is computed in FP32: 1 + w in BF16 would keep two or three digits of w.
    """

    def __init__(self, spec: NormSpec, width: int, options: TensorOptions) -> None:
        super().__init__()
        self.spec = spec
        self._width = width
        self._is_fused = options.fusions.has("norm") and width <= _WIDEST
        has_bias = spec.weight and spec.kind == "layer" and spec.bias
        self.weight = options.empty(width) if spec.weight else None
        self.bias = options.empty(width) if has_bias else None

    def forward(self, value: Tensor) -> Tensor:
        """``value`` [..., width], normalized."""
        if not self.spec.offset or self.weight is None:
            return self._normalized(value, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.float()
        wide = self._normalized(value.float(), self.weight.float() + self.spec.offset, bias)
        return wide.to(value.dtype)

    def of_sum(
        self,
        states: States,
        step: PackedStep,
        rounding: Rounding | None = None,
        *,
        total: bool = False,
        value: bool = True,
    ) -> NormResult:
        """The norm of the sum ``states``: the sum itself if ``total``, the norm if ``value``, and the norm rounded if
        there is a ``rounding``. Everything is computed in FP32 and rounded once."""
        compute = self._by_triton if self._is_fused else self._composed
        sum_, normalized, codes = compute(states, rounding, total, value)
        return NormResult(
            sum_ if total else None,
            normalized if value else None,
            None if codes is None else with_ones(codes, step),
        )

    def _by_triton(
        self, states: States, rounding: Rounding | None, total: bool, value: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        from bei_build.torch_graph.fused.add_norm import add_norm  # Triton is not always installed

        spec = self.spec
        parameters = self.weight, self.bias, None if rounding is None else rounding.inverse
        numbers = spec.eps, spec.offset, states.factor, spec.kind == "rms"
        sum_, normalized, codes = add_norm(states.hidden, states.added, *parameters, *numbers, total, value)
        return sum_, normalized, None if rounding is None else codes

    def _composed(
        self, states: States, rounding: Rounding | None, total: bool, value: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same as ``fused.add_norm`` without Triton; computes sum and norm even if they are not requested."""
        dtype = states.hidden.dtype
        added = None if states.added is None else states.added.float()
        wide = States(states.hidden.float(), added, states.factor).total
        weight, bias = (None if part is None else part.float() for part in (self.weight, self.bias))
        result = self._normalized(wide, None if weight is None else weight + self.spec.offset, bias)
        return wide.to(dtype), result.to(dtype), None if rounding is None else rounding(result)

    def _normalized(self, value: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if self.spec.kind == "rms":
            return functional.rms_norm(value, (self._width,), weight, self.spec.eps)
        return functional.layer_norm(value, (self._width,), weight, bias, self.spec.eps)
