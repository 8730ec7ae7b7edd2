"""Floating-point operations that a model needs for texts of given lengths, counted from its spec.

A multiplication and an addition count as two. Only matrix products count: linear layers, attention scores and contexts,
convolutions and heads; norms, activations and softmax are left out, as is usual. Only real tokens count, and in masked
attention only the visible pairs: padding that an engine computes is not included.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

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
    SpanPairScoresSpec,
    SpanScoresSpec,
    WordScoresSpec,
)
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import AttentionSpec, DenseSpec, LatentAttentionSpec, LayerSpec, MLPSpec


def flops(spec: ModelSpec, lengths: Iterable[int]) -> int:
    """Operations for one text of each of ``lengths`` tokens, with all outputs computed."""
    lengths = list(lengths)
    num_tokens = sum(lengths)
    layers = (*spec.layers, *(spec.decoder.layers if spec.decoder else ()))
    total = num_tokens * sum(_linear_per_token(layer, spec.hidden_size) for layer in layers)
    for attention in spec.attentions:
        total += sum(visible_pairs(attention, length) for length in lengths) * 4 * attention.width
        if attention.disentangled:
            terms = attention.disentangled.content_to_position + attention.disentangled.position_to_content
            total += num_tokens * terms * 2 * attention.width * 2 * attention.disentangled.span
    if spec.layer_inputs:
        total += num_tokens * 2 * spec.hidden_size * len(spec.layers) * spec.layer_inputs.width
    if spec.embeddings.patches:
        total += num_tokens * 2 * spec.embeddings.patches.width * spec.hidden_size
    if spec.embeddings.width:
        total += num_tokens * 2 * spec.embeddings.width * spec.hidden_size
    if spec.convolution:
        total += num_tokens * 2 * spec.convolution.kernel_size * spec.hidden_size**2
    return total + sum(_head_flops(head, num_tokens, len(lengths)) for head in spec.heads)


def _linear_per_token(layer: LayerSpec, hidden: int) -> int:
    attentions = [one for one in (layer.attention, layer.cross_attention) if one]
    projections = sum(2 * (one.width + one.kv_width) for one in attentions)
    if layer.convolution:
        projections += 4 * hidden + layer.convolution.kernel_size
    if layer.layer_input:
        projections += 2 * layer.layer_input.width
    return 2 * hidden * projections + _mlp_per_token(layer.mlp, hidden)


def _mlp_per_token(mlp: MLPSpec, hidden: int) -> int:
    product = 2 * hidden * mlp.intermediate_size
    if mlp.experts:
        return 2 * hidden * mlp.experts.count + mlp.experts.top_k * 2 * product
    return product * (3 if mlp.gated else 2)


def visible_pairs(spec: AttentionSpec, length: int) -> int:
    """Number of (query, key) pairs that attention connects in a text of ``length`` tokens; in an image as if all its
    windows but one were whole."""
    if spec.image_windows:
        size = spec.image_windows.num_patches
        return length // size * size**2 + (length % size) ** 2
    reach = length - 1 if spec.window is None else min(spec.window, length - 1)
    one_side = reach * length - reach * (reach + 1) // 2  # pairs whose key precedes the query
    return length + one_side * (1 if spec.causal else 2)


def _head_flops(head: HeadSpec, num_tokens: int, num_sequences: int) -> int:
    rows = num_sequences if head.pooling else num_tokens
    total = _token_layer_flops(head.token_layers, num_tokens)
    on_rows = sum(_head_layer_flops(layer) for layer in head.layers)
    if pool := head.attention_pool:
        total += num_tokens * (4 * pool.width * pool.width + 4 * pool.width)  # keys and values, scores and context
        on_rows += 4 * pool.width * (pool.width + pool.intermediate_size)
    return total + rows * on_rows


def _token_layer_flops(layers: Iterable[HeadLayer], num_tokens: int) -> int:
    total, joined = 0, 1
    for layer in layers:
        if isinstance(layer, JoinRowsSpec | MeanRowsSpec):
            joined *= layer.count
        elif isinstance(layer, DivideRowsSpec):
            joined //= layer.count
        elif isinstance(layer, JoinStatesSpec):
            total += sum(_token_layer_flops(own, num_tokens) for _, own in layer.taps)
        total += num_tokens * _head_layer_flops(layer) // joined
    return total


def _head_layer_flops(layer: object) -> int:
    """Operations for one row of a head's layer."""
    if isinstance(layer, DenseSpec):
        return 2 * layer.in_features * layer.out_features * (1 + layer.projects_residual)
    if isinstance(layer, LatentAttentionSpec):
        inner = layer.num_heads * layer.head_dim
        return 4 * inner * (layer.width + layer.num_latents) + 6 * layer.width * layer.intermediate_size
    if isinstance(layer, LabelScoresSpec):
        widths = (layer.entering, *layer.inner, 1)
        out = sum(entering * leaving for entering, leaving in pairwise(widths)) if layer.entering else layer.width
        rows = 2 * layer.width**2 if layer.scorer == "weighted" else 0
        return 2 * (2 * layer.width**2 + rows + out)  # the text's side is one row a sequence
    if isinstance(layer, LikelihoodSpec):
        return 2 * layer.width * layer.vocabulary
    if isinstance(layer, RelationScoresSpec):
        # As for one label, with every token a word and an entity.
        projection = 2 * layer.width * layer.state_width * layer.is_projected
        mlps = 2 * (4 + 2 + 2) * 4 * layer.width**2  # of starts and ends, of entities, and the half of pairs
        return projection + 2 * 2 * 3 * layer.width**2 + mlps + layer.max_entities * 2 * 4 * layer.width
    if isinstance(layer, BoundaryScoresSpec):
        # As for one label, with every token a word and a row of pairs.
        width, pair = layer.boundary_width, layer.pair_width
        block = layer.attention_layers * 4 * width**2 + layer.refinement_layers * 3 * layer.inner_width * width
        of_word = layer.width * (3 * width + layer.content_width) + block + 6 * width**2 + 2 * pair * width
        of_pair = width + pair * (layer.content_width + 4) + (1 + layer.film_width) * pair + layer.film_width
        return 2 * (of_word + layer.most * of_pair)
    if isinstance(layer, SpanPairScoresSpec):
        return 0  # a text without relations has one pair, whatever its length
    if isinstance(layer, RecordStatesSpec):
        of_labels = layer.record_width + 2 * layer.num_queries + 1
        return 2 * ((layer.columns - of_labels) * layer.boundaries.boundary_width + of_labels * layer.width)
    if isinstance(layer, SpanScoresSpec | WordScoresSpec):
        # As for one label, with every token a word; each further label costs its products with the spans or words.
        lstm = layer.recurrent_layers * 2 * 2 * (2 * layer.width) * (layer.width + layer.width // 2)
        if isinstance(layer, WordScoresSpec):
            return lstm + 2 * layer.width * (2 * layer.width + 3 * 4 * layer.width)
        ends = 2 * (2 * layer.end_width * 2 * layer.width)
        if layer.linear:
            return lstm + ends + 2 * 2 * layer.width
        halves = 2 * (2 * 4 * layer.width * layer.width)
        return lstm + ends + halves + layer.max_width * 2 * 4 * layer.width
    return 0
