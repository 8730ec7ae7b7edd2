"""The linear layers of a spec that may be quantized: those of its transformer layers.

Embeddings, norms, routers, kernels of convolutions, heads, pooling and softmax keep their precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import LayerSpec, MLPSpec


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer called ``name`` in the graph.

    ``weights``: names in the spec of the matrices that are stacked by rows in it; ``parts``: their names in this layer,
    which differ where layers share weights (``ModelSpec.weights_of``).

    ``group``: layers of one group read the same input and share its scale. The matrix of an expert is part
    ``expert[0]`` of ``expert[1]`` of the named weight, ``transposed`` where it is stored as [in, out].
    """

    name: str
    group: str
    weights: tuple[str, ...]
    expert: tuple[int, int] | None = None
    transposed: bool = False
    parts: tuple[str, ...] = ()

    def matrix(self, read: Callable[[str], npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
        """The matrix [out, in], rows as they are stored: without the score scale that the graph folds into queries."""
        matrix = np.concatenate([read(name) for name in self.weights])
        if self.expert is not None:
            index, count = self.expert
            matrix = np.split(matrix, count)[index]
        return np.ascontiguousarray(matrix.T) if self.transposed else matrix


def linear_layers(spec: ModelSpec) -> tuple[LinearLayer, ...]:
    """All quantizable layers in the order in which they run. Layers may share weights (``ModelSpec.weights_of``)."""
    found = [layer for index, one in enumerate(spec.layers) for layer in _layer_products(one, f"layers.{index}")]
    for index, one in enumerate(spec.decoder.layers if spec.decoder else ()):
        found += _layer_products(one, f"decoder.layers.{index}")
    return tuple(replace(one, parts=one.weights, weights=tuple(map(spec.weight_read_as, one.weights))) for one in found)


def is_projection(layer: LinearLayer) -> bool:
    """True if ``layer`` computes queries, keys or values."""
    return layer.name.rpartition(".")[2] in ("qkv", "q", "kv")


def _layer_products(spec: LayerSpec, name: str) -> Iterator[LinearLayer]:
    if spec.attention:
        yield from _attention_products(f"{name}.attention", (("query", "key", "value"),))
    if spec.convolution:
        for layer in (f"{name}.convolution.input", f"{name}.convolution.output"):
            yield LinearLayer(layer, layer, (f"{layer}.weight",))
    if spec.cross_attention:
        yield from _attention_products(f"{name}.cross_attention", (("query",), ("key", "value")))
    yield from _mlp_products(spec.mlp, f"{name}.mlp")
    if spec.layer_input:
        for layer in (f"{name}.layer_input.gate", f"{name}.layer_input.output"):
            yield LinearLayer(layer, layer, (f"{layer}.weight",))


def _attention_products(attention: str, products: tuple[tuple[str, ...], ...]) -> Iterator[LinearLayer]:
    for roles in products:
        name = f"{attention}.{''.join(role[0] for role in roles)}"
        yield LinearLayer(name, name, tuple(f"{attention}.{role}.weight" for role in roles))
    yield LinearLayer(f"{attention}.output", f"{attention}.output", (f"{attention}.output.weight",))


def _mlp_products(spec: MLPSpec, mlp: str) -> Iterator[LinearLayer]:
    if spec.experts:
        for index in range(spec.experts.count):
            up, down = (f"{mlp}.experts.{index}.{role}" for role in ("up", "down"))
            expert = index, spec.experts.count
            yield LinearLayer(up, f"{mlp}.experts.up", (f"{mlp}.experts.up.weight",), expert)
            yield LinearLayer(down, down, (f"{mlp}.experts.down.weight",), expert, transposed=True)
        return
    for role in ("up", "gate") if spec.gated else ("up",):
        yield LinearLayer(f"{mlp}.{role}", f"{mlp}.up", (f"{mlp}.{role}.weight",))
    yield LinearLayer(f"{mlp}.down", f"{mlp}.down", (f"{mlp}.down.weight",))
