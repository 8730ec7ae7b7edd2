"""Scores of spans of words for labels (``SpanScoresSpec``), as a layer of a head: each span through the whole MLP, as
the model's own code computes them. For references and calibration; packages for GPUs do not have it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bei_build.spec.parts import SpanScoresSpec
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import Linear, TensorOptions


class SpanScores(nn.Module):
    """Spans, labels and what reads the words before them; the names of the modules are those of the spec."""

    reads = ("word_slots", "word_reversal", "word_ends", "label_slots", "token_words")

    def __init__(self, spec: SpanScoresSpec, options: TensorOptions) -> None:
        super().__init__()
        self._spec = spec
        width, half = spec.width, spec.width // 2
        self.rnn = nn.ModuleList(_BothWays(width, half, options) for _ in range(spec.recurrent_layers))
        self.start = _mlp(width, width, options)
        self.end = _mlp(width, width, options)
        self.label = _mlp(width, width, options)
        self.out = _mlp(2 * width, width, options)

    def forward(self, value: Tensor, step: PackedStep) -> Tensor:
        """Scores [T, C * max_width] of the token states ``value`` [T, width]."""
        slots, most = step["word_slots"].long(), self._spec.max_width
        with_zeros = torch.cat([value, value.new_zeros(1, value.shape[1])])  # of words without tokens
        sizes, words = slots.shape, with_zeros[slots.flatten()]
        for layer in self.rnn:
            assert isinstance(layer, _BothWays)
            reversal = step["word_reversal"].flatten().long()
            words = torch.cat([layer.ahead(words, sizes), layer.back(words[reversal], sizes)[reversal]], dim=-1)
        starts = _through(self.start, words).reshape(*sizes, -1)
        ends = _through(self.end, words)[step["word_ends"].long()]
        last = ends[:, -1:].expand(-1, most - 1, -1)
        spans = torch.cat([ends, last], dim=1).unfold(1, most, 1).transpose(2, 3)  # [B, W, max_width, width]
        pairs = torch.cat([starts.unsqueeze(2).expand_as(spans), spans], dim=-1).relu()
        labels = _through(self.label, value[step["label_slots"].long()])
        scores = torch.einsum("bwkd,bcd->bwck", _through(self.out, pairs), labels)
        return scores.flatten(2).flatten(0, 1)[step["token_words"].long()]


class _BothWays(nn.Module):
    """The two directions of one layer."""

    def __init__(self, entering: int, leaving: int, options: TensorOptions) -> None:
        super().__init__()
        self.ahead = _LSTM(entering, leaving, options)
        self.back = _LSTM(entering, leaving, options)


class _LSTM(nn.Module):
    """One direction over the words of each sequence."""

    def __init__(self, entering: int, leaving: int, options: TensorOptions) -> None:
        super().__init__()
        self.input = Linear(entering, 4 * leaving, True, options)
        self.hidden = Linear(leaving, 4 * leaving, True, options)

    def forward(self, words: Tensor, sizes: torch.Size) -> Tensor:
        """Flat states [B * W, leaving] for flat ``words``."""
        rows = words.reshape(*sizes, -1)
        start = rows.new_zeros(1, sizes[0], self.hidden.in_features)
        weights = [self.input.weight, self.hidden.weight, self.input.bias, self.hidden.bias]
        states: Tensor = torch.lstm(rows, (start, start), weights, True, 1, 0.0, False, False, True)[0]
        return states.flatten(0, 1)


def _mlp(entering: int, leaving: int, options: TensorOptions) -> nn.ModuleList:
    return nn.ModuleList([Linear(entering, 4 * leaving, True, options), Linear(4 * leaving, leaving, True, options)])


def _through(mlp: nn.ModuleList, value: Tensor) -> Tensor:
    first, second = mlp
    result: Tensor = second(first(value).relu())
    return result
