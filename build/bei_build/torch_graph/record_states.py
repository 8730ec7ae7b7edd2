"""What instances of structures are formed from (``RecordStatesSpec``), as a layer of a head: matrix by matrix, as in
the model's own code. For references; packages for GPUs do not have it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from bei_build.spec.head_layers import RecordStatesSpec
from bei_build.torch_graph.boundary_scores import BoundaryScores
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import Linear, TensorOptions


class RecordStates(nn.Module):
    """What reads candidates and labels; the names of the modules are those of the spec. ``boundaries`` gives the states
    of boundaries, and is a module of the model."""

    def __init__(self, spec: RecordStatesSpec, boundaries: BoundaryScores, options: TensorOptions) -> None:
        super().__init__()
        self.reads = ("boundary_words",)
        self._of_boundaries = [boundaries]  # not a module of this one
        hidden, width = spec.width, spec.record_width
        linear = partial(Linear, bias=True, options=options)
        self.encoder = linear(2 * spec.boundaries.boundary_width, hidden)
        for name in ("instance", "field", "candidate", "query", "key"):
            self.add_module(name, linear(hidden, width))
        self.value = linear(hidden, hidden)
        self.object, self.seed = linear(hidden, 1), linear(hidden, 1)
        self.nothing, self.queries = options.empty(width), options.empty(spec.num_queries, hidden)

    def forward(self, value: Tensor, step: PackedStep) -> Tensor:
        """Rows [T, columns] of the token states ``value`` [T, width]."""
        states = self._of_boundaries[0].states(value, step).flatten(0, 1)
        starts, ends = self.encoder.weight.chunk(2, dim=1)
        sides = [
            self._of_candidates(functional.linear(states, starts, self.encoder.bias), has_bias=True),
            self._of_candidates(functional.linear(states, ends), has_bias=False),
        ]
        rows = torch.cat(sides, dim=1)[step["boundary_words"].long()]
        return torch.cat([rows, self._of_labels(value)], dim=1)

    def _of_candidates(self, value: Tensor, *, has_bias: bool) -> Tensor:
        """What is read of the part ``value`` [n, width] of candidates' states; one of the two parts has the biases."""

        def through(name: str, states: Tensor) -> Tensor:
            module = self.get_submodule(name)
            assert isinstance(module, Linear)
            return functional.linear(states, module.weight, module.bias if has_bias else None)

        instance, candidate = through("instance", value), through("candidate", value)
        values = through("value", value)
        as_instance = functional.linear(values, self.get_parameter("instance.weight"))
        attention = through("key", value) @ self.get_submodule("query")(self.queries).T * len(self.nothing) ** -0.5
        learned = candidate @ self.get_submodule("instance")(self.queries).T
        columns = [
            through("seed", value),
            functional.linear(values, self.object.weight),
            (instance @ self.nothing).unsqueeze(1),
            (as_instance @ self.nothing).unsqueeze(1),
        ]
        return torch.cat([instance, candidate, as_instance, attention, learned, *columns], dim=1)

    def _of_labels(self, value: Tensor) -> Tensor:
        fields = self.get_submodule("field")(value)
        nothing = (fields @ self.nothing).unsqueeze(1)
        learned = nothing + self.get_submodule("instance")(self.queries) @ self.nothing
        scores = self.object(self.queries).T.expand(len(value), -1)
        return torch.cat([fields, learned, nothing, scores], dim=1)
