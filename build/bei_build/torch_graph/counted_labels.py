"""Labels of a schema and the margin of its count (``CountingSpec``), for the head that scores spans."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from bei_build.spec.head_layers import CountingSpec
from bei_build.spec.parts import NormSpec
from bei_build.torch_graph.norms import Norm
from bei_build.torch_graph.parameters import Linear, Table, TensorOptions


class SchemaLabels(nn.Module):
    """What makes labels of a schema, and the margin of its count."""

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

    def forward(self, states: Tensor, slots: Tensor) -> Tensor:
        """Labels [B, C, width] of token ``states`` [T, width] at ``slots`` [B, C]."""
        labels = states[slots]
        flat = labels.flatten(0, 1)
        gates = [getattr(self.gru[part], kind) for kind in ("weight", "bias") for part in ("input", "hidden")]
        step = torch.gru_cell(self.position.weight[:1].expand_as(flat), flat, *gates).reshape(labels.shape)
        if self._counting.kind == "mlp":
            return _through(self.label, torch.cat([step, labels], dim=-1))
        total = step + labels
        value: Tensor = self.narrow(total)
        is_label = torch.cat([slots.new_zeros(len(slots), 1).bool(), slots.diff(dim=1) > 0], dim=1)
        is_label = is_label | ~is_label.any(dim=1, keepdim=True)
        for block in self.blocks:
            value = block(value, is_label)
        return _through(self.label, torch.cat([value, total], dim=-1))

    def with_margin(self, scores: Tensor, states: Tensor, slots: Tensor) -> Tensor:
        """``scores`` [B, W, C, n] with the margin in the first column of a sequence that has further ones."""
        logits = _through(self.count, states[slots[:, 0]])
        margin = logits[:, 1:].amax(dim=1) - logits[:, 0]
        is_own = (slots == slots[:, :1]) & (slots[:, :1] < slots[:, -1:])
        return torch.where(is_own[:, None, :, None], margin[:, None, None, None], scores)


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
