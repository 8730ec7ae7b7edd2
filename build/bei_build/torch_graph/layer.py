"""One layer: attention or a short convolution, and MLP, each ``h + f(h)``, with norms where the spec has them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from bei.errors import CompileError
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import AttentionSpec, LayerPart, LayerSpec
from bei_build.torch_graph.attention import Attention, PositionModules
from bei_build.torch_graph.attention_kernels import KernelChoice
from bei_build.torch_graph.convolution import ShortConvolution
from bei_build.torch_graph.entry import Entry
from bei_build.torch_graph.experts import Experts
from bei_build.torch_graph.fp8 import LinearInput, Rounding
from bei_build.torch_graph.layer_inputs import LayerInput, Scale
from bei_build.torch_graph.mlp import MLP
from bei_build.torch_graph.norms import Norm, States
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import TensorOptions


class Layer(nn.Module):
    """The layer ``spec`` of ``model``. Raises CompileError where a decoder's layer has norms after its parts."""

    def __init__(
        self,
        spec: LayerSpec,
        model: ModelSpec,
        choices: Mapping[AttentionSpec, KernelChoice],
        positions: PositionModules,
        options: TensorOptions,
    ) -> None:
        super().__init__()
        if spec.cross_attention and spec.norms_output:
            raise CompileError(f"{model.architecture}: cross-attention with norms behind it is not supported.")
        self.spec = spec
        self._parts = spec.parts
        width = model.hidden_size
        self.entry = Entry(spec.entry, width, options) if spec.entry else None
        if spec.convolution:
            self.convolution = ShortConvolution(spec.convolution, width, options, partial_keys=model.partial_keys)
        for name, attention in (("attention", spec.attention), ("cross_attention", spec.cross_attention)):
            if attention is not None:
                kernel, is_cross = choices[attention].kernel, name == "cross_attention"
                module = Attention(
                    attention, width, kernel, positions, options, partial_keys=model.partial_keys, cross=is_cross
                )
                self.add_module(name, module)
        if spec.mlp.experts:
            self.mlp: nn.Module = Experts(spec.mlp, width, options)
        else:
            self.mlp = MLP(spec.mlp, width, options)
        if spec.layer_input:
            self.layer_input = LayerInput(spec.layer_input, width, options)
        if spec.scaled:
            self.scale = Scale(options)
        for name in self._norm_names():
            self.add_module(name, Norm(spec.norm, width, options))

    def _norm_names(self) -> list[str]:
        spec = self.spec
        names = [f"{part}_post_norm" for part in self._parts] if spec.norms_output else []
        names += [f"{part}_norm" for part in spec.normed_parts]
        return [*names, "second_attention_norm"] if spec.second_attention_norm else names

    @property
    def rounding(self) -> Rounding | None:
        """Rounding of the states by the layer's first part; None where it does not round, or a norm comes first."""
        first: Attention | ShortConvolution = getattr(self, self._parts[0])
        return None if self.spec.norms_input else first.rounding

    def forward(
        self, states: States, step: PackedStep, other: Tensor | None = None, following: Rounding | None = None
    ) -> States:
        """The states after the layer, from ``states`` [T, hidden]. ``other``: what it also reads, a decoder's layer the
        encoder's states, one with a ``layer_input`` its own vectors of tokens.

        ``following``: rounding of the states by the next layer.
        """
        spec = self.spec
        if self.entry:
            states = self.entry(states, step)
        entering = states
        shared: LinearInput | None = None
        for index, part in enumerate(self._parts):
            states, shared = self._read(part, states, shared, step)
            value = self._run(part, shared, step, other)
            if spec.norms_output:
                value = getattr(self, f"{part}_post_norm")(value)
            states = states.plus(value, spec.residual_scale)
            if spec.placement == "post":
                is_last, is_followed = index == len(self._parts) - 1, index == 0 and spec.second_attention_norm
                behind = following if is_last else getattr(self, self._parts[index + 1]).rounding
                states = self._normed(f"{part}_norm", states, step, None if is_followed else behind)
                if is_followed:
                    states = self._normed("second_attention_norm", states.plus(entering.total), step, behind)
        return States(self.scale(states.total)) if spec.scaled else states

    def _read(
        self, part: LayerPart, states: States, shared: LinearInput | None, step: PackedStep
    ) -> tuple[States, LinearInput]:
        """The states with their sum computed, and the input of ``part``."""
        spec, norm = self.spec, f"{part}_norm"
        if part == "mlp" and spec.parallel:
            assert shared is not None
            return states, shared
        if not spec.norms_input or part not in spec.normed_parts:
            total = states.total
            return States(total), total if states.rounded is None else states.rounded
        rounding = None if spec.parallel else getattr(self, part).rounding
        found = getattr(self, norm).of_sum(
            states, step, rounding, total=states.added is not None, value=rounding is None
        )
        return States(states.hidden if found.total is None else found.total), found.linear_input

    def _normed(self, name: str, states: States, step: PackedStep, rounding: Rounding | None) -> States:
        found = getattr(self, name).of_sum(states, step, rounding)
        return States(found.value, rounded=found.rounded)

    def _run(self, part: str, value: LinearInput, step: PackedStep, other: Tensor | None) -> Tensor:
        module = getattr(self, part)
        if part in ("mlp", "convolution"):
            return module(value, step)  # type: ignore[no-any-return]
        return module(value, step, None if part == "attention" else other)  # type: ignore[no-any-return]
