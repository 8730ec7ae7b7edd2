"""Names and shapes of the weights that each part of a spec reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TypeAlias

from bei_build.spec.head_layers import (
    BoundaryScoresSpec,
    CountingSpec,
    LabelScoresSpec,
    RecordStatesSpec,
    RelationScoresSpec,
    SpanPairScoresSpec,
    SpanScoresSpec,
    WordScoresSpec,
)
from bei_build.spec.parts import (
    AttentionPoolSpec,
    AttentionSpec,
    ConvolutionSpec,
    DecoderSpec,
    EmbeddingsSpec,
    LatentAttentionSpec,
    LayerInputsSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
)
from bei_build.spec.short_convolution import ShortConvolutionSpec

Shape: TypeAlias = tuple[int, ...]


def embedding_weights(embeddings: EmbeddingsSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    """Weights of the embedding tables."""
    width = embeddings.width or hidden
    if patches := embeddings.patches:
        shape = (patches.width,) if patches.flat else (3, patches.size, patches.size)
        yield "embeddings.patch.weight", (width, *shape)
        if patches.bias:
            yield "embeddings.patch.bias", (width,)
        if patches.class_token:
            yield "embeddings.patch.class_row", (width,)
        if patches.registers:
            yield "embeddings.patch.registers", (patches.registers, width)
    else:
        yield "embeddings.word.weight", (embeddings.vocab_size, width)
    yield from _position_and_type_weights("embeddings", embeddings, width)
    if embeddings.width:
        yield from linear_weights("embeddings.projection", hidden, width, bias=True)


def _position_and_type_weights(name: str, embeddings: EmbeddingsSpec, width: int) -> Iterator[tuple[str, Shape]]:
    if embeddings.patches and embeddings.patches.axial:
        yield f"{name}.axial_position.weight", (2, embeddings.max_positions, width)
    elif embeddings.max_positions:
        yield f"{name}.position.weight", (embeddings.max_positions, width)
    if embeddings.type_vocab_size:
        yield f"{name}.type.weight", (embeddings.type_vocab_size, width)
    if embeddings.task_vocab_size:
        yield f"{name}.task.weight", (embeddings.task_vocab_size, width)
    if embeddings.norm:
        yield from norm_weights(f"{name}.norm", embeddings.norm, width)


def convolution_weights(convolution: ConvolutionSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    """Weights of the convolution after the first layer."""
    yield "convolution.weight", (hidden, hidden, convolution.kernel_size)
    yield "convolution.bias", (hidden,)
    yield from norm_weights("convolution.norm", convolution.norm, hidden)


def latent_attention_weights(layer: LatentAttentionSpec) -> Iterator[tuple[str, Shape]]:
    """Weights of a head's attention to learned rows, and of its MLP."""
    name, width, inner = layer.name, layer.width, layer.num_heads * layer.head_dim
    yield f"{name}.latents.weight", (layer.num_latents, width)
    for norm in ("norm", "latents_norm", "mlp_norm"):
        yield from norm_weights(f"{name}.{norm}", layer.norm, width)
    yield from linear_weights(f"{name}.query", inner, width, bias=False)
    yield from linear_weights(f"{name}.key_value", 2 * inner, width, bias=False)
    yield from linear_weights(f"{name}.output", width, inner, bias=False)
    yield from linear_weights(f"{name}.mlp.up", 2 * layer.intermediate_size, width, bias=True)
    yield from linear_weights(f"{name}.mlp.down", width, layer.intermediate_size, bias=True)


def attention_pool_weights(pool: AttentionPoolSpec) -> Iterator[tuple[str, Shape]]:
    """Weights of a pooling by a learned row's attention, and of its MLP."""
    name, width = pool.name, pool.width
    yield f"{name}.probe", (1, 1, width)
    yield from linear_weights(f"{name}.input", 3 * width, width, bias=True)
    yield from linear_weights(f"{name}.output", width, width, bias=True)
    yield from norm_weights(f"{name}.norm", pool.norm, width)
    for part in ("up", *(["gate"] if pool.gated else [])):
        yield from linear_weights(f"{name}.mlp.{part}", pool.intermediate_size, width, bias=True)
    yield from linear_weights(f"{name}.mlp.down", width, pool.intermediate_size, bias=True)


