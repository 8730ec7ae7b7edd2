"""Convolutions over the tokens of a sequence. All sequences lie end to end, so each token's neighbours are gathered."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bei_build.onnx_graph.writer import GraphWriter
from bei_build.spec.dtypes import DType, FloatArray
from bei_build.spec.parts import ConvolutionSpec
from bei_build.spec.short_convolution import ShortConvolutionSpec

# A linear layer on a value by its name, with a bias or not.
Linear = Callable[[str, str, bool], str]


class ConvolutionEmitter:
    """Emits convolutions; ``read`` gives a weight by its name. The places of neighbours are emitted once per graph."""

    def __init__(self, graph: GraphWriter, read: Callable[[str], FloatArray], *, partial_keys: bool) -> None:
        self._graph = graph
        self._read = read
        self._partial_keys = partial_keys
        self._places: dict[int, tuple[str, str]] = {}

    def product(self, rows: str, spec: ConvolutionSpec, name: str) -> str:
        """The convolution of all channels of ``rows`` [T, hidden], as a product with the neighbours side by side."""
        reach = spec.kernel_size // 2
        parts = [self._neighbour(rows, offset, f"{name}.neighbour") for offset in range(-reach, reach + 1)]
        beside = self._graph.op("Concat", parts, f"{name}.beside", axis=1)
        weight = self._read(f"{name}.weight")  # [out, in, neighbour]
        matrix = weight.transpose(0, 2, 1).reshape(weight.shape[0], -1)
        return self._graph.linear(name, beside, matrix, self._read(f"{name}.bias"))

    def short(self, value: str, spec: ShortConvolutionSpec, linear: Linear, name: str) -> str:
        """``output(c * conv(b * x))`` of ``value`` [T, hidden]."""
        graph = self._graph
        if spec.drops_unattended and self._partial_keys:
            value = self._of_keys(value, name)
        joined = linear(value, f"{name}.input", spec.bias)
        width = len(self._read(f"{name}.kernel.weight"))
        gate, factor, inner = graph.split(joined, [width] * 3, f"{name}.split", axis=1)
        gated = graph.op("Mul", [gate, inner], f"{name}.gated")
        product = graph.op("Mul", [factor, self._by_channel(gated, spec, f"{name}.kernel")], f"{name}.product")
        return linear(product, f"{name}.output", spec.bias)

    def _by_channel(self, rows: str, spec: ShortConvolutionSpec, name: str) -> str:
        """Each channel of ``rows`` [T, hidden] times the kernel's factors, added in their order."""
        graph, factors = self._graph, self._read(f"{name}.weight")[:, 0]
        total = ""
        for index, offset in enumerate(spec.offsets):
            factor = graph.vector(f"{name}.{index}.weight", np.ascontiguousarray(factors[:, index]))
            term = graph.op("Mul", [self._neighbour(rows, offset, name), factor], f"{name}.{index}.term")
            total = graph.op("Add", [total, term], f"{name}.{index}.sum") if total else term
        if not spec.bias:
            return total
        return graph.op("Add", [total, graph.vector(f"{name}.bias", self._read(f"{name}.bias"))], f"{name}.biased")

    def _of_keys(self, value: str, name: str) -> str:
        """``value`` with zeros for tokens that are not attention keys."""
        graph = self._graph
        lengths = graph.input("token_key_lens", DType.INT32, ["T"])
        is_key = graph.op("Less", [self._position_ids(), lengths], f"{name}.is_key")
        return self._where(is_key, value, f"{name}.of_keys")

    def _neighbour(self, rows: str, offset: int, name: str) -> str:
        """For each token the row of the token ``offset`` later, zeros where its sequence has none."""
        if offset == 0:
            return rows
        places, is_there = self._places.get(offset) or self._emit_places(offset)
        moved = self._graph.op("Gather", [rows, places], f"{name}.{offset}.rows", axis=0)
        return self._where(is_there, moved, f"{name}.{offset}")

    def _emit_places(self, offset: int) -> tuple[str, str]:
        """For each token the place of the token ``offset`` later in its sequence, and if there is one, both [T].

        Places are looked up by slots, because a token that sequences share lies elsewhere.
        """
        graph, name = self._graph, f"neighbours.{offset}"
        position = graph.op("Add", [self._position_ids(), graph.constant(offset, np.int32)], f"{name}.position")
        if offset > 0:
            lengths = graph.input("token_seq_lens", DType.INT32, ["T"])
            is_there = graph.op("Less", [position, lengths], f"{name}.is_there")
        else:
            is_there = graph.op("GreaterOrEqual", [position, graph.constant(0, np.int32)], f"{name}.is_there")
        slots = graph.input("unpad_index", DType.INT32, ["T"])
        moved = graph.op("Add", [slots, graph.constant(offset, np.int32)], f"{name}.moved")
        # Any slot will do where there is no neighbour.
        slot = graph.op("Where", [is_there, moved, slots], f"{name}.slot")
        by_slot = graph.input("pad_index", DType.INT32, ["B", "S"])
        flat = graph.op("Reshape", [by_slot, graph.constant([-1])], f"{name}.by_slot")
        self._places[offset] = graph.op("Gather", [flat, slot], f"{name}.places"), is_there
        return self._places[offset]

    def _where(self, condition: str, rows: str, name: str) -> str:
        """``rows`` [T, any] with zeros where ``condition`` [T] is false."""
        graph = self._graph
        column = graph.op("Unsqueeze", [condition, graph.constant([1])], f"{name}.column")
        return graph.op("Where", [column, rows, graph.constant(0.0, graph.types.compute.numpy)], f"{name}.there")

    def _position_ids(self) -> str:
        return self._graph.input("position_ids", DType.INT32, ["T"])
