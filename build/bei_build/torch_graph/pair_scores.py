"""Scores of pairs of spans for relations (``SpanPairScoresSpec``), as a layer of a head, as the model's own code
computes them. For references; packages for GPUs do not have it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from bei.engine.span_pairs import NAMES, pair_slots
from bei_build.spec.head_layers import SpanPairScoresSpec
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import Linear, TensorOptions


class PairScores(nn.Module):
    """What reads words, labels and distances of pairs; the names of the modules are those of the spec."""

    def __init__(self, spec: SpanPairScoresSpec, options: TensorOptions) -> None:
        super().__init__()
        self._slots = pair_slots(spec.most)
        self.reads = (*sorted(NAMES), self._slots)
        self._joins_labels, self._reads_content = spec.joins_labels, spec.reads_content
        width = spec.width
        entering = 4 * width + spec.label_width + 2
        self.mlp = nn.ModuleList([Linear(entering, width, True, options), Linear(width, 1, True, options)])
        if spec.reads_content:
            self.head, self.tail = Linear(width, width, True, options), Linear(width, width, True, options)
            self.gate = Linear(spec.label_width, width, True, options)
            self.content = Linear(2 * width + spec.label_width, 1, True, options)

    def forward(self, value: Tensor, step: PackedStep) -> Tensor:
        """Rows [T, most] of the token states ``value`` [T, width]."""
        words = value[step["pair_words"].long()]
        firsts, stops = step["pair_firsts"].long(), step["pair_stops"].long()
        labels = value[step["pair_labels"].long()]  # [2, P, width]
        label = torch.cat([labels[0], labels[1]], dim=1) if self._joins_labels else labels.mean(dim=0)
        ends = [states for side in (0, 1) for states in (words[firsts[side]], words[stops[side] - 1])]
        joined = torch.cat([*ends, label, step["pair_features"].to(value.dtype)], dim=1)
        scores: Tensor = self.mlp[1](functional.gelu(self.mlp[0](joined)))
        if self._reads_content:
            scores = scores + self._of_content(words, firsts, stops, label)
        return scores.flatten()[step[self._slots].long()]

    def _of_content(self, words: Tensor, firsts: Tensor, stops: Tensor, label: Tensor) -> Tensor:
        """What the words of heads and tails add to the scores, [P, 1]."""
        sums = functional.pad(words.float().cumsum(0), (0, 0, 1, 0))
        means = ((sums[stops] - sums[firsts]) / (stops - firsts).unsqueeze(-1)).to(words.dtype)
        head, tail = self.head(means[0]), self.tail(means[1])
        products = (head * torch.sigmoid(self.gate(label)) * tail).sum(1, keepdim=True) * words.shape[1] ** -0.5
        found: Tensor = products + self.content(torch.cat([head, tail, label], dim=1))
        return found
