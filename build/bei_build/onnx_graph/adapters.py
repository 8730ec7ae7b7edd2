"""Low-rank terms of linear layers and tables: a product with all adapters' factors, masked but for the token's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from bei_build.onnx_graph.writer import GraphWriter
from bei_build.spec.adapters import A, AdaptersSpec, B, owners
from bei_build.spec.dtypes import DType, FloatArray


class AdapterEmitter:
    """Emits the terms of ``spec``; without one, nothing. ``read`` gives a weight by its name, ``read_as`` the name of
    the weight that a layer reads as its own."""

    def __init__(
        self,
        graph: GraphWriter,
        read: Callable[[str], FloatArray],
        spec: AdaptersSpec | None,
        read_as: Callable[[str], str],
    ) -> None:
        self._graph = graph
        self._read = read
        self._by_layer = spec.by_layer if spec else {}
        self._read_as = read_as
        self._masks: dict[tuple[int, ...], str] = {}

    def adapts(self, layer: str) -> bool:
        """True if ``layer`` has a term."""
        return bool(self._ranks(layer))

    def added(
        self,
        products: Sequence[str],
        value: str,
        layers: Sequence[str],
        in_order: Callable[[FloatArray, str], FloatArray] = lambda rows, _: rows,
    ) -> list[str]:
        """``products`` [T, out] of ``value`` [T, in] with the matrix of each of ``layers``, plus their terms.
        ``in_order``: rows of a layer's matrix as the product has them."""
        found = [layer for layer in layers if self._ranks(layer)]
        if not found:
            return [*products]
        graph, name = self._graph, f"{found[0]}.{A}"
        # Layers with one input share the product with their first factors.
        of_each = [owners(self._ranks(layer)) for layer in found]
        small = graph.linear(name, value, np.concatenate([self._read(f"{layer}.{A}") for layer in found]))
        own = self._own(small, np.concatenate(of_each), f"{name}.own")
        sizes = [len(of_rows) for of_rows in of_each]
        parts = graph.split(own, sizes, f"{name}.split", axis=1) if len(sizes) > 1 else [own]
        terms = {
            layer: graph.linear(f"{layer}.{B}", part, in_order(self._read(f"{layer}.{B}"), layer))
            for layer, part in zip(found, parts, strict=True)
        }
        return [
            graph.op("Add", [product, terms[layer]], f"{layer}.adapted") if layer in terms else product
            for product, layer in zip(products, layers, strict=True)
        ]

    def looked_up(self, rows: str, indices: str, layer: str) -> str:
        """``rows`` [T, width] of the table of ``layer`` at ``indices``, plus their terms."""
        ranks = self._ranks(layer)
        if not ranks:
            return rows
        graph, name = self._graph, f"{layer}.{A}"
        small = graph.lookup(graph.table(name, self._read(name)), indices, f"{name}.rows")
        term = graph.linear(f"{layer}.{B}", self._own(small, owners(ranks), f"{name}.own"), self._read(f"{layer}.{B}"))
        return graph.op("Add", [rows, term], f"{layer}.adapted")

    def _ranks(self, layer: str) -> tuple[int, ...]:
        return self._by_layer.get(self._read_as(f"{layer}.weight").removesuffix(".weight"), ())

    def _own(self, small: str, owned_by: npt.NDArray[np.int32], name: str) -> str:
        """``small`` [T, R] with zeros in all columns but those of the token's own adapter. Others may have overflowed,
        so they are replaced, not multiplied by 0."""
        graph, key = self._graph, tuple(owned_by.tolist())
        if key not in self._masks:
            mask = f"adapters.mask.{len(self._masks)}"
            ids = graph.input("token_adapters", DType.INT32, ["T"])
            column = graph.op("Unsqueeze", [ids, graph.constant([1])], f"{mask}.ids")
            self._masks[key] = graph.op("Equal", [column, graph.constant(owned_by, np.int32)], mask)
        nothing = graph.constant(0.0, graph.types.compute.numpy)
        return graph.op("Where", [self._masks[key], small, nothing], name)