def label_scores_weights(layer: LabelScoresSpec) -> Iterator[tuple[str, Shape]]:
    """Weights of a head that scores tokens as labels of a text."""
    name, width = layer.name, layer.width
    for side in ("text", "label"):
        for index in range(2):
            yield from linear_weights(f"{name}.{side}.{index}", width, width, bias=True)
        if layer.scorer == "weighted":
            yield from linear_weights(f"{name}.{side}.rows", 2 * width, width, bias=True)
    if layer.scorer != "dot":
        widths = (layer.entering, *layer.inner, 1)
        for index, (entering, leaving) in enumerate(pairwise(widths)):
            yield from linear_weights(f"{name}.out.{index}", leaving, entering, bias=True)
    if layer.normalizes:
        yield f"{name}.scale", ()


def span_scores_weights(layer: SpanScoresSpec | WordScoresSpec) -> Iterator[tuple[str, Shape]]:
    """Weights of a head that scores spans of words, or words of spans."""
    name, width = layer.name, layer.width
    yield from _recurrent_weights(name, width, layer.recurrent_layers)
    if isinstance(layer, WordScoresSpec):
        for part in ("word", "label"):
            yield from linear_weights(f"{name}.{part}", 2 * width, width, bias=True)
        yield from linear_weights(f"{name}.out.0", 4 * width, 3 * width, bias=True)
        yield from linear_weights(f"{name}.out.1", layer.columns, 4 * width, bias=True)
        return
    mlps = {"start": (width, layer.end_width), "end": (width, layer.end_width)}
    if layer.linear:
        yield from linear_weights(f"{name}.out", width, 2 * width, bias=True)
    else:
        mlps["out"] = (2 * width, 4 * width)
    if not layer.counting:
        mlps["label"] = (width, 4 * width)
    yield from _two_layer_weights(name, mlps, width)
    if layer.counting:
        yield from _counting_weights(f"{name}.schema", width, layer.counting)


def relation_scores_weights(layer: RelationScoresSpec) -> Iterator[tuple[str, Shape]]:
    """Weights of a head that scores pairs of entities."""
    name, width = layer.name, layer.width
    if layer.is_projected:
        yield from linear_weights(f"{name}.projection", width, layer.state_width, bias=True)
    yield from _recurrent_weights(name, width, layer.recurrent_layers)
    of_one = dict.fromkeys(("start", "end", "label"), (width, 4 * width))
    yield from _two_layer_weights(name, of_one | dict.fromkeys(("out", "pair"), (2 * width, 4 * width)), width)


def boundary_scores_weights(layer: BoundaryScoresSpec) -> Iterator[tuple[str, Shape]]:
    """Weights of a head that scores pairs of boundaries."""
    name, hidden, width, pair = layer.name, layer.width, layer.boundary_width, layer.pair_width
    yield from ((f"{name}.{part}", (hidden,)) for part in ("bos", "eos"))
    matrices = {
        **dict.fromkeys(("left", "right", "start.label", "end.label", "inside.word", "inside.label"), (width, hidden)),
        "joined": (width, 2 * width),
        **dict.fromkeys(("start.boundary", "end.boundary", "pool.start", "pool.end"), (width, width)),
        "absent": (1, hidden),
        **dict.fromkeys(("pair.start", "pair.end"), (pair, width)),
        "pair.length": (pair, 3),
        "pair.prior": (pair, 1),
        "pair.label": (pair, hidden),
        "pair.film": (2 * pair, pair),
        "pair.out.0": (layer.film_width, pair),
        "pair.out.1": (1, layer.film_width),
    }
    norms = {"norm": width, "pair.norm": pair}
    if content := layer.content_width:
        matrices |= {"content.value": (content, hidden), "content.out": (pair, content)}
        norms["content.norm"] = content
    for index in range(layer.attention_layers):
        matrices |= {f"attention.{index}.input": (3 * width, width), f"attention.{index}.output": (width, width)}
        norms[f"attention.{index}.norm"] = width
    for index in range(layer.refinement_layers):
        inner = layer.inner_width
        matrices |= {f"refinement.{index}.up": (2 * inner, width), f"refinement.{index}.down": (width, inner)}
        norms[f"refinement.{index}.norm"] = width
    for part, (leaving, entering) in matrices.items():
        yield from linear_weights(f"{name}.{part}", leaving, entering, bias=True)
    for part, size in norms.items():
        yield from norm_weights(f"{name}.{part}", NormSpec(layer.eps), size)


def pair_scores_weights(layer: SpanPairScoresSpec) -> Iterator[tuple[str, Shape]]:
    """Weights of a head that scores pairs of spans."""
    width, of_label = layer.width, layer.label_width
    matrices = {"mlp.0": (width, 4 * width + of_label + 2), "mlp.1": (1, width)}
    if layer.reads_content:
        matrices |= dict.fromkeys(("head", "tail"), (width, width))
        matrices |= {"gate": (width, of_label), "content": (1, 2 * width + of_label)}
    for part, (leaving, entering) in matrices.items():
        yield from linear_weights(f"{layer.name}.{part}", leaving, entering, bias=True)


