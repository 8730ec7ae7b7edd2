"""ModelSpec: a transformer and its heads, described as data. Families write it, graphs read it; it depends on neither.

Weight names are bei's own (``layers.3.attention.query.weight``); a family maps them to the checkpoint's names. Matrices
are [out_features, in_features], as in PyTorch's Linear.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from bei.core import Encoding, Expansion, expanded
from bei_build.spec.adapters import AdaptersSpec, factor_weights
from bei_build.spec.head_layers import (
    BoundaryScoresSpec,
    DivideRowsSpec,
    HeadLayer,
    JoinRowsSpec,
    JoinStatesSpec,
    LabelScoresSpec,
    LikelihoodSpec,
    RecordStatesSpec,
    RelationScoresSpec,
    ScaledTanhSpec,
    SpanPairScoresSpec,
    SpanScoresSpec,
    WordScoresSpec,
)
from bei_build.spec.parts import (
    AttentionPoolSpec,
    AttentionSpec,
    ConvolutionSpec,
    DecoderSpec,
    DenseSpec,
    EmbeddingsSpec,
    LatentAttentionSpec,
    LayerInputsSpec,
    LayerSpec,
    NormLayerSpec,
    NormSpec,
    Pooling,
)
from bei_build.spec.weight_shapes import (
    Shape,
    attention_pool_weights,
    boundary_scores_weights,
    convolution_weights,
    decoder_weights,
    embedding_weights,
    label_scores_weights,
    latent_attention_weights,
    layer_inputs_weights,
    layer_weights,
    linear_weights,
    norm_weights,
    pair_scores_weights,
    record_states_weights,
    relation_scores_weights,
    shared_attention_weights,
    span_scores_weights,
)

# Outputs of heads: one row per sequence, or (the last eleven) a row per token. Rows of "span_logits" are as wide as the
# labels of a step need, by labels, then by widths of a span, by parts of spans, or by the second entities of pairs: the
# dimension is that of one label.
# "token_projection": what a listwise reranker compares of its markers. "token_likelihood": the logarithm of each
# token's probability behind those in front of it. "label_logits": the score of each token as a label's.
# "option_logits": that of each token as an option's marker. "relation_logits": scores of pairs of spans that a request
# names, as many in each row. "record_states": of what instances of structures are formed.
# "image_features": of an image tower, the rows that a decoder reads in the place of word rows.
Output = Literal[
    "embedding",
    "logits",
    "sparse",
    "token_logits",
    "token_embedding",
    "token_weights",
    "token_projection",
    "span_logits",
    "token_likelihood",
    "label_logits",
    "option_logits",
    "relation_logits",
    "record_states",
    "image_features",
]


@dataclass(frozen=True)
class HeadSpec:
    """One output computed from token states: ``token_layers`` on every token, then ``pooling``, then ``layers``.

    Several pooling modes are concatenated. Without pooling the output has a row per token. ``passed_id``: pooling
    "last" skips tokens of this id at the end of a sequence, and takes the first token where all have it (classifiers of
    decoders). ``attention_pool``: what pooling "attention" computes.
    """

    output: Output
    pooling: tuple[Pooling, ...] = ()
    token_layers: tuple[HeadLayer, ...] = ()
    layers: tuple[HeadLayer, ...] = ()
    passed_id: int | None = None
    attention_pool: AttentionPoolSpec | None = None

    def dimension(self, hidden_size: int) -> int:
        """Width of the output for token states of ``hidden_size``."""
        width = _width(self.token_layers, hidden_size)
        return _width(self.layers, width * max(1, len(self.pooling)))

    @property
    def joins_states(self) -> bool:
        """True if it reads the states behind other layers than the last."""
        return any(isinstance(layer, JoinStatesSpec) for layer in self.token_layers)

    def weights(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of every weight."""
        if self.attention_pool:
            yield from attention_pool_weights(self.attention_pool)
        for layer in (*self.token_layers, *self.layers):
            yield from _head_layer_weights(layer)


