"""Effects of positions on attention: rotations of queries and keys, biases of the scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from bei_build.spec.parts import DisentangledSpec, RelativeBiasSpec, RopeSpec
from bei_build.spec.position_tables import (
    columns_of_axes,
    disentangled_rows,
    relative_buckets,
    rotation_angles,
    turns_long_texts,
)
from bei_build.torch_graph.norms import Norm
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import Table, TensorOptions


class Rotation(nn.Module):
    """Rotary positions up to ``max_seq_len``, one module for all layers with an equal ``spec``, the ``number``-th of
    the model. Angles, their cosines and sines, and the rotation itself are FP32."""

    def __init__(self, spec: RopeSpec, max_seq_len: int, device: torch.device, number: int) -> None:
        super().__init__()
        self._spec = spec
        self._key = f"rotation {number}"
        self._max_seq_len = max_seq_len
        self._has_long = turns_long_texts(spec, max_seq_len)
        self._axes = columns_of_axes(spec)
        self.reads = tuple(self._axes) or ("position_ids", *(("token_seq_lens",) if self._has_long else ()))
        # Buffers: AOTInductor takes no tensors that forward makes of lists.
        self.order: Tensor
        order = np.argsort([column for columns in self._axes.values() for column in columns])
        for name, index in {**self._axes, "order": order}.items():
            self.register_buffer(name, torch.from_numpy(np.array(index)).to(device), persistent=False)
        angles = rotation_angles(spec, max_seq_len)
        for name, function in (("cos", np.cos), ("sin", np.sin)):
            table = torch.from_numpy((function(angles) * spec.factor).astype(np.float32))
            self.register_buffer(name, table.to(device), persistent=False)

    def forward(self, heads: Tensor, step: PackedStep) -> Tensor:
        """``heads`` [T, heads, head_dim] rotated: (a, b) -> (a cos - b sin, b cos + a sin)."""
        cos, sin = step.once(self._key, lambda: self._of_tokens(step))
        turning, rest = torch.split(heads, [self._spec.rotary_dim, heads.shape[-1] - self._spec.rotary_dim], dim=-1)
        turning = turning.float()
        first, second = self._halves(turning)
        parts = [first * cos - second * sin, second * cos + first * sin]
        turned = self._joined(parts).to(heads.dtype)
        return torch.cat([turned, rest], -1) if rest.shape[-1] else turned

    def _halves(self, turning: Tensor) -> tuple[Tensor, Tensor]:
        """The components that rotate together, each [T, heads, rotary_dim / 2]."""
        if self._spec.interleaved:
            return turning[..., 0::2], turning[..., 1::2]
        if self._spec.num_parts > 1:
            parts = torch.unflatten(turning, -1, (self._spec.num_parts, 2, -1))
            return parts[..., 0, :].flatten(-2), parts[..., 1, :].flatten(-2)
        first, second = turning.chunk(2, dim=-1)
        return first, second

    def _joined(self, halves: list[Tensor]) -> Tensor:
        """What ``_halves`` has taken apart."""
        if self._spec.interleaved:
            return torch.stack(halves, -1).flatten(-2)
        if self._spec.num_parts > 1:
            parts = [torch.unflatten(half, -1, (self._spec.num_parts, -1)) for half in halves]
            return torch.stack(parts, -2).flatten(-3)
        return torch.cat(halves, -1)

    def of_both(
        self, query: Tensor, key: Tensor, norms: tuple[Norm, Norm] | None, step: PackedStep
    ) -> tuple[Tensor, Tensor]:
        """``query`` and ``key`` through the ``norms`` of their heads, and rotated, by one Triton kernel."""
        from bei_build.torch_graph.fused.rotate import rotate  # Triton is not always installed

        rows = step.once(f"{self._key} rows", lambda: self._rows(step))
        parameters = [part for norm in norms or () for part in (norm.weight, norm.bias)] or [None] * 4
        spec = norms[0].spec if norms else None
        form = (spec.kind, spec.eps, spec.offset) if spec else ("", 0.0, 0.0)
        cos, sin = (getattr(self, name) for name in ("cos", "sin"))
        turned: tuple[Tensor, Tensor] = rotate(query, key, cos, sin, rows, *parameters, *form, self._spec.interleaved)
        return turned

    def _of_tokens(self, step: PackedStep) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every token, [T, 1, rotary_dim / 2]."""
        cos, sin = (self._of(getattr(self, name), step).unsqueeze(1) for name in ("cos", "sin"))
        return cos, sin

    def _of(self, table: Tensor, step: PackedStep) -> Tensor:
        """The rows of ``table`` of every token, each column at the token's place on its axis."""
        if not self._axes:
            return table.index_select(0, self._rows(step))
        parts = [table.index_select(1, getattr(self, axis)).index_select(0, step[axis]) for axis in self._axes]
        return torch.cat(parts, 1).index_select(1, self.order)

    def _rows(self, step: PackedStep) -> Tensor:
        """Each token's row of the tables, INT32 [T]."""
        rows = step["position_ids"]
        if not self._has_long:
            return rows
        return torch.where(step["token_seq_lens"] > self._spec.long_from, rows + self._max_seq_len, rows)


class RelativeBias(Table):
    """T5's biases, one table for all layers."""

    def __init__(self, spec: RelativeBiasSpec, num_heads: int, max_seq_len: int, options: TensorOptions) -> None:
        super().__init__(spec.num_buckets, num_heads, options)
        buckets = torch.from_numpy(relative_buckets(spec, max_seq_len))
        self.buckets: Tensor
        self.register_buffer("buckets", buckets.to(options.device), persistent=False)

    def by_distance(self) -> Tensor:
        """A row per distance (key less query), float32 [2 * reach + 1, heads]."""
        return self(self.buckets).float()  # type: ignore[no-any-return]


class RelativePositions(Table):
    """DeBERTa's table of distances, which all layers share and each layer projects."""

    def __init__(self, spec: DisentangledSpec, hidden_size: int, max_seq_len: int, options: TensorOptions) -> None:
        super().__init__(2 * spec.span, hidden_size, options)
        rows = torch.from_numpy(disentangled_rows(spec, max_seq_len).astype(np.int32))
        self.rows: Tensor
        self.register_buffer("rows", rows.to(options.device), persistent=False)

    def normalized(self, norm: Norm | None) -> Tensor:
        """The table [2 * span, hidden], normalized."""
        return norm(self.weight) if norm else self.weight


@dataclass(frozen=True)
class ScoreTerms:
    """Position terms of one layer's scores, for any attention kernel.

    ``relative_bias`` float32 [2 * reach + 1, heads]: added, by key less query; farther distances have the ends' bias.
    ``slopes`` float32 [heads]: times the distance, subtracted (ALiBi). DeBERTa's terms are added before the scale:
    ``by_query`` and ``by_key`` [T, heads, table] are products of queries and of keys with the projected table, and
    ``rows`` int32 [2 * max_seq_len - 1] selects their entries by query less key.
    """

    relative_bias: Tensor | None = None
    slopes: Tensor | None = None
    by_query: Tensor | None = None
    by_key: Tensor | None = None
    rows: Tensor | None = None