def record_states_weights(layer: RecordStatesSpec) -> Iterator[tuple[str, Shape]]:
    """Weights of a head from whose output instances are formed."""
    hidden, width = layer.width, layer.record_width
    matrices = {
        "encoder": (hidden, 2 * layer.boundaries.boundary_width),
        **dict.fromkeys(("instance", "field", "candidate", "query", "key"), (width, hidden)),
        "value": (hidden, hidden),
        **dict.fromkeys(("object", "seed"), (1, hidden)),
    }
    for part, (leaving, entering) in matrices.items():
        yield from linear_weights(f"{layer.name}.{part}", leaving, entering, bias=True)
    yield f"{layer.name}.nothing", (width,)
    yield f"{layer.name}.queries", (layer.num_queries, hidden)


def _recurrent_weights(name: str, width: int, num_layers: int) -> Iterator[tuple[str, Shape]]:
    half = width // 2
    for index in range(num_layers):
        for direction in ("ahead", "back"):
            yield from linear_weights(f"{name}.rnn.{index}.{direction}.input", 4 * half, width, bias=True)
            yield from linear_weights(f"{name}.rnn.{index}.{direction}.hidden", 4 * half, half, bias=True)


def _two_layer_weights(name: str, mlps: Mapping[str, tuple[int, int]], width: int) -> Iterator[tuple[str, Shape]]:
    """Of MLPs with one hidden layer: what enters each, and its hidden numbers."""
    for part, (entering, inner) in mlps.items():
        yield from linear_weights(f"{name}.{part}.0", inner, entering, bias=True)
        yield from linear_weights(f"{name}.{part}.1", width, inner, bias=True)


def _counting_weights(name: str, width: int, counting: CountingSpec) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.position.weight", (counting.num_counts, width)
    for part in ("input", "hidden"):
        yield from linear_weights(f"{name}.gru.{part}", 3 * width, width, bias=True)
    yield from linear_weights(f"{name}.count.0", 2 * width, width, bias=True)
    yield from linear_weights(f"{name}.count.1", counting.num_counts, 2 * width, bias=True)
    for index, (entering, leaving) in enumerate(pairwise(counting.label_widths(width))):
        yield from linear_weights(f"{name}.label.{index}", leaving, entering, bias=True)
    if counting.kind != "transformer":
        return
    inner = counting.inner_width
    yield from linear_weights(f"{name}.narrow", inner, width, bias=True)
    for index in range(counting.num_layers):
        part = f"{name}.blocks.{index}"
        yield from linear_weights(f"{part}.input", 3 * inner, inner, bias=True)
        yield from linear_weights(f"{part}.output", inner, inner, bias=True)
        yield from linear_weights(f"{part}.up", 2 * inner, inner, bias=True)
        yield from linear_weights(f"{part}.down", inner, 2 * inner, bias=True)
        for norm in ("attention_norm", "mlp_norm"):
            yield from norm_weights(f"{part}.{norm}", NormSpec(counting.eps), inner)


