"""Linear layers and tables with low-rank terms, of which each token reads its own adapter's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bei.errors import CompileError
from bei_build.spec.adapters import AdaptersSpec, is_table, owners
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import Linear, Table, TensorOptions


class StepInUse:
    """The step that the model's modules compute now: layers get values only."""

    def __init__(self) -> None:
        self.step: PackedStep | None = None


class _Factors(nn.Module):
    """What adapted layers share. ``ranks``: of each adapter's factors."""

    reads = ("token_adapters",)

    def _add_factors(
        self, a: tuple[int, int], b: tuple[int, int], ranks: tuple[int, ...], used: StepInUse, options: TensorOptions
    ) -> None:
        self.lora_a, self.lora_b = options.empty(*a), options.empty(*b)
        self._ranks = ranks
        self._used = used
        self.owners: Tensor
        self.register_buffer("owners", torch.from_numpy(owners(ranks)).to(options.device), persistent=False)

    def _term(self, small: Tensor) -> Tensor:
        """The term [T, out] of ``small`` [T, R], the values between both factors."""
        step = self._used.step
        assert step is not None, "the model has set it"
        own = step.once(("adapters", self._ranks), lambda: step["token_adapters"].unsqueeze(1) == self.owners)
        # Not times 0: another adapter's values may have overflowed.
        return nn.functional.linear(torch.where(own, small, torch.zeros_like(small)), self.lora_b)


class AdaptedLinear(Linear, _Factors):
    """A linear layer, and its terms."""

    def __init__(self, layer: Linear, ranks: tuple[int, ...], used: StepInUse, options: TensorOptions) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, options)
        rank = sum(ranks)
        self._add_factors((rank, layer.in_features), (layer.out_features, rank), ranks, used, options)

    def forward(self, value: Tensor) -> Tensor:
        """[T, out] for ``value`` [T, in]."""
        return super().forward(value) + self._term(nn.functional.linear(value, self.lora_a))


class AdaptedTable(Table, _Factors):
    """A table, and its terms."""

    def __init__(self, table: Table, ranks: tuple[int, ...], used: StepInUse, options: TensorOptions) -> None:
        (num_rows, width), rank = table.weight.shape, sum(ranks)
        super().__init__(num_rows, width, options)
        self._add_factors((num_rows, rank), (width, rank), ranks, used, options)

    def forward(self, index: Tensor) -> Tensor:
        """Rows [T, width] for ``index`` [T]."""
        return super().forward(index) + self._term(nn.functional.embedding(index, self.lora_a))


def add_adapters(model: nn.Module, spec: AdaptersSpec, options: TensorOptions) -> StepInUse:
    """Put adapted layers in place of those of ``model``, which has no values yet, that ``spec`` names. Raises
    CompileError for layers in FP8."""
    used = StepInUse()
    for layer, ranks in spec.ranks:
        path, _, name = layer.replace("embeddings.type", "embeddings.types").rpartition(".")
        parent = model.get_submodule(path)
        found = getattr(parent, name)
        if type(found) is Table and is_table(layer):
            setattr(parent, name, AdaptedTable(found, ranks, used, options))
        elif type(found) is Linear and not is_table(layer):
            setattr(parent, name, AdaptedLinear(found, ranks, used, options))
        else:
            raise CompileError(
                f"{layer} is no layer in which PyTorch's module computes adapters: build with --precision bf16, or "
                "merge one with --adapter."
            )
    return used
