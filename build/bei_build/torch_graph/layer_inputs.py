"""Vectors of tokens for single layers, and what a layer adds of its own."""

from __future__ import annotations

from torch import Tensor, nn

from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import LayerInputSpec, LayerInputsSpec
from bei_build.torch_graph.activation import activated
from bei_build.torch_graph.fp8 import LinearInput, Rounding, round_once, rounding_of
from bei_build.torch_graph.norms import Norm
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import Linear, TensorOptions


class LayerInputs(nn.Module):
    """One linear layer on embeddings, cut into the parts of the layers, each normalized."""

    def __init__(self, spec: LayerInputsSpec, model: ModelSpec, options: TensorOptions) -> None:
        super().__init__()
        self._shape = len(model.layers), spec.width
        self.projection = Linear(model.hidden_size, len(model.layers) * spec.width, False, options)
        self.norm = Norm(spec.norm, spec.width, options)

    def forward(self, embedded: Tensor) -> tuple[Tensor, ...]:
        """For each layer [T, width], from ``embedded`` [T, hidden]."""
        return self.norm(self.projection(embedded).unflatten(-1, self._shape)).unbind(1)  # type: ignore[no-any-return]


class LayerInput(nn.Module):
    """``output(act(gate(h)) * e)``, e being the layer's own vectors of tokens."""

    def __init__(self, spec: LayerInputSpec, hidden_size: int, options: TensorOptions) -> None:
        super().__init__()
        self._spec = spec
        self.gate = Linear(hidden_size, spec.width, False, options)
        self.output = Linear(spec.width, hidden_size, False, options)

    @property
    def rounding(self) -> Rounding | None:
        """Rounding of the states that it reads."""
        return rounding_of(self.gate)

    def forward(self, value: LinearInput, step: PackedStep, own: Tensor) -> Tensor:
        """Result [T, hidden] for ``value`` [T, hidden] and ``own`` [T, width]."""
        gate = activated(self.gate(round_once(value, self.rounding, step)), self._spec.activation)
        return self.output(round_once(gate * own, rounding_of(self.output), step))  # type: ignore[no-any-return]


class Scale(nn.Module):
    """A stored number."""

    def __init__(self, options: TensorOptions) -> None:
        super().__init__()
        self.weight = options.empty(1)

    def forward(self, value: Tensor) -> Tensor:
        """``value`` times the number."""
        return value * self.weight
