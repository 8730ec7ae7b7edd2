"""ModelSpec: a transformer described as data. Families write it, graphs read it; it knows neither.

Weight names are bei's own (``layers.3.attention.query.weight``); a family maps them to the checkpoint's names.
Matrices are [out_features, in_features], as in PyTorch's Linear.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "tanh", "identity"]
Pooling = Literal["cls", "max", "mean", "mean_sqrt_len", "weighted_mean", "last"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class NormSpec:
    """LayerNorm over the last axis, with weight and bias."""

    eps: float


@dataclass(frozen=True)
class EmbeddingsSpec:
    """Sum of word, learned position and token type rows, then a norm.

    ``position_offset`` rows of the checkpoint's position table are never used (RoBERTa counts positions from
    ``pad_token_id + 1``) and are cut off at build time, so that positions start at 0 for every engine.
    """

    vocab_size: int
    max_positions: int
    position_offset: int
    type_vocab_size: int
    norm: NormSpec


@dataclass(frozen=True)
class AttentionSpec:
    """Bidirectional multi-head attention with biases; scores are scaled by ``head_dim ** -0.5``."""

    num_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class MLPSpec:
    """Two linear layers with biases and an activation between them."""

    intermediate_size: int
    activation: Activation


@dataclass(frozen=True)
class LayerSpec:
    """Attention then MLP, each followed by a residual sum and a norm (post-norm)."""

    attention: AttentionSpec
    mlp: MLPSpec
    norm: NormSpec


@dataclass(frozen=True)
class DenseSpec:
    """A linear layer behind the pooling (sentence-transformers Dense). Weights: ``tail.{index}.*``."""

    in_features: int
    out_features: int
    bias: bool
    activation: Activation


@dataclass(frozen=True)
class NormalizeSpec:
    """L2 normalization between two tail layers. A final one is not in the graph: the runtime normalizes."""


TailLayer: TypeAlias = DenseSpec | NormalizeSpec


@dataclass(frozen=True)
class ModelSpec:
    """An embedding model: transformer, pooling (several modes are concatenated), tail."""

    family: str
    architecture: str
    hidden_size: int
    embeddings: EmbeddingsSpec
    layers: tuple[LayerSpec, ...]
    pooling: tuple[Pooling, ...] = ("mean",)
    tail: tuple[TailLayer, ...] = ()

    @property
    def embedding_dimension(self) -> int:
        """Width of the ``embedding`` output."""
        dimension = self.hidden_size * len(self.pooling)
        for layer in self.tail:
            if isinstance(layer, DenseSpec):
                dimension = layer.out_features
        return dimension

    @property
    def num_parameters(self) -> int:
        """Elements of all weights."""
        total = 0
        for _, shape in self.weights():
            size = 1
            for extent in shape:
                size *= extent
            total += size
        return total

    def backbone_weights(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of every weight of the transformer (position table without its unused rows)."""
        yield from _embedding_weights(self.embeddings, self.hidden_size)
        for index, layer in enumerate(self.layers):
            yield from _layer_weights(f"layers.{index}", layer, self.hidden_size)

    def tail_weights(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of every weight behind the pooling."""
        for index, layer in enumerate(self.tail):
            if isinstance(layer, DenseSpec):
                yield f"tail.{index}.weight", (layer.out_features, layer.in_features)
                if layer.bias:
                    yield f"tail.{index}.bias", (layer.out_features,)

    def weights(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of every weight."""
        yield from self.backbone_weights()
        yield from self.tail_weights()


def _embedding_weights(embeddings: EmbeddingsSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield "embeddings.word.weight", (embeddings.vocab_size, hidden)
    yield "embeddings.position.weight", (embeddings.max_positions, hidden)
    if embeddings.type_vocab_size:
        yield "embeddings.type.weight", (embeddings.type_vocab_size, hidden)
    yield from _norm("embeddings.norm", hidden)


def _layer_weights(prefix: str, layer: LayerSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    width, inner = layer.attention.width, layer.mlp.intermediate_size
    for name in ("query", "key", "value"):
        yield from _linear(f"{prefix}.attention.{name}", width, hidden)
    yield from _linear(f"{prefix}.attention.output", hidden, width)
    yield from _norm(f"{prefix}.attention_norm", hidden)
    yield from _linear(f"{prefix}.mlp.up", inner, hidden)
    yield from _linear(f"{prefix}.mlp.down", hidden, inner)
    yield from _norm(f"{prefix}.mlp_norm", hidden)


def _linear(name: str, out_features: int, in_features: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (out_features, in_features)
    yield f"{name}.bias", (out_features,)


def _norm(name: str, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)
