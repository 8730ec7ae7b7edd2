"""ModelSpec: a transformer and its heads, described as data. Families write it, graphs read it; it knows neither.

Weight names are bei's own (``layers.3.attention.query.weight``); a family maps them to the checkpoint's names.
Matrices are [out_features, in_features], as in PyTorch's Linear.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "tanh", "sigmoid", "log1p_relu", "identity"]
Pooling = Literal["cls", "max", "mean", "mean_sqrt_len", "weighted_mean", "last", "sum"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)

# What a head gives: one row a sequence, or (the last three) one row a token.
Output = Literal["embedding", "logits", "sparse", "token_logits", "token_embedding", "token_weights"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class NormSpec:
    """A norm over the last axis.

    ``layer`` is LayerNorm (arXiv:1607.06450), with or without bias; ``rms`` is RMSNorm (arXiv:1910.07467), without.
    ``offset`` is added to the stored weight: Gemma stores w where it multiplies by 1 + w.
    """

    eps: float
    kind: Literal["layer", "rms"] = "layer"
    bias: bool = True
    offset: float = 0.0


@dataclass(frozen=True)
class EmbeddingsSpec:
    """Sum of word, learned position and token type rows, then a norm.

    ``max_positions`` is 0 where positions have no table (rotary or relative ones). ``position_offset`` rows of the
    checkpoint's table are never used (RoBERTa counts positions from ``pad_token_id + 1``) and are cut off at build
    time, so that positions start at 0 for every engine. ``type_vocab_size`` is 0 where token types have no table.
    ``scale`` multiplies the rows. A ``width`` other than the model's is projected behind the norm (ELECTRA).
    """

    vocab_size: int
    max_positions: int = 0
    position_offset: int = 0
    type_vocab_size: int = 0
    norm: NormSpec | None = None
    scale: float = 1.0
    width: int | None = None


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions (arXiv:2104.09864): halves of a head's first 2 * len(inv_freq) components turn by
    position * inv_freq; cosine and sine are multiplied by ``factor`` (YaRN, arXiv:2309.00071).

    A sequence of more than ``long_from`` tokens turns by ``long_inv_freq`` instead (LongRoPE, arXiv:2402.13753).
    """

    inv_freq: tuple[float, ...]
    factor: float = 1.0
    long_inv_freq: tuple[float, ...] | None = None
    long_from: int = 0

    @property
    def rotary_dim(self) -> int:
        """How many components of a head turn."""
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class RelativeBiasSpec:
    """A learned bias a head and bucket of distances, one table for all layers (arXiv:1910.10683, section 2.1)."""

    num_buckets: int
    max_distance: int


@dataclass(frozen=True)
class DisentangledSpec:
    """DeBERTa's content-to-position and position-to-content scores (arXiv:2006.03654, section 3.1).

    Distances fall into 2 * ``span`` rows of a table that all layers share, beyond ``span / 2`` in logarithmic buckets
    up to ``max_distance`` where ``buckets`` is set. ``share_keys``: the table goes through the content's projections.
    """

    span: int
    buckets: bool
    max_distance: int
    content_to_position: bool
    position_to_content: bool
    share_keys: bool
    norm: NormSpec | None


