"""Mixtures of experts: the router, and the experts in one of two ways (docs/decisions.md has the figures).

On the tokens that chose it: each expert gathers them, and adds its rows to theirs. Each token occurs once per expert,
so no sum depends on the order. Their number is known only at run time; where shapes must not depend on values, every
expert computes all tokens, and its results for tokens that did not choose it are multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bei_build.onnx_graph.activation import emit_activation
from bei_build.onnx_graph.writer import GraphWriter
from bei_build.spec.dtypes import DType, FloatArray
from bei_build.spec.parts import Activation, ExpertsSpec, MLPSpec


class ExpertsEmitter:
    """Emits the experts of all layers; ``read`` gives a weight by its name."""

    def __init__(self, graph: GraphWriter, read: Callable[[str], FloatArray], *, on_all_tokens: bool) -> None:
        self._graph = graph
        self._read = read
        self._on_all_tokens = on_all_tokens

    def emit(self, value: str, mlp: MLPSpec, spec: ExpertsSpec, name: str) -> str:
        """The experts ``spec`` of ``mlp`` on ``value`` [T, hidden]."""
        graph = self._graph
        shares = graph.split(self._shares(value, spec, f"{name}.router"), [1] * spec.count, f"{name}.shares", axis=1)
        ups, downs = (np.split(self._read(f"{name}.experts.{role}.weight"), spec.count) for role in ("up", "down"))
        total = self._bias_of_all(value, mlp, name)
        for index, (share, up, down) in enumerate(zip(shares, ups, downs, strict=True)):
            expert = f"{name}.experts.{index}"
            if self._on_all_tokens:
                output = self._expert(value, share, up, down, mlp.activation, expert)
                total = graph.op("Add", [total, output], f"{expert}.added")
            else:
                tokens = self._tokens_of(share, expert)
                rows = graph.op("Gather", [value, tokens], f"{expert}.rows", axis=0)
                share = graph.op("Gather", [share, tokens], f"{expert}.share", axis=0)
                output = self._expert(rows, share, up, down, mlp.activation, expert)
                places = graph.op("Unsqueeze", [tokens, graph.constant([1])], f"{expert}.places")
                total = graph.op("ScatterND", [total, places, output], f"{expert}.added", reduction="add")
        return total

    def _shares(self, value: str, spec: ExpertsSpec, name: str) -> str:
        """Each expert's share for each token, [T, count]: zero where it was not chosen. FP32 in the graph: OpenVINO
        computes it in BF16 all the same, where it computes in BF16 (docs/decisions.md).

        The best are chosen by scores, because the softmax would only add rounding.
        """
        graph = self._graph
        states = graph.cast(value, DType.FP32, f"{name}.states")
        scores = graph.linear_fp32(name, states, self._read(f"{name}.weight"))
        best = graph.top_k(scores, spec.top_k, f"{name}.best")
        column = graph.op("Unsqueeze", [best, graph.constant([2])], f"{name}.column")
        is_it = graph.op("Equal", [column, graph.constant(np.arange(spec.count))], f"{name}.is_it")
        counts = graph.cast(is_it, DType.FP32, f"{name}.counts")
        chosen = graph.op("ReduceSum", [counts, graph.constant([1])], f"{name}.chosen", keepdims=0)
        shares = graph.op("Mul", [graph.op("Softmax", [scores], f"{name}.softmax", axis=-1), chosen], f"{name}.shares")
        if spec.normalized:
            total = graph.op("ReduceSum", [shares, graph.constant([1])], f"{name}.sum", keepdims=1)
            shares = graph.op("Div", [shares, total], f"{name}.normalized")
        return graph.cast(shares, graph.types.compute, f"{name}.cast")

    def _bias_of_all(self, value: str, mlp: MLPSpec, name: str) -> str:
        """The one bias of all experts (or zero) for each token, [T, hidden], to which their outputs are added."""
        graph = self._graph
        if mlp.down_bias:
            bias = graph.vector(f"{name}.experts.bias", self._read(f"{name}.experts.bias"))
        else:
            bias = graph.constant(0.0, graph.types.compute.numpy)
        return graph.op("Expand", [bias, graph.op("Shape", [value], f"{name}.shape")], f"{name}.experts.biases")

    def _tokens_of(self, share: str, expert: str) -> str:
        """The indices of the tokens whose ``share`` [T, 1] is not zero, INT64 [n]."""
        graph = self._graph
        flat = graph.op("Squeeze", [share, graph.constant([1])], f"{expert}.share_of_token")
        found = graph.op("NonZero", [flat], f"{expert}.found")
        return graph.op("Squeeze", [found, graph.constant([0])], f"{expert}.tokens")

    def _expert(
        self, rows: str, share: str, up: FloatArray, down: FloatArray, activation: Activation, name: str
    ) -> str:
        """One expert on ``rows`` [n, hidden], times ``share`` [n, 1]."""
        graph = self._graph
        inner = graph.linear(f"{name}.up", rows, up)
        inner = emit_activation(graph, inner, activation, f"{name}.act")
        output = graph.linear(f"{name}.down", inner, np.ascontiguousarray(down.T))
        return graph.op("Mul", [output, share], name)
