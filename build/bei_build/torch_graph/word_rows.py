"""Words of a step, read by LSTMs before a head scores them (``SpanScoresSpec``, ``WordScoresSpec``)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bei.engine.packing import label_vectors
from bei_build.spec.head_layers import SpanScoresSpec, WordScoresSpec
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import Linear, TensorOptions


def labels_read(spec: SpanScoresSpec | WordScoresSpec) -> tuple[str, ...]:
    """The tensors of a step that ``labels_of`` reads."""
    return ("label_slots", *([label_vectors(spec.width)] if spec.given_labels else []))


def labels_of(spec: SpanScoresSpec | WordScoresSpec, value: Tensor, step: PackedStep) -> Tensor:
    """Rows [B, C, width] of all labels: of token states ``value`` [T, width], or of given vectors."""
    rows = step[label_vectors(spec.width)].to(value.dtype) if spec.given_labels else value
    return rows[step["label_slots"].long()]


def with_zeros(value: Tensor) -> Tensor:
    """``value`` [T, width] with a row of zeros behind it, of words without tokens."""
    return torch.cat([value, value.new_zeros(1, value.shape[1])])


class WordReader(nn.ModuleList):
    """``layers`` bidirectional LSTMs over words of ``width`` numbers."""

    reads = ("word_slots", "word_reversal")

    def __init__(self, width: int, layers: int, options: TensorOptions) -> None:
        super().__init__(_BothWays(width, width // 2, options) for _ in range(layers))

    def words(self, value: Tensor, step: PackedStep) -> Tensor:
        """Flat rows [B * W, width] of all words for token states ``value`` [T, width]."""
        slots = step["word_slots"].long()
        return self.read(with_zeros(value)[slots.flatten()], step)

    def read(self, words: Tensor, step: PackedStep) -> Tensor:
        """Flat rows of ``words`` through the LSTMs."""
        slots = step["word_slots"]
        reversal = step["word_reversal"].flatten().long()
        for layer in self:
            assert isinstance(layer, _BothWays)
            ahead, back = layer.ahead(words, slots.shape), layer.back(words[reversal], slots.shape)
            words = torch.cat([ahead, back[reversal]], dim=-1)
        return words


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
