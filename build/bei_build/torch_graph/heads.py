"""From token states to outputs: layers on every token, pooling, layers on the result.

As in the ONNX graph, layers on tokens compute in the model's type; everything from the pooling on, or from a layer that
16 bits are too narrow for, in FP32. Pooling reads packed tokens: no padding, whatever the lengths are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from bei.errors import CompileError
from bei_build.spec.head_layers import (
    BoundaryScoresSpec,
    DivideRowsSpec,
    HeadLayer,
    JoinRowsSpec,
    JoinStatesSpec,
    LabelScoresSpec,
    LikelihoodSpec,
    MeanRowsSpec,
    RecordStatesSpec,
    RelationScoresSpec,
    ScaledTanhSpec,
    SpanPairScoresSpec,
    SpanScoresSpec,
    WordScoresSpec,
    needs_fp32,
)
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import ActivationSpec, DenseSpec, LatentAttentionSpec, NormalizeSpec, NormLayerSpec, Pooling
from bei_build.torch_graph.activation import activated
from bei_build.torch_graph.attention_pool import AttentionPool
from bei_build.torch_graph.boundary_scores import BoundaryScores
from bei_build.torch_graph.label_scores import LabelScores
from bei_build.torch_graph.latent_attention import LatentAttention
from bei_build.torch_graph.norms import Norm
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.pair_scores import PairScores
from bei_build.torch_graph.parameters import Linear, TensorOptions
from bei_build.torch_graph.record_states import RecordStates
from bei_build.torch_graph.relation_scores import RelationScores
from bei_build.torch_graph.scaled_tanh import ScaledTanh
from bei_build.torch_graph.span_scores import SpanScores, WordScores

_READS: dict[Pooling, tuple[str, ...]] = {
    "cls": ("first_index",),
    "last": ("last_index",),
    "last_marked": ("cu_query_lens", "last_index"),
    "first_marked": ("cu_query_lens", "sequence_ids"),
    "largest_id": ("cu_query_lens", "sequence_ids"),
    "max": ("cu_query_lens",),
    "weighted_mean": ("cu_query_lens", "position_ids"),
}
_READ_STEPS = (SpanScores, WordScores, RelationScores, BoundaryScores, PairScores, RecordStates)
_MARKS = {"last_marked", "first_marked", "largest_id"}


@dataclass(frozen=True)
class _Layer:
    """A layer of a head. ``module`` belongs to the model; None where the layer has no weights."""

    spec: HeadLayer
    module: nn.Module | None
    in_fp32: bool
    taps: tuple[tuple[int, tuple[_Layer, ...]], ...] = ()

    def joined(self, value: Tensor, step: PackedStep, passed: Sequence[Tensor]) -> Tensor:
        """``value`` with columns of the states ``passed`` by other layers."""
        columns = [value]
        for place, layers in self.taps:
            state = passed[place]
            for layer in layers:
                state = layer(state, step)
            columns.append(state)
        return torch.cat(columns, 1)

    def __call__(self, value: Tensor, step: PackedStep) -> Tensor:
        if self.in_fp32:
            value = value.float()
        if isinstance(self.spec, DenseSpec):
            return self._dense(self.spec, value)
        if isinstance(self.module, _READ_STEPS):
            return self.module(value, step)  # type: ignore[no-any-return]
        if self.module is not None:
            return self.module(value)  # type: ignore[no-any-return]
        if isinstance(self.spec, JoinRowsSpec):
            return value.reshape(-1, self.spec.count * value.shape[1])
        if isinstance(self.spec, MeanRowsSpec):
            groups = functional.pad(value, (0, 0, 0, -value.shape[0] % self.spec.count))
            return torch.unflatten(groups, 0, (-1, self.spec.count)).float().mean(1).to(value.dtype)
        if isinstance(self.spec, DivideRowsSpec):
            filled = functional.pad(value, (0, -value.shape[1] % self.spec.count))
            return filled.reshape(-1, filled.shape[1] // self.spec.count)
        if isinstance(self.spec, ActivationSpec):
            return activated(value, self.spec.activation)
        return functional.normalize(value, dim=-1)

    def _dense(self, spec: DenseSpec, value: Tensor) -> Tensor:
        assert self.module is not None
        result = activated(self.module(value), spec.activation)
        if not spec.residual:
            return result
        return result + (self.module.get_submodule("residual")(value) if spec.projects_residual else value)


class Head:
    """One output of ``model``; adds its modules to the model under the names of the spec."""

    def __init__(self, head: HeadSpec, spec: ModelSpec, model: nn.Module, options: TensorOptions) -> None:
        self.spec = head
        self._model_spec = spec
        self._is_fused = options.fusions.has("pooling")
        self._token_layers: list[_Layer] = []
        in_fp32 = False
        for layer in head.token_layers:
            in_fp32 = in_fp32 or needs_fp32(layer)
            module = _added(layer, model, options.fp32 if in_fp32 else options)
            taps = layer.taps if isinstance(layer, JoinStatesSpec) else ()
            own = tuple(
                (place, tuple(_Layer(one, _added(one, model, options), False) for one in of_place))
                for place, of_place in taps
            )
            self._token_layers.append(_Layer(layer, module, in_fp32, own))
        self._layers = [_Layer(layer, _added(layer, model, options.fp32), True) for layer in head.layers]
        self._attention_pool: AttentionPool | None = None
        if head.attention_pool:
            self._attention_pool = AttentionPool(head.attention_pool, options)
            model.add_module(head.attention_pool.name, self._attention_pool)

    @property
    def reads(self) -> set[str]:
        """The tensors of a step that the pooling reads."""
        if self._attention_pool is not None:
            return set(self._attention_pool.reads)
        of_layers = [layer.pooling for layer in self.spec.token_layers if isinstance(layer, LabelScoresSpec)]
        names = {name for mode in (*self.spec.pooling, *of_layers) for name in _READS.get(mode, ("cu_query_lens",))}
        if "last" in self.spec.pooling and self.spec.passed_id is not None:
            names |= {"cu_query_lens", "first_index"}
        is_mean = any(mode not in (*_MARKS, "cls", "last", "max") for mode in self.spec.pooling)
        return names | {"token_pool_mask"} if is_mean and not self._model_spec.pools_prompt else names

    def __call__(self, hidden: Tensor, step: PackedStep, passed: Sequence[Tensor] = ()) -> Tensor:
        """Output float32 [B, width] from ``hidden`` [T, hidden]; without pooling [T, width]. ``passed``: the states
        behind each layer, for heads that read these."""
        value = hidden
        for layer in self._token_layers:
            if isinstance(layer.spec, LabelScoresSpec) and isinstance(layer.module, LabelScores):
                text = pool_tokens(layer.spec.pooling, value, self._model_spec, step)
                value = layer.module(value, text, step)
            elif layer.taps:
                value = layer.joined(value, step, passed)
            else:
                value = layer(value, step)
        if any(isinstance(layer.spec, MeanRowsSpec) for layer in self._token_layers):
            value = value[: hidden.shape[0]]
        layers = self._layers
        if self._attention_pool is not None:
            value = self._attention_pool(value, step)
        elif self.spec.pooling:
            # The kernel normalizes vectors of a single mode.
            normalizes = self._is_fused and len(self.spec.pooling) == 1 and self._is_normalized_at_once
            value = self._pooled(value, step, normalizes=normalizes)
            layers = layers[normalizes:]
        value = value.float()
        for layer in layers:
            value = layer(value, step)
        return value

    @property
    def _is_normalized_at_once(self) -> bool:
        return bool(self._layers) and isinstance(self._layers[0].spec, NormalizeSpec)

    def _pooled(self, hidden: Tensor, step: PackedStep, *, normalizes: bool) -> Tensor:
        arguments = hidden, self._model_spec, step, self.spec.passed_id
        if self._is_fused:
            parts = [pool_by_triton(mode, *arguments, normalizes=normalizes) for mode in self.spec.pooling]
        else:
            parts = [pool_tokens(mode, *arguments) for mode in self.spec.pooling]
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _added(layer: HeadLayer, model: nn.Module, options: TensorOptions) -> nn.Module | None:
    """The module of ``layer``, added to ``model``; heads that name the same layer share it. Raises CompileError."""
    module: nn.Module
    if isinstance(layer, DenseSpec):
        module = Linear(layer.in_features, layer.out_features, layer.bias, options)
        if layer.projects_residual:
            module.add_module("residual", Linear(layer.in_features, layer.out_features, False, options))
    elif isinstance(layer, NormLayerSpec):
        module = Norm(layer.norm, layer.width, options)
    elif isinstance(layer, ScaledTanhSpec):
        module = ScaledTanh(layer, options)
    elif isinstance(layer, LatentAttentionSpec):
        module = LatentAttention(layer, options)
    elif isinstance(layer, SpanScoresSpec):
        module = SpanScores(layer, options)
    elif isinstance(layer, WordScoresSpec):
        module = WordScores(layer, options)
    elif isinstance(layer, RelationScoresSpec):
        module = RelationScores(layer, options)
    elif isinstance(layer, BoundaryScoresSpec):
        module = BoundaryScores(layer, options)
    elif isinstance(layer, SpanPairScoresSpec):
        module = PairScores(layer, options)
    elif isinstance(layer, RecordStatesSpec):
        boundaries = model.get_submodule(layer.boundaries.name)
        assert isinstance(boundaries, BoundaryScores)  # of the head in front
        module = RecordStates(layer, boundaries, options)
    elif isinstance(layer, LabelScoresSpec):
        module = LabelScores(layer, options)
    elif isinstance(layer, LikelihoodSpec):
        raise CompileError("Likelihoods of texts are computed by engines for cpu: build with --target cpu.")
    else:
        return None
    *containers, name = layer.name.split(".")
    parent = model
    for container in containers:
        if container not in parent._modules:
            parent.add_module(container, nn.Module())
        parent = parent.get_submodule(container)
    if name not in parent._modules:
        if hasattr(parent, name):
            raise CompileError(f"The layer {layer.name} of a head has a name that PyTorch's modules use themselves.")
        parent.add_module(name, module)
    return parent.get_submodule(name)


def pool_tokens(
    mode: Pooling, hidden: Tensor, spec: ModelSpec, step: PackedStep, passed_id: int | None = None
) -> Tensor:
    """One pooling mode over ``hidden`` [T, width]; float32 [B, width]. ``passed_id``: see ``HeadSpec``. The twin of
    ``fused.pool``."""
    rows = _rows(mode, spec, step, passed_id)
    if rows is not None:
        return hidden.index_select(0, rows).float()
    if mode == "max":
        return step.of_sequences(hidden.float(), "max")
    weights = _weights(mode, spec, step)
    total = step.of_sequences(hidden.float() * weights.unsqueeze(1), "sum")
    if mode == "sum":
        return total
    count = step.of_sequences(weights, "sum").unsqueeze(1)
    if spec.unpooled_id is not None:  # there may be no token left
        count = count.clamp(min=1.0)
    return total / (count.sqrt() if mode == "mean_sqrt_len" else count)


def pool_by_triton(
    mode: Pooling, hidden: Tensor, spec: ModelSpec, step: PackedStep, passed_id: int | None = None, *, normalizes: bool
) -> Tensor:
    """``pool_tokens`` by the fused kernel; ``normalizes``: to length 1."""
    from bei_build.torch_graph.fused.pool import pool  # Triton is not always installed

    vectors: Tensor
    rows = _rows(mode, spec, step, passed_id)
    if rows is not None:
        vectors = pool(hidden, rows, None, "row", 0.0, normalizes)
        return vectors
    weights = None if mode == "max" else _weights(mode, spec, step)
    least = 0.0 if spec.unpooled_id is None else 1.0
    kind = "mean" if mode == "weighted_mean" else mode
    vectors = pool(hidden, step["cu_query_lens"], weights, kind, least, normalizes)
    return vectors


def _rows(mode: Pooling, spec: ModelSpec, step: PackedStep, passed_id: int | None) -> Tensor | None:
    """The packed position of each sequence's vector, [B]; None where it combines several tokens."""
    if mode == "last" and passed_id is not None:
        return _last_where(step["input_ids"] != passed_id, step["first_index"], step)
    if mode in ("cls", "last"):
        return step["first_index" if mode == "cls" else "last_index"]
    return _marked(mode, spec.marked_id, step) if mode in _MARKS else None


