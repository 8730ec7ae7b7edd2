"""The linear layers of a spec that may be quantized: those of its transformer layers.

Embeddings, norms, routers, convolutions, heads, pooling and softmax stay high.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bei_build.spec import LayerSpec, MLPSpec, ModelSpec


@dataclass(frozen=True)
class LinearLayer:
    """``name`` is that in the graph, ``weights`` are ours: those whose matrices lie one below the other in it.

    ``layer``: the transformer layer it belongs to. Of an expert, the matrix is a part of the named weight.
    """

    name: str
    layer: str
    weights: tuple[str, ...]


def linear_layers(spec: ModelSpec) -> tuple[LinearLayer, ...]:
    """In the order in which they run."""
    found = [layer for index, one in enumerate(spec.layers) for layer in _of_layer(one, f"layers.{index}")]
    for index, one in enumerate(spec.decoder.layers if spec.decoder else ()):
        found += _of_layer(one, f"decoder.layers.{index}")
    return tuple(found)


def _of_layer(spec: LayerSpec, name: str) -> Iterator[LinearLayer]:
    yield from _of_attention(name, "attention", (("query", "key", "value"),))
    if spec.cross_attention:
        yield from _of_attention(name, "cross_attention", (("query",), ("key", "value")))
    yield from _of_mlp(spec.mlp, name)


def _of_attention(layer: str, part: str, products: tuple[tuple[str, ...], ...]) -> Iterator[LinearLayer]:
    for roles in products:
        weights = tuple(f"{layer}.{part}.{role}.weight" for role in roles)
        yield LinearLayer(f"{layer}.{part}.{''.join(role[0] for role in roles)}", layer, weights)
    yield LinearLayer(f"{layer}.{part}.output", layer, (f"{layer}.{part}.output.weight",))


def _of_mlp(spec: MLPSpec, layer: str) -> Iterator[LinearLayer]:
    if spec.experts:
        for index in range(spec.experts.count):
            for role in ("up", "down"):
                weights = (f"{layer}.mlp.experts.{role}.weight",)
                yield LinearLayer(f"{layer}.mlp.experts.{index}.{role}", layer, weights)
        return
    for role in ("up", "gate", "down") if spec.gated else ("up", "down"):
        yield LinearLayer(f"{layer}.mlp.{role}", layer, (f"{layer}.mlp.{role}.weight",))