def decoder_weights(decoder: DecoderSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    """Weights of a decoder, without its word table, which is the encoder's."""
    yield from _position_and_type_weights("decoder.embeddings", decoder.embeddings, hidden)
    for index, layer in enumerate(decoder.layers):
        yield from layer_weights(f"decoder.layers.{index}", layer, hidden)
    if decoder.final_norm:
        yield from norm_weights("decoder.final_norm", decoder.final_norm, hidden)


def shared_attention_weights(attention: AttentionSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    """Tables of relative positions, which all layers share."""
    if attention.relative_bias:
        yield "relative_bias.weight", (attention.relative_bias.num_buckets, attention.num_heads)
    if attention.disentangled:
        yield "relative_positions.weight", (2 * attention.disentangled.span, hidden)
        if attention.disentangled.norm:
            yield from norm_weights("relative_positions_norm", attention.disentangled.norm, hidden)


def layer_inputs_weights(inputs: LayerInputsSpec, num_layers: int, hidden: int) -> Iterator[tuple[str, Shape]]:
    """Weights of the vectors of tokens for each layer."""
    yield from linear_weights("layer_inputs.projection", num_layers * inputs.width, hidden, bias=False)
    yield from norm_weights("layer_inputs.norm", inputs.norm, inputs.width)


def layer_weights(prefix: str, layer: LayerSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    """Weights of one layer, with names that start with ``prefix``."""
    if layer.entry:
        yield from norm_weights(f"{prefix}.entry.norm", layer.entry.norm, hidden)
        yield f"{prefix}.entry.types.weight", (layer.entry.num_types, hidden)
    if layer.attention:
        yield from _attention_weights(f"{prefix}.attention", layer.attention, hidden)
    if layer.convolution:
        yield from _short_convolution_weights(f"{prefix}.convolution", layer.convolution, hidden)
    if layer.second_attention_norm:
        yield from norm_weights(f"{prefix}.second_attention_norm", layer.norm, hidden)
    if layer.cross_attention:
        yield from _attention_weights(f"{prefix}.cross_attention", layer.cross_attention, hidden)
    yield from _mlp_weights(f"{prefix}.mlp", layer.mlp, hidden)
    if layer.layer_input:
        yield from linear_weights(f"{prefix}.layer_input.gate", layer.layer_input.width, hidden, bias=False)
        yield from linear_weights(f"{prefix}.layer_input.output", hidden, layer.layer_input.width, bias=False)
    for part in layer.normed_parts:
        yield from norm_weights(f"{prefix}.{part}_norm", layer.norm, hidden)
    for part in layer.parts if layer.norms_output else ():
        yield from norm_weights(f"{prefix}.{part}_post_norm", layer.norm, hidden)
    if layer.scaled:
        yield f"{prefix}.scale.weight", (1,)


def _short_convolution_weights(
    prefix: str, convolution: ShortConvolutionSpec, hidden: int
) -> Iterator[tuple[str, Shape]]:
    yield from linear_weights(f"{prefix}.input", 3 * hidden, hidden, convolution.bias)
    yield f"{prefix}.kernel.weight", (hidden, 1, convolution.kernel_size)
    if convolution.bias:
        yield f"{prefix}.kernel.bias", (hidden,)
    yield from linear_weights(f"{prefix}.output", hidden, hidden, convolution.bias)


def _mlp_weights(prefix: str, mlp: MLPSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    inner = mlp.intermediate_size
    if mlp.experts:
        yield from linear_weights(f"{prefix}.router", mlp.experts.count, hidden, bias=False)
        yield from linear_weights(f"{prefix}.experts.up", mlp.experts.count * inner, hidden, bias=False)
        yield from linear_weights(f"{prefix}.experts.down", mlp.experts.count * inner, hidden, bias=False)
        if mlp.down_bias:
            yield f"{prefix}.experts.bias", (hidden,)
        return
    if mlp.gated:
        yield from linear_weights(f"{prefix}.gate", inner, hidden, mlp.bias)
    yield from linear_weights(f"{prefix}.up", inner, hidden, mlp.bias)
    if mlp.inner_norm:
        yield from norm_weights(f"{prefix}.norm", mlp.inner_norm, inner)
    yield from linear_weights(f"{prefix}.down", hidden, inner, mlp.down_bias)


def _attention_weights(prefix: str, attention: AttentionSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield from linear_weights(f"{prefix}.query", attention.width, hidden, attention.bias)
    for name, bias in (("key", attention.bias and attention.key_bias), ("value", attention.bias)):
        yield from linear_weights(f"{prefix}.{name}", attention.kv_width, hidden, bias)
    if attention.qk_norm:
        for name, width in (("query_norm", attention.width), ("key_norm", attention.kv_width)):
            yield from norm_weights(
                f"{prefix}.{name}", attention.qk_norm, width if attention.qk_norm_joint else attention.head_dim
            )
    yield from linear_weights(f"{prefix}.output", hidden, attention.width, attention.output_bias)
    positions = attention.disentangled
    if positions and not positions.share_keys:
        if positions.content_to_position:
            yield from linear_weights(f"{prefix}.position_key", attention.width, hidden, positions.key_bias)
        if positions.position_to_content:
            yield from linear_weights(f"{prefix}.position_query", attention.width, hidden, bias=True)


def linear_weights(name: str, out_features: int, in_features: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    """Weights of a linear layer."""
    yield f"{name}.weight", (out_features, in_features)
    if bias:
        yield f"{name}.bias", (out_features,)


def norm_weights(name: str, norm: NormSpec, width: int) -> Iterator[tuple[str, Shape]]:
    """Weights of a norm of ``width``."""
    if not norm.weight:
        return
    yield f"{name}.weight", (width,)
    if norm.kind == "layer" and norm.bias:
        yield f"{name}.bias", (width,)