def _weights(mode: Pooling, spec: ModelSpec, step: PackedStep) -> Tensor:
    """The weight of each token, float32 [T]: 1 or, in "weighted_mean", its rank among the counted ones; 0 where it is
    left out."""
    ids = step["input_ids"]
    weights = step["token_pool_mask"] if not spec.pools_prompt else torch.ones_like(ids, dtype=torch.float32)
    if spec.unpooled_id is not None:
        weights = weights * (ids != spec.unpooled_id)
    if mode != "weighted_mean":
        return weights
    so_far = weights.double().cumsum(0)
    before = (so_far - weights).index_select(0, step.token_index - step["position_ids"])
    return ((so_far - before) * weights).float()


def _marked(mode: Pooling, marked_id: int | None, step: PackedStep) -> Tensor:
    """The packed position of each sequence's marked token, INT64 [B]; of its last (first) token if there is none."""
    ids, index = step["input_ids"], step.token_index
    assert marked_id is not None or mode == "largest_id"
    marked = torch.eq(ids, marked_id or 0)
    if mode == "last_marked":
        return _last_where(marked, step["last_index"], step)
    values = marked.long() if mode == "first_marked" else ids.long()
    largest = step.index_of_sequences(values, "max").index_select(0, step["sequence_ids"])
    return step.index_of_sequences(torch.where(values == largest, index, ids.shape[0]), "min")


def _last_where(wanted: Tensor, otherwise: Tensor, step: PackedStep) -> Tensor:
    """The packed position of each sequence's last ``wanted`` token [T], INT64 [B]; ``otherwise`` [B] without one."""
    latest = step.index_of_sequences(torch.where(wanted, step.token_index, -1), "max")
    return torch.where(latest >= 0, latest, otherwise.long())
