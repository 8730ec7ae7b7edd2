"""Common parts of decoder families: pre-norm layers with rotary, grouped-query, causal attention.

By default they have RMSNorm and gated MLPs. As embedders they output the last token's state unless the checkpoint says
otherwise; as classifiers and reward models its linear ``score``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from bei.errors import CheckpointError
from bei_build.families.base import Family, HeadsOf, activation_named, require, token_classifier
from bei_build.families.rope import rope_from_config
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import AttentionSpec, DenseSpec, EmbeddingsSpec, LayerSpec, MLPSpec, NormSpec, RopeSpec

# Layers with a window in transformers' class: none, all if the config has a window, or those of the type.
Windows = Literal["none", "all", "by_type"]

# Makes a layer's rotation from a config, the width of a head and the type of the layer.
Rope: TypeAlias = Callable[[Any, int, str], RopeSpec | None]

WEIGHTS: dict[str, str | tuple[str, ...]] = {
    "embeddings.word": "embed_tokens",
    "layers.{i}.attention.query": "layers.{i}.self_attn.q_proj",
    "layers.{i}.attention.key": "layers.{i}.self_attn.k_proj",
    "layers.{i}.attention.value": "layers.{i}.self_attn.v_proj",
    "layers.{i}.attention.query_norm": "layers.{i}.self_attn.q_norm",
    "layers.{i}.attention.key_norm": "layers.{i}.self_attn.k_norm",
    "layers.{i}.attention.output": "layers.{i}.self_attn.o_proj",
    "layers.{i}.attention_norm": "layers.{i}.input_layernorm",
    "layers.{i}.mlp.gate": "layers.{i}.mlp.gate_proj",
    "layers.{i}.mlp.up": "layers.{i}.mlp.up_proj",
    "layers.{i}.mlp.down": "layers.{i}.mlp.down_proj",
    "layers.{i}.mlp_norm": "layers.{i}.post_attention_layernorm",
    "final_norm": "norm",
    "score": "score",
    "lm_head.weight": ("lm_head.weight", "embed_tokens.weight"),  # absent where it is tied to the embeddings
}


def decoder_spec(
    config: Any,
    architecture: str,
    *,
    bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    gated: bool = True,
    norm: NormSpec | None = None,
    qk_norm: NormSpec | None = None,
    qk_norm_joint: bool = False,
    causal: bool | None = None,
    windows: Windows = "none",
    rope: Rope | None = None,
) -> ModelSpec:
    """The spec of a Llama-shaped config. ``bias``: query, key and value have biases; ``causal`` None: see
    ``is_causal``.

    ``windows`` and ``rope``: the parts of the config that transformers' class reads; ``norm`` None: its RMSNorm.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    causal = is_causal(config, architecture) if causal is None else causal
    layer_types = _layer_types(config, windows)
    rope = rope or rope_of_all()
    ropes = {layer_type: rope(config, head_dim, layer_type) for layer_type in dict.fromkeys(layer_types)}
    norm = norm or rms(config)

    def layer(layer_type: str) -> LayerSpec:
        attention = AttentionSpec(
            config.num_attention_heads,
            head_dim,
            num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
            scale=head_dim**-0.5,
            bias=bias,
            output_bias=output_bias,
            causal=causal,
            window=window(config, layer_type),
            rope=ropes[layer_type],
            qk_norm=qk_norm,
            qk_norm_joint=qk_norm_joint,
        )
        activation = activation_named(config.hidden_act)
        mlp = MLPSpec(config.intermediate_size, activation, gated=gated, bias=mlp_bias, down_bias=mlp_bias)
        return LayerSpec(attention, mlp, norm, "pre")

    return ModelSpec(
        family=config.model_type,
        architecture=architecture,
        hidden_size=config.hidden_size,
        embeddings=EmbeddingsSpec(config.vocab_size),
        layers=tuple(layer(layer_type) for layer_type in layer_types),
        final_norm=norm,
    )


def _layer_types(config: Any, windows: Windows) -> tuple[str, ...]:
    """The type of each layer, "full_attention" or "sliding_attention". Raises CheckpointError.

    Settings that transformers' class ignores are refused: other engines of the same model obey them.
    """
    if windows == "none":
        require(config, "sliding_window", None)
    uniform = "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
    said = tuple(getattr(config, "layer_types", None) or ())
    if windows == "by_type" and said:
        return said
    if set(said) - {uniform}:
        raise CheckpointError(
            f"config.json has layer_types, not all of them {uniform}; bei's {config.model_type} family supports only "
            "layers of one type."
        )
    return (uniform,) * int(config.num_hidden_layers)