@dataclass(frozen=True)
class ModelSpec:
    """A transformer and the heads that read its token states. Static embeddings have no layers.

    ``final_norm`` follows the last layer (pre-norm models). ``partial_keys``: sequences may end in tokens that are not
    attention keys (ColBERT's query expansion). ``architecture`` and ``family`` are for people. Means leave out tokens
    ``unpooled_id``; the mean of a sequence that has no other tokens is zeros. Unless ``pools_prompt``, means also leave
    out the prompt: the first tokens of a sequence, as many as its encoding gives.

    ``weights_of``: layers share weights (ALBERT). Layer i reads the weights called ``layers.{weights_of[i]}``. None:
    each layer has its own.

    With a ``decoder``, heads read the decoder's token states. Poolings "last_marked" and "first_marked" take the last
    and the first token ``marked_id`` of a sequence, "largest_id" the first of those with the largest id. ``longest``:
    most tokens of a text that the spec describes; longer texts are computed differently. ``layer_shares``: heads read a
    weighted sum of the states of the embeddings and of each layer, the last ones after the final norm; these are the
    weights. ``adapters``: low-rank terms of its matrices, of which each sequence reads one.
    ``filling_id``: every text is filled up to ``embeddings.max_positions`` with this token.
    """

    family: str
    architecture: str
    hidden_size: int
    embeddings: EmbeddingsSpec
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None = None
    heads: tuple[HeadSpec, ...] = (HeadSpec("embedding", ("mean",)),)
    unpooled_id: int | None = None
    pools_prompt: bool = True
    partial_keys: bool = False
    weights_of: tuple[int, ...] | None = None
    decoder: DecoderSpec | None = None
    marked_id: int | None = None
    longest: int | None = None
    convolution: ConvolutionSpec | None = None
    layer_inputs: LayerInputsSpec | None = None
    layer_shares: tuple[float, ...] | None = None
    adapters: AdaptersSpec | None = None
    filling_id: int | None = None

    def head(self, output: Output) -> HeadSpec | None:
        """The head called ``output``, None where the model has none."""
        return next((head for head in self.heads if head.output == output), None)

    def filled(self, encoding: Encoding) -> Encoding:
        """``encoding`` of a text, filled up where this model's are."""
        if self.filling_id is None:
            return encoding
        return expanded(encoding, Expansion(self.filling_id, self.embeddings.max_positions, attended=True))

    @property
    def joins_rows(self) -> bool:
        """True if rows of some tokens become one: of so many tokens a step must have a multiple."""
        return any(isinstance(layer, JoinRowsSpec) for head in self.heads for layer in head.token_layers)

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """Attention specs of all layers, the decoder's included, in the order in which they run."""
        layers = (*self.layers, *(self.decoder.layers if self.decoder else ()))
        pairs = ((layer.attention, layer.cross_attention) for layer in layers)
        return tuple(attention for pair in pairs for attention in pair if attention is not None)

    @property
    def entry_types(self) -> int:
        """Token types that layers read as they begin; 0: none do."""
        return max((layer.entry.num_types for layer in self.layers if layer.entry), default=0)

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
        yield from embedding_weights(self.embeddings, self.hidden_size)
        if self.layers and (attention := self.layers[0].attention):
            yield from shared_attention_weights(attention, self.hidden_size)
        if self.layer_inputs:
            yield from layer_inputs_weights(self.layer_inputs, len(self.layers), self.hidden_size)
        # Layers that share their weights: one of them is enough.
        for index, layer in dict(zip(self.weights_of or range(len(self.layers)), self.layers, strict=True)).items():
            yield from layer_weights(f"layers.{index}", layer, self.hidden_size)
        if self.convolution:
            yield from convolution_weights(self.convolution, self.hidden_size)
        if self.final_norm:
            yield from norm_weights("final_norm", self.final_norm, self.hidden_size)
        if self.decoder:
            yield from decoder_weights(self.decoder, self.hidden_size)

    def head_weights(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of every weight of the heads."""
        for head in self.heads:
            yield from head.weights()

    def weights(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of every weight, shared ones once."""
        yield from self.backbone_weights()
        yield from self.head_weights()
        if self.adapters:
            yield from factor_weights(self.adapters, dict(self.backbone_weights()))

    def weight_read_as(self, name: str) -> str:
        """The name in ``weights()`` of the weight that a layer reads as ``name``."""
        if self.weights_of is None or not name.startswith("layers."):
            return name
        _, index, rest = name.split(".", 2)
        return f"layers.{self.weights_of[int(index)]}.{rest}"


def _head_layer_weights(layer: HeadLayer) -> Iterator[tuple[str, Shape]]:
    if isinstance(layer, DenseSpec):
        yield from linear_weights(layer.name, layer.out_features, layer.in_features, layer.bias)
        if layer.projects_residual:
            yield f"{layer.name}.residual.weight", (layer.out_features, layer.in_features)
    elif isinstance(layer, NormLayerSpec):
        yield from norm_weights(layer.name, layer.norm, layer.width)
    elif isinstance(layer, ScaledTanhSpec):
        yield from ((f"{layer.name}.{part}", (layer.width,)) for part in ("alpha", "beta", "bias"))
    elif isinstance(layer, LatentAttentionSpec):
        yield from latent_attention_weights(layer)
    elif isinstance(layer, SpanScoresSpec | WordScoresSpec):
        yield from span_scores_weights(layer)
    elif isinstance(layer, RelationScoresSpec):
        yield from relation_scores_weights(layer)
    elif isinstance(layer, BoundaryScoresSpec):
        yield from boundary_scores_weights(layer)
    elif isinstance(layer, SpanPairScoresSpec):
        yield from pair_scores_weights(layer)
    elif isinstance(layer, RecordStatesSpec):
        yield from record_states_weights(layer)
    elif isinstance(layer, LabelScoresSpec):
        yield from label_scores_weights(layer)
    elif isinstance(layer, LikelihoodSpec):
        yield f"{layer.name}.weight", (layer.vocabulary, layer.width)
    elif isinstance(layer, JoinStatesSpec):
        for _, own in layer.taps:
            for one in own:
                yield from _head_layer_weights(one)


# Layers whose width is that of one label, or of one row of pairs.
_OF_LABELS = (
    SpanScoresSpec,
    WordScoresSpec,
    RelationScoresSpec,
    BoundaryScoresSpec,
    SpanPairScoresSpec,
    RecordStatesSpec,
    LikelihoodSpec,
    LabelScoresSpec,
)


def _width(layers: tuple[HeadLayer, ...], width: int) -> int:
    of_states = width
    for layer in layers:
        if isinstance(layer, DenseSpec):
            width = layer.out_features
        elif isinstance(layer, _OF_LABELS):
            width = layer.columns
        elif isinstance(layer, JoinRowsSpec):
            width *= layer.count
        elif isinstance(layer, DivideRowsSpec):
            width = -(-width // layer.count)
        elif isinstance(layer, JoinStatesSpec):
            width += sum(_width(own, of_states) for _, own in layer.taps)
    return width
