"""Scores of tokens as labels of their text (``LabelScoresSpec``), as a layer of a head."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from bei_build.spec.head_layers import LabelScoresSpec
from bei_build.torch_graph.activation import activated
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import Linear, TensorOptions


class LabelScores(nn.Module):
    """The names of the modules are those of the spec."""

    reads = ("sequence_ids",)

    def __init__(self, spec: LabelScoresSpec, options: TensorOptions) -> None:
        super().__init__()
        self._spec = spec
        self.text = _Side(spec, options)
        self.label = _Side(spec, options)
        widths = (spec.entering, *spec.inner, 1) if spec.entering else ()
        self.out = nn.ModuleList([Linear(entering, leaving, True, options) for entering, leaving in pairwise(widths)])
        if spec.normalizes:
            self.scale = options.empty(1)  # stored without a dimension

    def forward(self, value: Tensor, text: Tensor, step: PackedStep) -> Tensor:
        """Scores [T, 1] of the token states ``value`` [T, width] for ``text`` [B, width]."""
        spec = self._spec
        texts, labels = self.text(text.to(value.dtype))[step["sequence_ids"].long()], self.label(value)
        if spec.scorer == "dot":
            scores = (texts * labels).sum(dim=1, keepdim=True)
        else:
            pairs = [texts, labels]
            if spec.scorer == "weighted":
                (text_a, text_b), (label_a, label_b) = (
                    side.rows(rows).chunk(2, dim=1) for side, rows in ((self.text, texts), (self.label, labels))
                )
                pairs = [text_a, label_a, text_b * label_b]
            scores = torch.cat(pairs, dim=1)
            for layer in self.out[:-1]:
                scores = layer(scores).relu()
            scores = self.out[-1](scores)
        found: Tensor = scores * self.scale if spec.normalizes else scores
        return found


class _Side(nn.Module):
    """The projection of a side; its linear layers are called 0, 1 and, to two rows, ``rows``."""

    def __init__(self, spec: LabelScoresSpec, options: TensorOptions) -> None:
        super().__init__()
        self._spec = spec
        for index in range(2):
            self.add_module(str(index), Linear(spec.width, spec.width, True, options))
        if spec.scorer == "weighted":
            self.rows = Linear(spec.width, 2 * spec.width, True, options)

    def forward(self, rows: Tensor) -> Tensor:
        first, second = self._modules["0"], self._modules["1"]
        assert first is not None
        assert second is not None
        result: Tensor = second(activated(first(rows), self._spec.activation))
        if not self._spec.normalizes:
            return result
        unit: Tensor = result / (result.norm(dim=-1, keepdim=True) + 1e-8)
        return unit