def with_layers(spec: ModelSpec, change: Callable[[int, LayerSpec], LayerSpec]) -> ModelSpec:
    """``spec`` with ``change`` applied to each layer and its index."""
    return replace(spec, layers=tuple(change(index, layer) for index, layer in enumerate(spec.layers)))


def output_norms(spec: ModelSpec) -> ModelSpec:
    """``spec`` with norms on the outputs of attention and MLP, and none in front of them."""
    return with_layers(spec, lambda _, layer: replace(layer, placement="output"))


def without_rope(layer: LayerSpec) -> LayerSpec:
    """``layer`` with an attention without positions."""
    return layer.with_attention(rope=None)


def rms(config: Any, offset: float = 0.0) -> NormSpec:
    """The config's RMSNorm."""
    return NormSpec(config.rms_norm_eps, kind="rms", bias=False, offset=offset)


def is_causal(config: Any, architecture: str) -> bool:
    """True if tokens attend only to themselves and earlier ones.

    Embedders made from decoders change that in three ways: ``is_causal`` (GTE-Qwen2), ``use_bidirectional_attention``
    (EmbeddingGemma), or a class of their own (Nemotron's LlamaBidirectionalModel).
    """
    if getattr(config, "is_causal", None) is False or getattr(config, "use_bidirectional_attention", None):
        return False
    return "Bidirectional" not in architecture


def window(config: Any, layer_type: str) -> int | None:
    """Visible distance in a layer of this type; transformers counts the token itself in ``sliding_window``."""
    width = getattr(config, "sliding_window", None)
    if layer_type == "full_attention":
        return None
    if layer_type != "sliding_attention" or width is None or width < 1:
        raise CheckpointError(
            f"config.json has a layer of type {layer_type!r} and sliding_window = {width!r}; supported: "
            "full_attention, and sliding_attention with a sliding_window."
        )
    return int(width) - 1


def rope_of_all(*, partial: bool = False, interleaved: bool = False) -> Rope:
    """One rotation for all layers."""
    return lambda config, head_dim, layer_type: rope_from_config(
        config, head_dim, partial=partial, interleaved=interleaved
    )


def last_token_embedder(config: Any) -> tuple[HeadSpec, ...]:
    """The state of the last token, which has attended to all others; the checkpoint's files or the user may choose
    another pooling."""
    return (HeadSpec("embedding", ("last",)),)


def score(config: Any) -> tuple[HeadSpec, ...]:
    """``ForSequenceClassification``: a linear layer without bias on the state of the last token that is not padding.

    transformers finds it by its id: padding that is written in a text, or ends every text, is skipped too.
    """
    layer = DenseSpec("score", config.hidden_size, config.num_labels, bias=False)
    return (HeadSpec("logits", ("last",), layers=(layer,), passed_id=config.pad_token_id),)


def token_score(config: Any) -> tuple[HeadSpec, ...]:
    """``ForTokenClassification``: a linear layer on every token's state, with a bias unless the config excludes it."""
    return token_classifier("score", bias=getattr(config, "token_classification_bias", True))(config)


# The classes that a decoder family may have, by the endings of their names.
_HEADS: dict[str, HeadsOf] = {
    "Model": last_token_embedder,
    "ForCausalLM": last_token_embedder,
    "ForSequenceClassification": score,
    "ForTokenClassification": token_score,
}
ALL_TASKS = tuple(_HEADS)
NO_TOKEN_LABELS = ALL_TASKS[:3]
NO_LABELS = ALL_TASKS[:2]


def architectures(class_prefix: str, tasks: Sequence[str] = ALL_TASKS) -> dict[str, HeadsOf]:
    """The classes of a decoder family: those for ``tasks`` that transformers has."""
    return {f"{class_prefix}{task}": _HEADS[task] for task in tasks}


def decoder_family(
    model_type: str,
    class_prefix: str,
    spec_from_config: Callable[[Any, str], ModelSpec],
    weights: Mapping[str, str | tuple[str, ...]] = WEIGHTS,
    tasks: Sequence[str] = ALL_TASKS,
) -> Family:
    """A family with Llama's tensor names."""
    return Family(
        model_type=model_type,
        architectures=architectures(class_prefix, tasks),
        prefix="model.",
        weights=weights,
        unused=("lm_head.", "rotary_emb.", "score."),
        spec_from_config=spec_from_config,
        attention_keys=("is_causal", "use_bidirectional_attention"),
    )
