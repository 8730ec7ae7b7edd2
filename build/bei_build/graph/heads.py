"""From token states to one vector a sequence, in FP32: pooling modes, then the tail.

The modes are those of sentence-transformers' Pooling module; several are concatenated in its order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bei_build.graph.activation import emit_activation
from bei_build.graph.writer import DType, FloatArray, GraphWriter
from bei_build.spec import DenseSpec, ModelSpec, Pooling

_EMPTY = -3e38  # what max pooling sees in an empty slot: below any state, finite in FP32 and BF16


def emit_embedding_head(graph: GraphWriter, read: Callable[[str], FloatArray], spec: ModelSpec, hidden: str) -> str:
    """Pool ``hidden`` [T, hidden] and apply the tail; FP32 [B, ``spec.embedding_dimension``]."""
    pooling = _PoolingEmitter(graph, hidden)
    parts = [pooling.emit(mode) for mode in spec.pooling]
    vector = parts[0] if len(parts) == 1 else graph.op("Concat", parts, "pooling.all", axis=1)
    for index, layer in enumerate(spec.tail):
        name = f"tail.{index}"
        if isinstance(layer, DenseSpec):
            vector = _emit_dense(graph, read, layer, vector, name)
        else:
            norm = graph.op("ReduceL2", [vector, graph.constant([1])], f"{name}.norm", keepdims=1)
            floor = graph.constant(1e-12, np.float32)  # torch.nn.functional.normalize's eps
            vector = graph.op("Div", [vector, graph.op("Max", [norm, floor], f"{name}.floor")], name)
    return vector


def _emit_dense(graph: GraphWriter, read: Callable[[str], FloatArray], layer: DenseSpec, value: str, name: str) -> str:
    matrix = graph.fp32(f"{name}.weight", read(f"{name}.weight"))
    bias = graph.fp32(f"{name}.bias", read(f"{name}.bias")) if layer.bias else None
    return emit_activation(graph, graph.linear(value, matrix, bias, name), layer.activation, f"{name}.act")


class _PoolingEmitter:
    """Shares the padded view and its token counts between modes."""

    def __init__(self, graph: GraphWriter, hidden: str) -> None:
        self._graph = graph
        self._hidden = hidden
        self._shared: dict[str, str] = {}

    def emit(self, mode: Pooling) -> str:
        """One mode; FP32 [B, hidden]."""
        name = f"pooling.{mode}"
        if mode in ("cls", "last"):
            return self._token("first_index" if mode == "cls" else "last_index", name)
        if mode == "max":
            return self._max(name)
        return self._weighted_sum(mode, name)

    def _token(self, index_name: str, name: str) -> str:
        index = self._graph.input(index_name, DType.INT32, ["B"])
        rows = self._graph.op("Gather", [self._hidden, index], f"{name}.rows", axis=0)
        return self._graph.cast(rows, DType.FP32, name)

    def _max(self, name: str) -> str:
        graph = self._graph
        full = graph.op("Greater", [self._mask_3d(), graph.constant(0.0, np.float32)], f"{name}.full")
        empty = graph.constant(_EMPTY, np.float32)
        states = graph.op("Where", [full, self._view(), empty], f"{name}.states")
        return graph.op("ReduceMax", [states, graph.constant([1])], name, keepdims=0)

    def _weighted_sum(self, mode: Pooling, name: str) -> str:
        """mean: sum / n; mean_sqrt_len: sum / sqrt(n); weighted_mean: sum of (1 + position) x / sum of weights."""
        graph = self._graph
        weights = self._mask_3d()
        if mode == "weighted_mean":
            ranks = graph.op("CumSum", [weights, graph.constant(1)], f"{name}.ranks")
            weights = graph.op("Mul", [ranks, weights], f"{name}.weights")
        product = graph.op("Mul", [self._view(), weights], f"{name}.product")
        total = graph.op("ReduceSum", [product, graph.constant([1])], f"{name}.sum", keepdims=0)
        count = graph.op("ReduceSum", [weights, graph.constant([1])], f"{name}.count", keepdims=0)
        if mode == "mean_sqrt_len":
            count = graph.op("Sqrt", [count], f"{name}.sqrt")
        return graph.op("Div", [total, count], name)

    def _view(self) -> str:
        """Padded token states, FP32 [B, S, hidden]; slots behind a sequence's end are not zero."""
        if "view" not in self._shared:
            graph = self._graph
            rows = graph.op(
                "Gather", [self._hidden, graph.input("pad_index", DType.INT32, ["B", "S"])], "pooling.rows", axis=0
            )
            self._shared["view"] = graph.cast(rows, DType.FP32, "pooling.view")
        return self._shared["view"]

    def _mask_3d(self) -> str:
        if "mask" not in self._shared:
            graph = self._graph
            slot_mask = graph.input("slot_mask", DType.FP32, ["B", "S"])
            mask = graph.op("Unsqueeze", [slot_mask, graph.constant([2])], "pooling.mask")
            self._shared["mask"] = mask
        return self._shared["mask"]
