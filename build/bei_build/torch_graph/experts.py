"""Mixtures of experts: an FP32 router, and the experts in one of two ways.

``grouped``: tokens sorted by expert, one product for all experts (CUDA, in BF16; in FP8 on SM 9.0). Otherwise every
expert computes all tokens, and its results for tokens that did not choose it are multiplied by zero: the slow twin,
which runs anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bei_build.spec.parts import ExpertsSpec, MLPSpec
from bei_build.torch_graph.activation import activated, gated
from bei_build.torch_graph.fp8 import LinearInput, ProductChoice, round_once, with_ones
from bei_build.torch_graph.fp8_experts import FP8Experts
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import ExpertMatrices, Linear, TensorOptions


class _Stored(nn.Module):
    """The stacked weights of all experts, as the checkpoint stores them."""

    def __init__(self, count: int, rows: int, hidden_size: int, has_bias: bool, options: TensorOptions) -> None:
        super().__init__()
        self.up: ExpertMatrices | FP8Experts = ExpertMatrices(count, rows, hidden_size, options, is_transposed=False)
        self.down: ExpertMatrices | FP8Experts = ExpertMatrices(count, rows, hidden_size, options, is_transposed=True)
        self.bias = options.empty(hidden_size) if has_bias else None


class Experts(nn.Module):
    """``spec.experts`` on token states [T, hidden_size]. ``grouped`` None: wherever there is a grouped product."""

    rounding = None  # the router reads unrounded states, so nothing rounds them before

    def __init__(self, spec: MLPSpec, hidden_size: int, options: TensorOptions, *, grouped: bool | None = None) -> None:
        super().__init__()
        assert spec.experts is not None
        self._spec = spec
        self._experts: ExpertsSpec = spec.experts
        self._grouped = grouped
        self._fusions = options.fusions
        self.router = Linear(hidden_size, spec.experts.count, False, options.fp32)
        self.experts = _Stored(spec.experts.count, spec.intermediate_size, hidden_size, spec.down_bias, options)

    @property
    def is_grouped(self) -> bool:
        """True if both layers of the experts are one product each."""
        return not self._against_groups() if self._grouped is None else self._grouped

    @property
    def products(self) -> dict[str, ProductChoice]:
        """The choice of FP8 products of the experts, by the layer's name."""
        layers = {"experts.up": self.experts.up, "experts.down": self.experts.down}
        found = {name: layer.each for name, layer in layers.items() if isinstance(layer, FP8Experts)}
        if self.is_grouped:
            return dict.fromkeys(found, ProductChoice("grouped"))
        reasons = self._against_groups()
        return {name: ProductChoice(each.product, reasons) for name, each in found.items()}

    def _against_groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.experts.up.against_groups, *self.experts.down.against_groups)))

    def forward(self, value: Tensor, step: PackedStep) -> Tensor:
        """The sum of the outputs of each token's experts, [T, hidden_size]."""
        shares, chosen = self._routed(value)
        total = self._of_chosen(value, shares, chosen) if self.is_grouped else self._of_all(value, shares, chosen, step)
        bias = self.experts.bias
        return total if bias is None else total + bias

    def _routed(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts and their shares, [T, top_k]; shares are float32."""
        scores = self.router(value.float())
        # The best are chosen by scores, because the softmax would only add rounding.
        chosen = scores.topk(self._experts.top_k, dim=-1).indices
        shares = scores.softmax(-1).gather(1, chosen)
        return shares / shares.sum(-1, keepdim=True) if self._experts.normalized else shares, chosen

    def _of_all(self, value: Tensor, shares: Tensor, chosen: Tensor, step: PackedStep) -> Tensor:
        up, down, count = self.experts.up, self.experts.down, self._experts.count
        by_expert = shares.new_zeros(value.shape[0], count).scatter(1, chosen, shares).to(value.dtype)
        inputs: dict[object, LinearInput] = {}
        total = torch.zeros_like(value)
        for index in range(count):
            read, rounding = up.rounding(index), down.rounding(index)
            key = None if read is None else read.identity
            if key not in inputs:
                inputs[key] = round_once(value, read, step)
            inner = up.product(index, inputs[key])  # type: ignore[arg-type] # Rounded only where it rounds
            inner = gated(inner, None, self._spec.activation, rounding, self._fusions)
            output = down.product(index, inner if rounding is None else with_ones(inner, step))  # type: ignore[arg-type]
            total = total + output * by_expert[:, index : index + 1]
        return total

    def _of_chosen(self, value: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Rows sorted by expert, multiplied group by group, and returned to their order."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        owners = flat[order]
        counts = (flat[:, None] == torch.arange(self._experts.count, device=flat.device)).sum(0)
        ends = counts.cumsum(0).to(torch.int32)
        inner = self.experts.up.grouped(value[order // self._experts.top_k], owners, ends)
        outputs = self.experts.down.grouped(activated(inner.float(), self._spec.activation), owners, ends)
        by_token = torch.unflatten(torch.empty_like(outputs).index_copy(0, order, outputs), 0, chosen.shape)
        return (by_token * shares.unsqueeze(-1)).sum(1).to(value.dtype)
