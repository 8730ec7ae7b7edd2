"""Parameters that are filled later, and joined products of several linear layers: of one input, or of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bei_build.torch_graph.fusion_choice import NONE, Fusions


@dataclass(frozen=True)
class TensorOptions:
    """Device of the parameters, type in which the model computes, and the parts that Triton computes."""

    device: torch.device
    dtype: torch.dtype
    fusions: Fusions = NONE

    @property
    def fp32(self) -> TensorOptions:
        """The same device with FP32, for parts that compute in FP32 whatever the model's type."""
        return replace(self, dtype=torch.float32)

    def empty(self, *shape: int) -> nn.Parameter:
        """A parameter without values."""
        return nn.Parameter(torch.empty(shape, device=self.device, dtype=self.dtype), requires_grad=False)


class Linear(nn.Linear):
    """``value @ weight.T + bias`` without values."""

    def __init__(self, in_features: int, out_features: int, bias: bool, options: TensorOptions) -> None:
        super().__init__(in_features, out_features, bias, device=options.device, dtype=options.dtype)
        self.requires_grad_(False)

    def reset_parameters(self) -> None:
        """Leave the memory uninitialized: random numbers for billions of parameters take longer than reading theirs."""

    @staticmethod
    def can_join(parts: Sequence[nn.Module]) -> bool:
        """True if all ``parts`` are layers of exactly this kind: adapted ones compute more."""
        return all(type(part) is Linear for part in parts)

    @classmethod
    def joined(cls, parts: Sequence[Linear]) -> JoinedLinear:
        """``parts`` as one layer."""
        return JoinedLinear(parts)


class Table(nn.Module):
    """Rows of ``weight`` [rows, width] by their indices."""

    def __init__(self, num_rows: int, width: int, options: TensorOptions) -> None:
        super().__init__()
        self.weight = options.empty(num_rows, width)

    def forward(self, index: Tensor) -> Tensor:
        """Rows [..., width] for ``index`` [...]."""
        return nn.functional.embedding(index, self.weight)


class JoinedLinear(Linear):
    """Linear layers with one input as one product; a part without a bias has zeros in the joined one."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        weight = parts[0].weight
        sizes = [part.out_features for part in parts]
        has_bias = any(part.bias is not None for part in parts)
        super().__init__(parts[0].in_features, sum(sizes), has_bias, TensorOptions(weight.device, weight.dtype))
        self.sizes = sizes
        with torch.no_grad():
            torch.cat([part.weight for part in parts], out=self.weight)
            if has_bias:
                missing = [weight.new_zeros(size) for size in sizes]
                torch.cat(
                    [zeros if part.bias is None else part.bias for part, zeros in zip(parts, missing, strict=True)],
                    out=self.bias,
                )


class ExpertMatrices(nn.Module):
    """One linear layer of each expert: stacked matrices, [count * intermediate_size, hidden_size], each [out, in], or
    [in, out] if ``is_transposed``. ``against_groups``: reasons against one product for all of them."""

    def __init__(self, count: int, rows: int, hidden_size: int, options: TensorOptions, *, is_transposed: bool) -> None:
        super().__init__()
        self._count = count
        self.is_transposed = is_transposed
        self.weight = options.empty(count * rows, hidden_size)
        has_groups = options.device.type == "cuda" and options.dtype == torch.bfloat16
        self.against_groups = () if has_groups else ("one product for all experts needs CUDA and bfloat16",)

    @property
    def factors(self) -> Tensor:
        """The matrices as [count, in, out]."""
        matrices = torch.unflatten(self.weight, 0, (self._count, -1))
        return matrices if self.is_transposed else matrices.transpose(1, 2)

    def rounding(self, index: int) -> None:
        """None: inputs are not rounded."""

    def product(self, index: int, value: Tensor) -> Tensor:
        """Product [T, out] of ``value`` [T, in] with the expert at ``index``."""
        return value @ self.factors[index]

    def grouped(self, rows: Tensor, owners: Tensor, ends: Tensor) -> Tensor:
        """Product [n, out] of ``rows`` [n, in], sorted by their experts ``owners`` [n]; ``ends`` int32 [count] are the
        ends of the experts' groups."""
        product: Tensor = torch._grouped_mm(rows.to(self.weight.dtype), self.factors, offs=ends)
        return product


def project(module: nn.Module, value: object, names: tuple[str, ...]) -> tuple[Tensor, ...]:
    """``value`` (``fp8.Reading``) through the linear layers ``names`` of ``module``, in one product if they were
    joined."""
    joined = getattr(module, "_".join(names), None)
    if len(names) > 1 and joined is not None:
        return joined(value).split(joined.sizes, dim=-1)  # type: ignore[no-any-return]
    return tuple(getattr(module, name)(value) for name in names)


def join_linear_layers(model: nn.Module) -> None:
    """Replace linear layers with one input by one layer each, wherever a module of ``model`` has ``joinable`` ones.

    Layers that read the input in different ways, one in FP8 and one not, stay as they are. This is faster; afterwards
    the names of the state dict differ from the spec's. One group is in memory twice at a time.
    """
    for module in list(model.modules()):
        for names in getattr(module, "joinable", ()):
            parts: list[Any] = [module.get_submodule(name) for name in names]
            if not parts[0].can_join(parts):
                continue
            module.add_module("_".join(names), parts[0].joined(parts))
            for name in names:
                delattr(module, name)
