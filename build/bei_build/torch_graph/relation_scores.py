"""Scores of pairs of entities for labels (``RelationScoresSpec``), as a layer of a head: each pair whole, as GLiREL's
own code computes it. For references; packages for GPUs do not have it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bei.engine.entity_pairs import NAMES, entity_columns
from bei_build.spec.head_layers import RelationScoresSpec
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import Linear, TensorOptions
from bei_build.torch_graph.span_scores import through, two_layers
from bei_build.torch_graph.word_rows import WordReader, with_zeros


class RelationScores(nn.Module):
    """Entities, labels and what reads the words before them; the names of the modules are those of the spec."""

    def __init__(self, spec: RelationScoresSpec, options: TensorOptions) -> None:
        super().__init__()
        self._columns = entity_columns(spec.max_entities)
        self.reads = ("word_slots", "word_reversal", "label_slots", *sorted(NAMES), self._columns)
        self._averages_labels = spec.averages_labels
        width = spec.width
        self.projection = Linear(spec.state_width, width, True, options) if spec.is_projected else nn.Identity()
        self.rnn = WordReader(width, spec.recurrent_layers, options)
        self.start = two_layers(width, 4 * width, width, options)
        self.end = two_layers(width, 4 * width, width, options)
        self.out = two_layers(2 * width, 4 * width, width, options)
        self.pair = two_layers(2 * width, 4 * width, width, options)
        self.label = two_layers(width, 4 * width, width, options)

    def forward(self, value: Tensor, step: PackedStep) -> Tensor:
        """Scores [T, C * max_entities] of the token states ``value`` [T, state_width]."""
        states = self.projection(with_zeros(value))
        words = self.rnn.read(states[step["word_slots"].long().flatten()], step)
        starts, ends = (words[step[f"entity_{side}"].long()] for side in ("starts", "ends"))
        spans = torch.cat([through(self.start, starts), through(self.end, ends)], dim=-1).relu()
        entities = through(self.out, spans)  # [B, E, width]
        count = entities.shape[1]
        heads, tails = (entities.unsqueeze(axis).expand(-1, count, count, -1) for axis in (2, 1))
        pairs = through(self.pair, torch.cat([heads, tails], dim=-1))
        slots = step["label_slots"].long()
        labels = (states[slots] + states[slots + 1]) / 2 if self._averages_labels else states[slots]
        scores = torch.einsum("bijd,bcd->bicj", pairs, through(self.label, labels))
        return scores[..., step[self._columns].long()].flatten(2).flatten(0, 1)[step["token_entities"].long()]