@dataclass(frozen=True)
class AttentionSpec:
    """Multi-head attention, bidirectional unless ``causal``.

    ``scale`` multiplies the scores. With fewer ``num_kv_heads`` neighbouring query heads share keys and values
    (arXiv:2305.13245). A token sees keys at most ``window`` positions away. ``qk_norm`` is over each head of query and
    key, before the rotation; over all heads together if ``qk_norm_joint``. ``softcap`` c turns scores s into
    c * tanh(s / c) (Gemma 2, arXiv:2408.00118). ``alibi`` subtracts slope * distance from the scores (arXiv:2108.12409,
    symmetric).
    """

    num_heads: int
    head_dim: int
    num_kv_heads: int
    scale: float
    bias: bool = True
    output_bias: bool = True
    causal: bool = False
    window: int | None = None
    rope: RopeSpec | None = None
    qk_norm: NormSpec | None = None
    qk_norm_joint: bool = False
    softcap: float | None = None
    alibi: bool = False
    relative_bias: RelativeBiasSpec | None = None
    disentangled: DisentangledSpec | None = None

    @property
    def width(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts (arXiv:1701.06538): ``count`` MLPs, of which each token goes through ``top_k``.

    A linear router scores them. The outputs of the best ``top_k`` are added, each times its share: the softmax of all
    scores, divided by the sum of those chosen if ``normalized``.
    """

    count: int
    top_k: int
    normalized: bool = False


@dataclass(frozen=True)
class MLPSpec:
    """``down(act(up(x)))``, or gated (arXiv:2002.05202) ``down(act(gate(x)) * up(x))``.

    ``bias`` is that of up and gate. With ``experts`` there are several, without gates and ``bias``; ``down_bias`` is
    one for all of them, added once. Their matrices lie one below the other, [count * intermediate_size, hidden_size]:
    up's as [out, in], down's as [in, out].
    """

    intermediate_size: int
    activation: Activation
    gated: bool = False
    bias: bool = True
    down_bias: bool = True
    experts: ExpertsSpec | None = None


@dataclass(frozen=True)
class LayerSpec:
    """Attention then MLP, each with a residual sum.

    Where the norms are: ``post``, behind the sum (BERT); ``pre``, in front of attention and MLP (Llama); ``both``, in
    front of them and behind them, inside the sum (Gemma 2). Without ``attention_norm`` the one in front of the
    attention is missing (ModernBERT's first layer). ``second_attention_norm``: what comes out of attention, sum and
    norm is added to the layer's input once more, and normalized (JinaBERT's model for code).
    """

    attention: AttentionSpec
    mlp: MLPSpec
    norm: NormSpec
    placement: Literal["post", "pre", "both"] = "post"
    attention_norm: bool = True
    second_attention_norm: bool = False


@dataclass(frozen=True)
class DenseSpec:
    """A linear layer of a head; its weights are ``{name}.weight`` and ``{name}.bias``.

    ``rows``: each row is a sum of rows of the stored matrix, given as (index, factor), as when a language model's
    scores of two tokens are compared. ``factors``: the one row of a matrix that no file holds.
    """

    name: str
    in_features: int
    out_features: int
    bias: bool = True
    activation: Activation = "identity"
    rows: tuple[tuple[tuple[int, float], ...], ...] | None = None
    factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class NormLayerSpec:
    """A norm of a head; its weights are ``{name}.weight`` and ``{name}.bias``."""

    name: str
    width: int
    norm: NormSpec


@dataclass(frozen=True)
class ActivationSpec:
    """An activation of a head, by itself."""

    activation: Activation


@dataclass(frozen=True)
class NormalizeSpec:
    """L2 normalization inside a head. A final one is not in the graph: the runtime normalizes."""


HeadLayer: TypeAlias = DenseSpec | NormLayerSpec | ActivationSpec | NormalizeSpec


@dataclass(frozen=True)
class HeadSpec:
    """From token states to one output: ``token_layers`` on every token, ``pooling``, ``layers`` on what it gives.

    Several pooling modes are concatenated. Without any the output has a row a token.
    """

    output: Output
    pooling: tuple[Pooling, ...] = ()
    token_layers: tuple[HeadLayer, ...] = ()
    layers: tuple[HeadLayer, ...] = ()

    def dimension(self, hidden_size: int) -> int:
        """Width of the output for token states of ``hidden_size``."""
        width = _width(self.token_layers, hidden_size)
        return _width(self.layers, width * max(1, len(self.pooling)))

    def weights(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of every weight."""
        for layer in (*self.token_layers, *self.layers):
            if isinstance(layer, DenseSpec):
                yield from _linear(layer.name, layer.out_features, layer.in_features, layer.bias)
            elif isinstance(layer, NormLayerSpec):
                yield from _norm(layer.name, layer.norm, layer.width)


@dataclass(frozen=True)
class ModelSpec:
    """A transformer and what is read from its token states. Static embeddings have no layers.

    ``final_norm`` is behind the last layer (pre-norm models). ``partial_keys``: sequences may end in tokens that no
    token looks at (ColBERT's query expansion). ``architecture`` and ``family`` are for people. Tokens ``unpooled_id``
    are left out of means; a sequence of nothing else has a mean of zeros.
    """

    family: str
    architecture: str
    hidden_size: int
    embeddings: EmbeddingsSpec
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None = None
    heads: tuple[HeadSpec, ...] = (HeadSpec("embedding", ("mean",)),)
    unpooled_id: int | None = None
    partial_keys: bool = False

    def head(self, output: Output) -> HeadSpec | None:
        """The head called ``output``, None where the model has none."""
        return next((head for head in self.heads if head.output == output), None)

    @property
    def dimensions(self) -> dict[Output, int]:
        """Width of every output."""
        return {head.output: head.dimension(self.hidden_size) for head in self.heads}

    @property
    def num_parameters(self) -> int:
        """Elements of all weights."""
        return sum(math.prod(shape) for _, shape in self.weights())

    def backbone_weights(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of every weight of the transformer (position table without its unused rows)."""
        yield from _embedding_weights(self.embeddings, self.hidden_size)
        if self.layers:
            yield from _shared_attention_weights(self.layers[0].attention, self.hidden_size)
        for index, layer in enumerate(self.layers):
            yield from _layer_weights(f"layers.{index}", layer, self.hidden_size)
        if self.final_norm:
            yield from _norm("final_norm", self.final_norm, self.hidden_size)

    def head_weights(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of every weight of the heads."""
        for head in self.heads:
            yield from head.weights()

    def weights(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of every weight."""
        yield from self.backbone_weights()
        yield from self.head_weights()


def _width(layers: tuple[HeadLayer, ...], width: int) -> int:
    for layer in layers:
        if isinstance(layer, DenseSpec):
            width = layer.out_features
    return width


def _embedding_weights(embeddings: EmbeddingsSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    width = embeddings.width or hidden
    yield "embeddings.word.weight", (embeddings.vocab_size, width)
    if embeddings.max_positions:
        yield "embeddings.position.weight", (embeddings.max_positions, width)
    if embeddings.type_vocab_size:
        yield "embeddings.type.weight", (embeddings.type_vocab_size, width)
    if embeddings.norm:
        yield from _norm("embeddings.norm", embeddings.norm, width)
    if embeddings.width:
        yield from _linear("embeddings.projection", hidden, width, bias=True)


def _shared_attention_weights(attention: AttentionSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    """The tables of relative positions, which all layers share."""
    if attention.relative_bias:
        yield "relative_bias.weight", (attention.relative_bias.num_buckets, attention.num_heads)
    if attention.disentangled:
        yield "relative_positions.weight", (2 * attention.disentangled.span, hidden)
        if attention.disentangled.norm:
            yield from _norm("relative_positions_norm", attention.disentangled.norm, hidden)


def _layer_weights(prefix: str, layer: LayerSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield from _attention_weights(f"{prefix}.attention", layer.attention, hidden)
    if layer.attention_norm:
        yield from _norm(f"{prefix}.attention_norm", layer.norm, hidden)
    if layer.placement == "both":
        yield from _norm(f"{prefix}.attention_post_norm", layer.norm, hidden)
    if layer.second_attention_norm:
        yield from _norm(f"{prefix}.second_attention_norm", layer.norm, hidden)
    yield from _mlp_weights(f"{prefix}.mlp", layer.mlp, hidden)
    yield from _norm(f"{prefix}.mlp_norm", layer.norm, hidden)
    if layer.placement == "both":
        yield from _norm(f"{prefix}.mlp_post_norm", layer.norm, hidden)


def _mlp_weights(prefix: str, mlp: MLPSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    inner = mlp.intermediate_size
    if mlp.experts:
        yield from _linear(f"{prefix}.router", mlp.experts.count, hidden, bias=False)
        yield from _linear(f"{prefix}.experts.up", mlp.experts.count * inner, hidden, bias=False)
        yield from _linear(f"{prefix}.experts.down", mlp.experts.count * inner, hidden, bias=False)
        if mlp.down_bias:
            yield f"{prefix}.experts.bias", (hidden,)
        return
    if mlp.gated:
        yield from _linear(f"{prefix}.gate", inner, hidden, mlp.bias)
    yield from _linear(f"{prefix}.up", inner, hidden, mlp.bias)
    yield from _linear(f"{prefix}.down", hidden, inner, mlp.down_bias)


def _attention_weights(prefix: str, attention: AttentionSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield from _linear(f"{prefix}.query", attention.width, hidden, attention.bias)
    for name in ("key", "value"):
        yield from _linear(f"{prefix}.{name}", attention.kv_width, hidden, attention.bias)
    if attention.qk_norm:
        for name, width in (("query_norm", attention.width), ("key_norm", attention.kv_width)):
            yield from _norm(
                f"{prefix}.{name}", attention.qk_norm, width if attention.qk_norm_joint else attention.head_dim
            )
    yield from _linear(f"{prefix}.output", hidden, attention.width, attention.output_bias)
    positions = attention.disentangled
    if positions and not positions.share_keys:
        if positions.content_to_position:
            yield from _linear(f"{prefix}.position_key", attention.width, hidden, bias=True)
        if positions.position_to_content:
            yield from _linear(f"{prefix}.position_query", attention.width, hidden, bias=True)


def _linear(name: str, out_features: int, in_features: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (out_features, in_features)
    if bias:
        yield f"{name}.bias", (out_features,)


def _norm(name: str, norm: NormSpec, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (width,)
    if norm.kind == "layer" and norm.bias:
        yield f"{name}.bias", (width,)
