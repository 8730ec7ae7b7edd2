"""What becomes of the states before a layer reads them: a norm, and rows by token types."""

from __future__ import annotations

from torch import nn

from bei_build.spec.parts import EntrySpec
from bei_build.torch_graph.norms import Norm, States
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import Table, TensorOptions


class Entry(nn.Module):
    """``norm(h)`` and the row of the token's type."""

    reads = ("token_type_ids",)

    def __init__(self, spec: EntrySpec, width: int, options: TensorOptions) -> None:
        super().__init__()
        self.norm = Norm(spec.norm, width, options)
        self.types = Table(spec.num_types, width, options)

    def forward(self, states: States, step: PackedStep) -> States:
        """The states that the layer reads, [T, hidden]."""
        normed = self.norm.of_sum(states, step).value
        assert normed is not None
        return States(normed, self.types(step["token_type_ids"]))
