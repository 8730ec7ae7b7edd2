"""Labels of a schema and the scores of its counts (``CountingSpec``), for the head that scores spans."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from bei.engine.schema_columns import NAMES, count_columns, count_slots
from bei_build.spec.head_layers import CountingSpec
from bei_build.spec.parts import NormSpec
from bei_build.torch_graph.norms import Norm
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import Linear, Table, TensorOptions


def columns_read(counting: CountingSpec, max_width: int) -> tuple[str, ...]:
    """The tensors of a step that labels of a schema read."""
    return (*sorted(NAMES), count_slots(count_columns(counting.num_counts, max_width)))


class SchemaLabels(nn.Module):
    """What makes labels of a schema, and the scores of its counts."""

    def __init__(self, counting: CountingSpec, width: int, options: TensorOptions) -> None:
        super().__init__()
        self._counting = counting
        self.position = Table(counting.num_counts, width, options)
        self.gru = nn.ModuleDict({part: Linear(width, 3 * width, True, options) for part in ("input", "hidden")})
        self.count = _linears((width, 2 * width, counting.num_counts), options)
        self.label = _linears(counting.label_widths(width), options)
        if counting.kind == "transformer":
            self.narrow = Linear(width, counting.inner_width, True, options)
            self.blocks = nn.ModuleList(_Block(counting, options) for _ in range(counting.num_layers))

    def forward(self, states: Tensor, step: PackedStep) -> Tensor:
        """Labels in instances [Q, width] of token ``states`` [T, width]."""
        labels = states[step["label_tokens"].long()]
        gates = [getattr(self.gru[part], kind) for kind in ("weight", "bias") for part in ("input", "hidden")]
        first = torch.gru_cell(self.position.weight[:1].expand_as(labels), labels, *gates)
        state, every = first[step["repeated_labels"].long()], [first]
        for row in self.position.weight[step["further_instances"].long()]:
            state = torch.gru_cell(row.expand_as(state), state, *gates)
            every.append(state)
        steps, labels = torch.cat(every)[step["column_rows"].long()], labels[step["column_labels"].long()]
        if self._counting.kind == "mlp":
            return _through(self.label, torch.cat([steps, labels], dim=-1))
        total = steps + labels
        groups = step["group_columns"].long()
        value: Tensor = self.narrow(total)[groups]
        is_label = groups.diff(dim=1, prepend=groups.new_full((len(groups), 1), -1)) > 0
        for block in self.blocks:
            value = block(value, is_label)
        value = value.flatten(0, 1)[step["column_places"].long()]
        return _through(self.label, torch.cat([value, total], dim=-1))

    def with_counts(self, scores: Tensor, states: Tensor, step: PackedStep) -> Tensor:
        """``scores`` [B, W, C, n] with those of counts in the columns of these."""
        width = scores.shape[-1]
        logits = _through(self.count, states[step["part_tokens"].long()])
        per_count = count_columns(logits.shape[1], width)
        filled = functional.pad(logits, (0, per_count * width - logits.shape[1]))
        table = functional.pad(filled.reshape(-1, width), (0, 0, 1, 0))  # a row for labels
        slots = step[count_slots(per_count)].long()
        return torch.where((slots > 0)[:, None, :, None], table[slots].unsqueeze(1), scores)


class _Block(nn.Module):
    """A layer of PyTorch's TransformerEncoderLayer, whose norms follow sums."""

    def __init__(self, counting: CountingSpec, options: TensorOptions) -> None:
        super().__init__()
        width = counting.inner_width
        self._heads = counting.num_heads
        self.input = Linear(width, 3 * width, True, options)
        self.output = Linear(width, width, True, options)
        self.up = Linear(width, 2 * width, True, options)
        self.down = Linear(2 * width, width, True, options)
        self.attention_norm = Norm(NormSpec(counting.eps), width, options)
        self.mlp_norm = Norm(NormSpec(counting.eps), width, options)

    def forward(self, value: Tensor, is_label: Tensor) -> Tensor:
        """States [B, C, width] of ``value``; ``is_label`` [B, C]: what is attended."""
        query, key, values = (
            part.unflatten(-1, (self._heads, -1)).transpose(1, 2) for part in self.input(value).chunk(3, dim=-1)
        )
        context = functional.scaled_dot_product_attention(query, key, values, attn_mask=is_label[:, None, None, :])
        value = self.attention_norm(value + self.output(context.transpose(1, 2).flatten(2)))
        result: Tensor = self.mlp_norm(value + self.down(self.up(value).relu()))
        return result


def _linears(widths: tuple[int, ...], options: TensorOptions) -> nn.ModuleList:
    return nn.ModuleList(Linear(entering, leaving, True, options) for entering, leaving in pairwise(widths))


def _through(layers: nn.ModuleList, value: Tensor) -> Tensor:
    for layer in layers[:-1]:
        value = layer(value).relu()
    result: Tensor = layers[-1](value)
    return result
