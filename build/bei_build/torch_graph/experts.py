"""Mixtures of experts: an FP32 router, and the experts in one of two ways.

``grouped``: tokens sorted by expert, one grouped product for all experts (CUDA, BF16). Otherwise every expert computes
all tokens, and what it makes of those that did not choose it is multiplied by zero: the slow twin, which runs anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bei_build.spec import ExpertsSpec, MLPSpec
from bei_build.torch_graph.activation import activated
from bei_build.torch_graph.step import Step
from bei_build.torch_graph.storage import Linear, Storage


class _Matrices(nn.Module):
    """The experts' matrices, one below the other, [count * intermediate_size, hidden_size]."""

    def __init__(self, num_rows: int, hidden_size: int, storage: Storage) -> None:
        super().__init__()
        self.weight = storage.empty(num_rows, hidden_size)


class _Stored(nn.Module):
    """What the checkpoint has of all experts together."""

    def __init__(self, num_rows: int, hidden_size: int, has_bias: bool, storage: Storage) -> None:
        super().__init__()
        self.up = _Matrices(num_rows, hidden_size, storage)
        self.down = _Matrices(num_rows, hidden_size, storage)
        self.bias = storage.empty(hidden_size) if has_bias else None


class Experts(nn.Module):
    """``spec.experts`` on token states [T, hidden_size]. ``grouped`` None: wherever there is a grouped product."""

    rounding = None  # experts are not computed in FP8

    def __init__(self, spec: MLPSpec, hidden_size: int, storage: Storage, *, grouped: bool | None = None) -> None:
        super().__init__()
        assert spec.experts is not None
        self._spec = spec
        self._experts: ExpertsSpec = spec.experts
        self._grouped = _has_grouped_product(storage) if grouped is None else grouped
        num_rows = spec.experts.count * spec.intermediate_size
        self.router = Linear(hidden_size, spec.experts.count, False, storage.fp32)
        self.experts = _Stored(num_rows, hidden_size, spec.down_bias, storage)

    def forward(self, value: Tensor, step: Step) -> Tensor:
        """The sum of the outputs of each token's experts, [T, hidden_size]."""
        shares, chosen = self._routed(value)
        total = self._of_chosen(value, shares, chosen) if self._grouped else self._of_all(value, shares, chosen)
        bias = self.experts.bias
        return total if bias is None else total + bias

    def _routed(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts and what they contribute to it, [T, top_k]; the shares are float32."""
        scores = self.router(value.float())
        # The best are chosen by their scores, which the softmax would only round.
        chosen = scores.topk(self._experts.top_k, dim=-1).indices
        shares = scores.softmax(-1).gather(1, chosen)
        return shares / shares.sum(-1, keepdim=True) if self._experts.normalized else shares, chosen

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """Up as [count, intermediate_size, hidden_size], and down, stored as [in, out], in the same shape."""
        parts = (self.experts.up.weight, self.experts.down.weight)
        shape = self._experts.count, self._spec.intermediate_size
        up, down = (torch.unflatten(part, 0, shape) for part in parts)
        return up, down

    def _of_all(self, value: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        by_expert = shares.new_zeros(value.shape[0], self._experts.count).scatter(1, chosen, shares).to(value.dtype)
        total = torch.zeros_like(value)
        for index, (up, down) in enumerate(zip(*self._matrices(), strict=True)):
            inner = activated(value @ up.T, self._spec.activation)
            total = total + (inner @ down) * by_expert[:, index : index + 1]
        return total

    def _of_chosen(self, value: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Rows in the order of their experts, multiplied group by group and put back."""
        up, down = self._matrices()
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = (flat[:, None] == torch.arange(self._experts.count, device=flat.device)).sum(0)
        ends = counts.cumsum(0).to(torch.int32)
        rows = value[order // self._experts.top_k]
        inner = activated(torch._grouped_mm(rows, up.transpose(1, 2), offs=ends), self._spec.activation)
        outputs = torch._grouped_mm(inner, down, offs=ends)
        by_token = torch.unflatten(torch.empty_like(outputs).index_copy(0, order, outputs), 0, chosen.shape)
        return (by_token * shares.unsqueeze(-1)).sum(1).to(value.dtype)


def _has_grouped_product(storage: Storage) -> bool:
    return storage.device.type == "cuda" and storage.dtype == torch.bfloat16
