"""Scores of spans of words for labels (``SpanScoresSpec``), and of words of spans (``WordScoresSpec``), as layers of
heads: each span and each pair whole, as the models' own code computes them. For references and calibration; packages
for GPUs do not have them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bei_build.spec.head_layers import SpanScoresSpec, WordScoresSpec
from bei_build.torch_graph.counted_labels import SchemaLabels, columns_read
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import Linear, TensorOptions
from bei_build.torch_graph.word_rows import WordReader, labels_of, labels_read


class SpanScores(nn.Module):
    """Spans, labels and what reads the words before them; the names of the modules are those of the spec."""

    def __init__(self, spec: SpanScoresSpec, options: TensorOptions) -> None:
        super().__init__()
        read = columns_read(spec.counting, spec.max_width) if spec.counting else labels_read(spec)
        self.reads = ("word_slots", "word_reversal", "word_ends", "token_words", *read)
        self._spec = spec
        width = spec.width
        self.rnn = WordReader(width, spec.recurrent_layers, options)
        self.start = two_layers(width, spec.end_width, width, options)
        self.end = two_layers(width, spec.end_width, width, options)
        if spec.linear:
            self.out: nn.Module = Linear(2 * width, width, True, options)
        else:
            self.out = two_layers(2 * width, 4 * width, width, options)
        self.schema = SchemaLabels(spec.counting, width, options) if spec.counting else None
        if self.schema is None:
            self.label = two_layers(width, 4 * width, width, options)

    def forward(self, value: Tensor, step: PackedStep) -> Tensor:
        """Scores [T, C * max_width] of the token states ``value`` [T, width]."""
        sizes, most = step["word_slots"].shape, self._spec.max_width
        words = self.rnn.words(value, step)
        starts = through(self.start, words).reshape(*sizes, -1)
        ends = through(self.end, words)[step["word_ends"].long()]
        last = ends[:, -1:].expand(-1, most - 1, -1)
        spans = torch.cat([ends, last], dim=1).unfold(1, most, 1).transpose(2, 3)  # [B, W, max_width, width]
        pairs = torch.cat([starts.unsqueeze(2).expand_as(spans), spans], dim=-1).relu()
        if self.schema is None:
            labels = through(self.label, labels_of(self._spec, value, step))
        else:
            labels = self.schema(value, step)[step["column_slots"].long()]
        scores = torch.einsum("bwkd,bcd->bwck", through(self.out, pairs), labels)
        if self.schema is not None:
            scores = self.schema.with_counts(scores, value, step)
        return scores.flatten(2).flatten(0, 1)[step["token_words"].long()]


class WordScores(nn.Module):
    """Words and labels, and what scores each pair; the names of the modules are those of the spec."""

    def __init__(self, spec: WordScoresSpec, options: TensorOptions) -> None:
        super().__init__()
        self.reads = ("word_slots", "word_reversal", "token_words", *labels_read(spec))
        self._spec = spec
        width = spec.width
        self.rnn = WordReader(width, spec.recurrent_layers, options)
        self.word = Linear(width, 2 * width, True, options)
        self.label = Linear(width, 2 * width, True, options)
        self.out = nn.ModuleList(
            [Linear(3 * width, 4 * width, True, options), Linear(4 * width, spec.columns, True, options)]
        )

    def forward(self, value: Tensor, step: PackedStep) -> Tensor:
        """Scores [T, C * 3] of the token states ``value`` [T, width]."""
        sizes = step["word_slots"].shape
        words = self.word(self.rnn.words(value, step)).reshape(*sizes, 1, -1)
        labels = self.label(labels_of(self._spec, value, step)).unsqueeze(1)
        words, labels = (side.expand(-1, sizes[1], labels.shape[2], -1).chunk(2, dim=-1) for side in (words, labels))
        pairs = torch.cat([words[0], labels[0], words[1] * labels[1]], dim=-1)
        return through(self.out, pairs).flatten(2).flatten(0, 1)[step["token_words"].long()]


def two_layers(entering: int, inner: int, leaving: int, options: TensorOptions) -> nn.ModuleList:
    """An MLP of one hidden layer."""
    return nn.ModuleList([Linear(entering, inner, True, options), Linear(inner, leaving, True, options)])


def through(mlp: nn.Module, value: Tensor) -> Tensor:
    """Of two linear layers, or of one."""
    if not isinstance(mlp, nn.ModuleList):
        alone: Tensor = mlp(value)
        return alone
    first, second = mlp
    result: Tensor = second(first(value).relu())
    return result
