"""The MLP of a layer, plain or gated."""

from __future__ import annotations

from torch import Tensor, nn

from bei_build.spec.parts import MLPSpec
from bei_build.torch_graph.activation import gated
from bei_build.torch_graph.fp8 import LinearInput, Rounding, common_rounding, round_once, rounding_of, with_ones
from bei_build.torch_graph.norms import Norm
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import Linear, TensorOptions, project


class MLP(nn.Module):
    """``down(act(up(x)))``, or ``down(act(gate(x)) * up(x))``."""

    def __init__(self, spec: MLPSpec, hidden_size: int, options: TensorOptions) -> None:
        super().__init__()
        self._spec = spec
        self._fusions = options.fusions
        self._names = ("gate", "up") if spec.gated else ("up",)
        self.up = Linear(hidden_size, spec.intermediate_size, spec.bias, options)
        if spec.gated:
            self.gate = Linear(hidden_size, spec.intermediate_size, spec.bias, options)
        self.down = Linear(spec.intermediate_size, hidden_size, spec.down_bias, options)
        self.norm = Norm(spec.inner_norm, spec.intermediate_size, options) if spec.inner_norm else None
        self.joinable = (self._names,) if spec.gated else ()

    @property
    def rounding(self) -> Rounding | None:
        """Rounding of the input, if all layers that read it use the same FP8 rounding."""
        return common_rounding(self, self._names)

    def forward(self, value: LinearInput, step: PackedStep) -> Tensor:
        """Result [T, hidden] for ``value`` [T, hidden]."""
        first, *others = project(self, round_once(value, self.rounding, step), self._names)
        rounding = rounding_of(self.down)
        assert self.norm is None or rounding is None, "such models are not quantized"
        inner = gated(first, others[0] if others else None, self._spec.activation, rounding, self._fusions)
        if self.norm:
            inner = self.norm(inner)
        return self.down(inner if rounding is None else with_ones(inner, step))  # type: ignore[no-any-return]
