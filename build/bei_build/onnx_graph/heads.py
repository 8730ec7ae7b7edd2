"""From token states to outputs: layers on every token, pooling, layers on the result.

Layers on tokens compute in the graph's type; everything from the pooling on, or from a layer that 16 bits are too
narrow for, in FP32. The pooling modes are those of sentence-transformers' Pooling module, and a sum; several are
concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from bei_build.onnx_graph.activation import emit_activation
from bei_build.onnx_graph.attention_pool import emit_attention_pool
from bei_build.onnx_graph.boundary_scores import emit_boundary_scores
from bei_build.onnx_graph.boundary_states import BoundaryStates
from bei_build.onnx_graph.label_scores import emit_label_scores
from bei_build.onnx_graph.latent_attention import emit_latent_attention
from bei_build.onnx_graph.likelihood import emit_likelihood
from bei_build.onnx_graph.pair_scores import emit_pair_scores
from bei_build.onnx_graph.record_states import emit_record_states
from bei_build.onnx_graph.relation_scores import emit_relation_scores
from bei_build.onnx_graph.span_scores import emit_span_scores
from bei_build.onnx_graph.word_scores import emit_word_scores
from bei_build.onnx_graph.writer import GraphWriter
from bei_build.spec.dtypes import DType, FloatArray
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
from bei_build.spec.parts import ActivationSpec, DenseSpec, LatentAttentionSpec, NormLayerSpec, Pooling


class HeadEmitter:
    """Emits heads over ``hidden`` [T, hidden_size]. ``spec`` gives the tokens that pooling leaves out or looks for.
    ``passed``: the states behind each layer, for heads that read these."""

    def __init__(
        self,
        graph: GraphWriter,
        read: Callable[[str], FloatArray],
        hidden: str,
        spec: ModelSpec,
        passed: Sequence[str] = (),
    ) -> None:
        self._passed = passed
        self._graph = graph
        self._read = read
        self._hidden = hidden
        self._spec = spec
        self._pooled: dict[str, _PoolingEmitter] = {}
        self._boundaries: dict[str, BoundaryStates] = {}

    def emit(self, head: HeadSpec) -> str:
        """Output of a head, FP32 [B, width]; without pooling [T, width]."""
        graph, name = self._graph, head.output
        value, in_fp32 = self._hidden, False
        for index, layer in enumerate(head.token_layers):
            if not in_fp32 and needs_fp32(layer):
                value, in_fp32 = graph.cast(value, DType.FP32, f"{name}.token_layers.{index}.fp32"), True
            if isinstance(layer, LabelScoresSpec):
                text = self._pooled.setdefault(value, _PoolingEmitter(graph, value, self._spec)).emit(
                    layer.pooling, None
                )
                value = emit_label_scores(graph, self._read, value, text, layer, f"{name}.token_layers.{index}")
                continue
            if isinstance(layer, JoinRowsSpec | MeanRowsSpec | DivideRowsSpec | JoinStatesSpec):
                value = self._regrouped(head.token_layers[: index + 1], value, f"{name}.token_layers.{index}")
                continue
            value = self._layer(layer, value, f"{name}.token_layers.{index}", in_fp32=in_fp32)
        if head.attention_pool:
            value = emit_attention_pool(graph, self._read, value, head.attention_pool, f"{name}.attention_pool")
        elif head.pooling:
            pooling = self._pooled.setdefault(value, _PoolingEmitter(graph, value, self._spec))
            parts = [pooling.emit(mode, head.passed_id) for mode in head.pooling]
            value = parts[0] if len(parts) == 1 else graph.op("Concat", parts, f"{name}.pooled", axis=1)
        else:
            value = graph.cast(value, DType.FP32, f"{name}.fp32")
        for index, layer in enumerate(head.layers):
            value = self._layer(layer, value, f"{name}.layers.{index}", in_fp32=True)
        return value

    def _regrouped(self, layers: tuple[HeadLayer, ...], value: str, name: str) -> str:
        """``value`` with other rows, or further columns, as the last of ``layers`` has it."""
        graph, last = self._graph, layers[-1]
        if isinstance(last, MeanRowsSpec):
            return self._means(value, last.count, name)
        if not isinstance(last, JoinStatesSpec):
            return self._reshaped(layers, value, name)
        columns = [value]
        for place, own in last.taps:
            state = self._passed[place]
            for index, layer in enumerate(own):
                part = f"{name}.{place}.{index}"
                if isinstance(layer, JoinRowsSpec | DivideRowsSpec | JoinStatesSpec):
                    state = self._regrouped(own[: index + 1], state, part)
                else:
                    state = self._layer(layer, state, part, in_fp32=False)
            columns.append(state)
        return graph.op("Concat", columns, name, axis=1)

    def _reshaped(self, layers: tuple[HeadLayer, ...], value: str, name: str) -> str:
        """The rows of ``value`` joined, or divided, by the last of ``layers``."""
        graph, last = self._graph, layers[-1]
        entering, width = (
            HeadSpec("image_features", token_layers=part).dimension(self._spec.hidden_size)
            for part in (layers[:-1], layers)
        )
        if isinstance(last, DivideRowsSpec) and (missing := width * last.count - entering):
            value = graph.op("Pad", [value, graph.constant([0, 0, 0, missing])], f"{name}.filled")
        rows = graph.op("Reshape", [value, graph.constant([-1, width])], name)
        if not any(isinstance(layer, MeanRowsSpec) for layer in layers):
            return rows
        count = graph.op("Shape", [self._hidden], f"{name}.count", end=1)
        return graph.op("Slice", [rows, graph.constant([0]), count, graph.constant([0])], f"{name}.of_tokens")

    def _means(self, value: str, count: int, name: str) -> str:
        """Means of ``count`` rows each; of the last group, with zeros where it is not whole."""
        graph = self._graph
        filled = graph.op("Pad", [value, graph.constant([0, 0, count - 1, 0])], f"{name}.filled")
        size, step = graph.op("Shape", [filled], f"{name}.size", end=1), graph.constant([count])
        end = graph.op("Mul", [graph.op("Div", [size, step], f"{name}.num_groups"), step], f"{name}.end")
        whole = graph.op("Slice", [filled, graph.constant([0]), end, graph.constant([0])], f"{name}.whole")
        groups = graph.op("Reshape", [whole, graph.constant([-1, count, self._spec.hidden_size])], f"{name}.groups")
        wide = graph.cast(groups, DType.FP32, f"{name}.fp32")
        means = graph.op("ReduceMean", [wide, graph.constant([1])], f"{name}.means", keepdims=0)
        return graph.cast(means, graph.types.compute, name)

    def _layer(self, layer: HeadLayer, value: str, name: str, *, in_fp32: bool) -> str:
        graph = self._graph
        vector = graph.fp32 if in_fp32 else graph.vector
        if isinstance(layer, DenseSpec) and layer.factors:
            # Not as a matrix product: OpenVINO would compute it in BF16 if allowed, too coarse for the difference of
            # two scores near their cap.
            factors = vector(f"{name}.weight", self._read(f"{layer.name}.weight"))
            products = graph.op("Mul", [value, factors], f"{name}.products")
            return graph.op("ReduceSum", [products, graph.constant([1])], name, keepdims=1)
        if isinstance(layer, DenseSpec):
            linear = graph.linear_fp32 if in_fp32 else graph.linear
            bias = self._read(f"{layer.name}.bias") if layer.bias else None
            product = linear(name, value, self._read(f"{layer.name}.weight"), bias)
            result = emit_activation(graph, product, layer.activation, f"{name}.act", in_fp32=in_fp32)
            if not layer.residual:
                return result
            if layer.projects_residual:
                value = linear(f"{name}.residual", value, self._read(f"{layer.name}.residual.weight"))
            return graph.op("Add", [result, value], f"{name}.sum")
        if isinstance(layer, NormLayerSpec):
            has_weight = layer.norm.weight
            weight = self._read(f"{layer.name}.weight") if has_weight else np.ones(layer.width, np.float32)
            inputs = [value, vector(f"{name}.weight", weight + np.float32(layer.norm.offset))]
            if layer.norm.kind == "rms":
                return graph.op("RMSNormalization", inputs, name, axis=-1, epsilon=layer.norm.eps)
            if layer.norm.bias:
                inputs.append(vector(f"{name}.bias", self._read(f"{layer.name}.bias")))
            return graph.op("LayerNormalization", inputs, name, axis=-1, epsilon=layer.norm.eps)
        if isinstance(layer, ActivationSpec):
            return emit_activation(graph, value, layer.activation, name, in_fp32=in_fp32)
        if isinstance(layer, ScaledTanhSpec):
            alpha, beta, offset = (
                vector(f"{name}.{part}", self._read(f"{layer.name}.{part}")) for part in ("alpha", "beta", "bias")
            )
            inner = graph.op("Add", [graph.op("Mul", [value, alpha], f"{name}.scaled"), offset], f"{name}.inner")
            return graph.op("Mul", [graph.op("Tanh", [inner], f"{name}.tanh"), beta], name)
        if isinstance(layer, LatentAttentionSpec):
            assert not in_fp32  # it is the first layer on tokens
            return emit_latent_attention(graph, self._read, value, layer, name)
        if isinstance(layer, LikelihoodSpec):
            return emit_likelihood(graph, self._read, value, layer, name)
        if isinstance(layer, SpanScoresSpec):
            return emit_span_scores(graph, self._read, value, layer, name)
        if isinstance(layer, WordScoresSpec):
            return emit_word_scores(graph, self._read, value, layer, name)
        if isinstance(layer, RelationScoresSpec):
            return emit_relation_scores(graph, self._read, value, layer, name)
        if isinstance(layer, BoundaryScoresSpec):
            return emit_boundary_scores(self._boundary_states(layer, value, name), layer)
        if isinstance(layer, RecordStatesSpec):
            states = self._boundary_states(layer.boundaries, value, name)
            return emit_record_states(states, self._read, value, layer, name)
        if isinstance(layer, SpanPairScoresSpec):
            return emit_pair_scores(graph, self._read, value, layer, name)
        norm = graph.op("ReduceL2", [value, graph.constant([1])], f"{name}.norm", keepdims=1)
        floor = graph.constant(1e-12, np.float32)  # the eps of torch.nn.functional.normalize
        return graph.op("Div", [value, graph.op("Max", [norm, floor], f"{name}.floor")], name)

    def _boundary_states(self, layer: BoundaryScoresSpec, value: str, name: str) -> BoundaryStates:
        """The states of ``layer``, which several heads read."""
        if layer.name not in self._boundaries:
            self._boundaries[layer.name] = BoundaryStates(self._graph, self._read, value, layer, name)
        return self._boundaries[layer.name]


class _PoolingEmitter:
    """Emits pooling modes; the padded view and its token counts are shared."""

    def __init__(self, graph: GraphWriter, hidden: str, spec: ModelSpec) -> None:
        self._graph = graph
        self._hidden = hidden
        self._unpooled_id = spec.unpooled_id
        self._mask = "slot_mask" if spec.pools_prompt else "pool_mask"
        self._marked_id = spec.marked_id
        self._prefix = f"pooling.{hidden}"
        self._shared: dict[str, str] = {}

    def emit(self, mode: Pooling, passed_id: int | None) -> str:
        """One mode; FP32 [B, width]. Emitted once, even if several heads use it. ``passed_id``: see ``HeadSpec``."""
        key = mode if passed_id is None else f"{mode}.but.{passed_id}"
        if key not in self._shared:
            self._shared[key] = self._emit(mode, passed_id, f"{self._prefix}.{key}")
        return self._shared[key]

    def _emit(self, mode: Pooling, passed_id: int | None, name: str) -> str:
        if mode == "last" and passed_id is not None:
            return self._token(self._last_but(passed_id, name), name)
        if mode in ("cls", "last"):
            index = self._graph.input("first_index" if mode == "cls" else "last_index", DType.INT32, ["B"])
            return self._token(index, name)
        if mode == "last_marked":
            return self._token(self._last_marked(name), name)
        if mode in ("first_marked", "largest_id"):
            return self._token(self._first_of_largest(mode, name), name)
        if mode == "max":
            return self._max(name)
        return self._weighted_sum(mode, name)

    def _last_marked(self, name: str) -> str:
        """The packed position of each sequence's last token ``marked_id``; of its last token, if there is none."""
        assert self._marked_id is not None
        marked = self._are(self._marked_id, f"{name}.marked")
        return self._last_where(marked, "last_index", name)

    def _last_but(self, token_id: int, name: str) -> str:
        """The packed position of each sequence's last token that is not ``token_id``; of its first, if all are."""
        others = self._graph.op("Not", [self._are(token_id, f"{name}.passed")], f"{name}.others")
        return self._last_where(others, "first_index", name)

    def _last_where(self, wanted: str, otherwise: str, name: str) -> str:
        graph = self._graph
        pad_index = graph.input("pad_index", DType.INT32, ["B", "S"])
        # The position of every wanted slot, -1 for others. Slots after the end repeat the last token's.
        found = graph.op("Where", [wanted, pad_index, graph.constant(-1, np.int32)], f"{name}.found")
        latest = graph.op("ReduceMax", [found, graph.constant([1])], f"{name}.latest", keepdims=0)
        is_there = graph.op("GreaterOrEqual", [latest, graph.constant(0, np.int32)], f"{name}.is_there")
        return graph.op("Where", [is_there, latest, graph.input(otherwise, DType.INT32, ["B"])], f"{name}.index")

    def _are(self, token_id: int, name: str) -> str:
        """True for slots that hold ``token_id``, BOOL [B, S]."""
        return self._graph.op("Equal", [self._ids(), self._graph.constant(token_id, np.int32)], name)

    def _first_of_largest(self, mode: Pooling, name: str) -> str:
        """The packed position of each sequence's first token with the largest id. With ``marked_id``, tokens of that id
        count as 1 and others as 0, which gives the first marked one (the first token if there is none). Slots after the
        end repeat the last token's."""
        graph, values = self._graph, self._ids()
        if mode == "first_marked":
            assert self._marked_id is not None
            values = graph.cast(self._are(self._marked_id, f"{name}.marked"), DType.INT32, f"{name}.values")
        largest = graph.op("ReduceMax", [values, graph.constant([1])], f"{name}.largest", keepdims=1)
        is_largest = graph.op("Equal", [values, largest], f"{name}.is_largest")
        pad_index = graph.input("pad_index", DType.INT32, ["B", "S"])
        # OpenVINO computes this in FP32, which would change numbers that FP32 cannot hold.
        places = [is_largest, pad_index, graph.constant(2**24, np.int32)]
        found = graph.op("Where", places, f"{name}.found")
        return graph.op("ReduceMin", [found, graph.constant([1])], f"{name}.index", keepdims=0)

    def _token(self, index: str, name: str) -> str:
        rows = self._graph.op("Gather", [self._hidden, index], f"{name}.rows", axis=0)
        return self._graph.cast(rows, DType.FP32, name)

    def _max(self, name: str) -> str:
        """Slots after a sequence's end repeat its last token (``bei.engine.packing``): the maximum needs no mask."""
        largest = self._graph.op("ReduceMax", [self._rows(), self._graph.constant([1])], f"{name}.largest", keepdims=0)
        return self._graph.cast(largest, DType.FP32, name)

    def _weighted_sum(self, mode: Pooling, name: str) -> str:
        """sum; mean: sum / n; mean_sqrt_len: sum / sqrt(n); weighted_mean: sum of (1 + position) x / sum of weights."""
        graph = self._graph
        weights = self._mask_3d()
        if mode == "weighted_mean":
            ranks = graph.op("CumSum", [weights, graph.constant(1)], f"{name}.ranks")
            weights = graph.op("Mul", [ranks, weights], f"{name}.weights")
        product = graph.op("Mul", [self._view(), weights], f"{name}.product")
        total = graph.op("ReduceSum", [product, graph.constant([1])], f"{name}.sum", keepdims=0)
        if mode == "sum":
            return total
        count = graph.op("ReduceSum", [weights, graph.constant([1])], f"{name}.count", keepdims=0)
        if self._unpooled_id is not None:  # there may be no token left
            count = graph.op("Max", [count, graph.constant(1.0, np.float32)], f"{name}.least")
        if mode == "mean_sqrt_len":
            count = graph.op("Sqrt", [count], f"{name}.sqrt")
        return graph.op("Div", [total, count], name)

    def _view(self) -> str:
        """Padded token states, FP32 [B, S, width]; slots after a sequence's end are not zero."""
        if "view" not in self._shared:
            self._shared["view"] = self._graph.cast(self._rows(), DType.FP32, f"{self._prefix}.view")
        return self._shared["view"]

    def _rows(self) -> str:
        """The padded view in the graph's type."""
        if "rows" not in self._shared:
            index = self._graph.input("pad_index", DType.INT32, ["B", "S"])
            self._shared["rows"] = self._graph.op("Gather", [self._hidden, index], f"{self._prefix}.rows", axis=0)
        return self._shared["rows"]

    def _mask_3d(self) -> str:
        if "mask" not in self._shared:
            graph = self._graph
            slot_mask = graph.input(self._mask, DType.FP32, ["B", "S"])
            if self._unpooled_id is not None:
                slot_mask = graph.op("Mul", [slot_mask, self._all_but(self._unpooled_id)], f"{self._prefix}.pooled")
            mask = graph.op("Unsqueeze", [slot_mask, graph.constant([2])], f"{self._prefix}.mask")
            self._shared["mask"] = mask
        return self._shared["mask"]

    def _all_but(self, token_id: int) -> str:
        """0 where a slot holds ``token_id``, else 1; FP32 [B, S]."""
        graph, name = self._graph, f"{self._prefix}.all_but"
        left_out = self._are(token_id, f"{name}.left_out")
        return graph.cast(graph.op("Not", [left_out], f"{name}.bool"), DType.FP32, name)

    def _ids(self) -> str:
        """The token ids of the padded view, INT32 [B, S]."""
        if "ids" not in self._shared:
            graph = self._graph
            indices = [graph.input("input_ids", DType.INT32, ["T"]), graph.input("pad_index", DType.INT32, ["B", "S"])]
            self._shared["ids"] = graph.op("Gather", indices, f"{self._prefix}.ids", axis=0)
        return self._shared["ids"]
