"""Attention of one layer: projections, norms and rotation of queries and keys, and the chosen kernel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bei_build.spec.parts import AttentionSpec
from bei_build.spec.position_tables import alibi_slopes
from bei_build.torch_graph import attention_kernels
from bei_build.torch_graph.attention_kernels import Kernel
from bei_build.torch_graph.fp8 import (
    FP8Linear,
    LinearInput,
    Rounding,
    common_rounding,
    round_once,
    rounding_of,
    with_ones,
)
from bei_build.torch_graph.norms import Norm
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import Linear, TensorOptions, project
from bei_build.torch_graph.positions import RelativeBias, RelativePositions, Rotation, ScoreTerms


class PositionModules:
    """Position modules that layers share; the model owns those with weights."""

    def __init__(self, max_seq_len: int) -> None:
        self.max_seq_len = max_seq_len
        self.rotations: dict[object, Rotation] = {}
        self.relative_bias: RelativeBias | None = None
        self.relative_positions: RelativePositions | None = None
        self.relative_positions_norm: Norm | None = None


class Attention(nn.Module):
    """``spec`` over token states of ``hidden_size``, computed by ``kernel``.

    ``cross``: queries and keys have different inputs. ``partial_keys`` as in ``ModelSpec``.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        kernel: Kernel,
        positions: PositionModules,
        options: TensorOptions,
        *,
        partial_keys: bool,
        cross: bool = False,
    ) -> None:
        super().__init__()
        self._spec = spec
        self._kernel: Kernel = kernel
        self._partial_keys = partial_keys
        self._shared = positions
        self.reads = attention_kernels.tensors_read(kernel, spec, partial_keys=partial_keys)
        self.query = Linear(hidden_size, spec.width, spec.bias, options)
        self.key = Linear(hidden_size, spec.kv_width, spec.bias and spec.key_bias, options)
        self.value = Linear(hidden_size, spec.kv_width, spec.bias, options)
        self.output = Linear(spec.width, hidden_size, spec.output_bias, options)
        if spec.qk_norm:
            widths = (spec.width, spec.kv_width) if spec.qk_norm_joint else (spec.head_dim, spec.head_dim)
            self.query_norm, self.key_norm = (Norm(spec.qk_norm, width, options) for width in widths)
        self.value_norm = Norm(spec.value_norm, spec.head_dim, options) if spec.value_norm else None
        if spec.rope:
            if spec.rope not in positions.rotations:
                number = len(positions.rotations)
                positions.rotations[spec.rope] = Rotation(spec.rope, positions.max_seq_len, options.device, number)
            self.rotation = positions.rotations[spec.rope]
        if spec.alibi:
            slopes = torch.from_numpy(alibi_slopes(spec.num_heads)).to(options.device)
            self.slopes: Tensor
            self.register_buffer("slopes", slopes, persistent=False)
        self._add_disentangled(hidden_size, options)
        self._readers = ("query",) if cross else ("query", "key", "value")
        # DeBERTa's table goes through query and key separately.
        self.joinable = () if spec.disentangled else (("key", "value") if cross else self._readers,)
        # The kernel turns by one place of a token.
        self._is_rotation_fused = spec.rope is not None and not spec.rope.axes and options.fusions.has("rotation")

    def _add_disentangled(self, hidden_size: int, options: TensorOptions) -> None:
        spec, positions = self._spec, self._spec.disentangled
        if positions is None:
            return
        if positions.share_keys:
            self.read_exactly = ("query", "key")  # the table is not an input with calibrated scales
            return
        if positions.content_to_position:
            self.position_key = Linear(hidden_size, spec.width, positions.key_bias, options)
        if positions.position_to_content:
            self.position_query = Linear(hidden_size, spec.width, True, options)

    @property
    def rounding(self) -> Rounding | None:
        """Rounding of the input, if all layers that read it use the same FP8 rounding."""
        return common_rounding(self, self._readers)

    def forward(self, hidden: LinearInput, step: PackedStep, encoded: Tensor | None = None) -> Tensor:
        """Attention of tokens ``hidden`` [T, hidden] to each other, or to the states ``encoded`` [T, hidden]."""
        spec = self._spec
        hidden = round_once(hidden, self.rounding, step)
        if encoded is None:
            query, key, value = project(self, hidden, ("query", "key", "value"))
        else:
            query = self.query(hidden)
            names = ("key", "value")
            key, value = project(self, round_once(encoded, common_rounding(self, names), step), names)
        if spec.clip is not None:
            query, key, value = (part.clamp(-spec.clip, spec.clip) for part in (query, key, value))
        query, key = self._placed(query, key, step)
        value = torch.unflatten(value, -1, (spec.num_kv_heads, spec.head_dim))
        if self.value_norm:
            value = self.value_norm(value)
        return self.output(self._context(query, key, value, step))  # type: ignore[no-any-return]

    def _placed(self, query: Tensor, key: Tensor, step: PackedStep) -> tuple[Tensor, Tensor]:
        """Queries and keys [T, width] as [T, heads, head_dim], normalized and rotated."""
        spec = self._spec
        if spec.qk_norm and spec.qk_norm_joint:
            query, key = self.query_norm(query), self.key_norm(key)
        query = torch.unflatten(query, -1, (spec.num_heads, spec.head_dim))
        key = torch.unflatten(key, -1, (spec.num_kv_heads, spec.head_dim))
        has_norms = spec.qk_norm is not None and not spec.qk_norm_joint
        if self._is_rotation_fused:
            norms = (self.query_norm, self.key_norm) if has_norms else None
            return self.rotation.of_both(query, key, norms, step)
        if has_norms:
            query, key = self.query_norm(query), self.key_norm(key)
        return (self.rotation(query, step), self.rotation(key, step)) if spec.rope else (query, key)

    def _context(self, query: Tensor, key: Tensor, value: Tensor, step: PackedStep) -> LinearInput:
        """The input [T, width] of the output layer, in FP8 if that is: FlashAttention cannot round, our kernel does."""
        spec, rounding, partial_keys = self._spec, rounding_of(self.output), self._partial_keys
        if self._kernel == "flash":
            context = attention_kernels.flash(query, key, value, spec, step, partial_keys=partial_keys)
            return round_once(context.flatten(-2), rounding, step)
        terms = self._terms(query, key, step)
        if self._kernel == "plain":
            context = attention_kernels.plain(query, key, value, spec, terms, step, partial_keys=partial_keys)
            return round_once(context.flatten(-2), rounding, step)
        from bei_build.torch_graph.ragged_attention import ragged  # Triton is not always installed

        inverse = None if rounding is None else rounding.inverse
        context = ragged(query, key, value, spec, terms, step, partial_keys=partial_keys, inverse=inverse).flatten(-2)
        return context if inverse is None else with_ones(context, step)

    def _terms(self, query: Tensor, key: Tensor, step: PackedStep) -> ScoreTerms:
        spec, shared = self._spec, self._shared
        bias = None
        if spec.relative_bias:
            assert shared.relative_bias is not None
            bias = step.once("relative bias", shared.relative_bias.by_distance)
        slopes = self.slopes if spec.alibi else None
        if not spec.disentangled:
            return ScoreTerms(bias, slopes)
        assert shared.relative_positions is not None
        table = shared.relative_positions
        rows = step.once("relative positions", lambda: table.normalized(shared.relative_positions_norm))
        prefix = "" if spec.disentangled.share_keys else "position_"
        return ScoreTerms(
            bias,
            slopes,
            by_query=self._products(query, rows, f"{prefix}key") if spec.disentangled.content_to_position else None,
            by_key=self._products(key, rows, f"{prefix}query") if spec.disentangled.position_to_content else None,
            rows=table.rows,
        )

    def _products(self, heads: Tensor, rows: Tensor, layer: str) -> Tensor:
        """``heads`` [T, heads, head_dim] with each of ``rows`` through ``layer``, [T, heads, rows]."""
        module = getattr(self, layer)
        projected = module.exact(rows) if isinstance(module, FP8Linear) else module(rows)
        by_head = torch.unflatten(projected, -1, (self._spec.num_heads, self._spec.head_dim))
        return torch.einsum("thd,rhd->thr", heads, by_head)
