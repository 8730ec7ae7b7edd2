"""NomicBERT (Nussbaum et al. 2024, arXiv:2402.01613): BERT with rotary positions and a gated MLP.

Both names of every tensor are read: those of the original remote code and those that transformers saves.

NomicBERT's original code (nomic-ai/nomic-bert-2048, modeling_hf_nomic_bert.py; training in nomic-ai/contrastors) also
supports biases, MLPs without gates and experts, which nomic-embed-text-v2-moe has (Nussbaum and Duderstadt 2025,
arXiv:2502.07972; also in text-embeddings-inference's nomic.rs). transformers' class does not: it would load such a
checkpoint and leave out the unknown parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import Family, activation_named, classifier, embedder, masked_lm, require, token_classifier
from bei_build.families.rope import rope_from_config
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import AttentionSpec, EmbeddingsSpec, ExpertsSpec, LayerSpec, MLPSpec, NormSpec

HEADS = {"pooler": "pooler.dense", "classifier": "classifier"}


def encoder_spec(config: Any, architecture: str, *, bias: bool) -> ModelSpec:
    """BERT with rotary positions and a gated MLP. ``bias``: the attention and the MLP's second layer have biases."""
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    norm = NormSpec(config.layer_norm_eps)
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads,
            head_dim,
            num_kv_heads=num_heads,
            scale=head_dim**-0.5,
            bias=bias,
            output_bias=bias,
            rope=rope_from_config(config, head_dim),
        ),
        mlp=MLPSpec(
            config.intermediate_size, activation_named(config.hidden_act), gated=True, bias=False, down_bias=bias
        ),
        norm=norm,
    )
    return ModelSpec(
        family=config.model_type,
        architecture=architecture,
        hidden_size=config.hidden_size,
        embeddings=EmbeddingsSpec(config.vocab_size, type_vocab_size=config.type_vocab_size, norm=norm),
        layers=(layer,) * config.num_hidden_layers,
    )


# Settings of the original code that no published model uses: key -> the only supported value.
_NOMIC_SWITCHES: Mapping[str, object] = {
    "causal": False,
    "expert_choice_router": False,
    "ffn_div": 1,
    "num_shared_experts": 0,
    "parallel_block": False,
    "prenorm": False,
    "rotary_emb_fraction": 1,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "use_rms_norm": False,
}
# Settings of the original code that transformers' class lacks, with the code's defaults.
_ORIGINAL_BIASES = {"qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True}
_NOMIC_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
}
_NOMIC_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "gelu": "gelu"}
_GATED = ("swiglu", "geglu")


def _nomic_from_remote(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The original code's config, which has GPT-2's keys and switches, in the native class's keys."""
    if "n_embd" not in raw:
        return raw
    activation = raw.get("activation_function")
    if activation not in _NOMIC_ACTIVATIONS:
        raise CheckpointError(
            f"config.json has activation_function {activation!r}; bei's nomic_bert family supports only "
            f"{', '.join(_NOMIC_ACTIVATIONS)}."
        )
    config = _ORIGINAL_BIASES | {_NOMIC_KEYS.get(key, key): value for key, value in raw.items()}
    config["hidden_act"] = _NOMIC_ACTIVATIONS[activation]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": raw.get("rotary_emb_base", 10000.0)}
    if config.get("intermediate_size") is None:
        config["intermediate_size"] = 4 * config["hidden_size"]
    if raw.get("rotary_scaling_factor"):  # beyond the trained length the frequencies would change with every token
        config["max_position_embeddings"] = raw.get("max_trained_positions", 2048)
    return config


def _nomic_spec(config: Any, architecture: str) -> ModelSpec:
    for key, value in _NOMIC_SWITCHES.items():
        require(config, key, value)
    return encoder_spec(config, architecture, bias=False)


def _original_spec(config: Any, architecture: str) -> ModelSpec:
    spec = _nomic_spec(config, architecture)
    (layer, *_) = spec.layers
    dense = replace(
        layer.with_attention(bias=config.qkv_proj_bias, output_bias=config.qkv_proj_bias),
        mlp=replace(
            layer.mlp,
            gated=config.activation_function in _GATED,
            bias=config.mlp_fc1_bias,
            down_bias=config.mlp_fc2_bias,
        ),
    )
    if not (experts := _experts(config)):
        return replace(spec, layers=(dense,) * len(spec.layers))
    sparse = replace(dense, mlp=replace(dense.mlp, bias=False, down_bias=True, experts=experts))
    every = config.moe_every_n_layers
    return replace(spec, layers=tuple(sparse if index % every == 1 else dense for index in range(len(spec.layers))))


def _experts(config: Any) -> ExpertsSpec | None:
    """The experts of every ``moe_every_n_layers``-th layer, from the second on. Raises CheckpointError."""
    count = getattr(config, "num_experts", 0)
    if not count:
        return None
    require(config, "activation_function", "gelu")
    # MegaBlocks divides by the norm of this order; the norm of order 1 of shares is their sum.
    require(config, "moe_normalize_expert_weights", False, None, 1)
    chosen: Any = getattr(config, "moe_top_k", None)
    every: Any = getattr(config, "moe_every_n_layers", None)
    are_numbers = all(type(value) is int for value in (count, chosen, every))
    if not are_numbers or not 1 <= chosen <= count or every < 2:
        raise CheckpointError(
            f"config.json has {count!r} experts, moe_top_k {chosen!r}, moe_every_n_layers {every!r}; bei's nomic_bert "
            "family supports only moe_top_k from 1 to the number of experts, and moe_every_n_layers from 2."
        )
    return ExpertsSpec(count, chosen, bool(getattr(config, "moe_normalize_expert_weights", False)))


def _nomic_variant(config: Mapping[str, Any]) -> Family | None:
    """The original code's own family, for settings that transformers' class lacks, and for task classes, whose prefix
    differs."""
    if "n_embd" not in config:
        return None
    more = config.get("num_experts") or config.get("activation_function") not in _GATED
    more = more or any(config.get(key, bias) for key, bias in _ORIGINAL_BIASES.items())
    return ORIGINAL_FAMILY if more or config.get("architectures") != ["NomicBertModel"] else None


NOMIC_FAMILY = Family(
    model_type="nomic_bert",
    architectures={
        "NomicBertModel": embedder,
        "NomicBertForPreTraining": embedder,  # the original code's; its prediction heads are ignored
        "NomicBertForMaskedLM": masked_lm(),
        "NomicBertForSequenceClassification": classifier("pooler", "classifier", activation="tanh"),
        "NomicBertForTokenClassification": token_classifier(),
    },
    prefix="nomic_bert.",
    weights={
        **HEADS,
        "embeddings.word": "embeddings.word_embeddings",
        "embeddings.type": "embeddings.token_type_embeddings",
        "embeddings.norm": ("embeddings.LayerNorm", "emb_ln"),
        "layers.{i}.attention.query": ("layers.{i}.self_attn.q_proj", "encoder.layers.{i}.attn.Wqkv"),
        "layers.{i}.attention.key": ("layers.{i}.self_attn.k_proj", "encoder.layers.{i}.attn.Wqkv"),
        "layers.{i}.attention.value": ("layers.{i}.self_attn.v_proj", "encoder.layers.{i}.attn.Wqkv"),
        "layers.{i}.attention.output": ("layers.{i}.self_attn.o_proj", "encoder.layers.{i}.attn.out_proj"),
        "layers.{i}.attention_norm": ("layers.{i}.post_attention_layernorm", "encoder.layers.{i}.norm1"),
        "layers.{i}.mlp.up": ("layers.{i}.mlp.up_proj", "encoder.layers.{i}.mlp.fc11"),
        "layers.{i}.mlp.gate": ("layers.{i}.mlp.gate_proj", "encoder.layers.{i}.mlp.fc12"),
        "layers.{i}.mlp.down": ("layers.{i}.mlp.down_proj", "encoder.layers.{i}.mlp.fc2"),
        "layers.{i}.mlp_norm": ("layers.{i}.post_mlp_layernorm", "encoder.layers.{i}.norm2"),
        "mlm.dense": "cls.predictions.transform.dense",
        "mlm.norm": "cls.predictions.transform.layer_norm",
        "mlm.decoder.weight": ("cls.predictions.decoder.weight", "embeddings.word_embeddings.weight"),
        "mlm.decoder.bias": ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    },
    unused=("pooler.", "cls.", "embeddings.position_ids", "embeddings.token_type_ids"),
    spec_from_config=_nomic_spec,
    translate=_nomic_from_remote,
    remote_classes=("NomicBert",),
    variant=_nomic_variant,
)

ORIGINAL_FAMILY = replace(
    NOMIC_FAMILY,
    prefix="bert.",
    weights={
        **NOMIC_FAMILY.weights,
        "layers.{i}.mlp.up": ("encoder.layers.{i}.mlp.fc11", "encoder.layers.{i}.mlp.fc1"),
        "layers.{i}.mlp.router": "encoder.layers.{i}.mlp.router.layer",
        "layers.{i}.mlp.experts.up.weight": "encoder.layers.{i}.mlp.experts.mlp.w1",
        "layers.{i}.mlp.experts.down.weight": "encoder.layers.{i}.mlp.experts.mlp.w2",
        "layers.{i}.mlp.experts.bias": "encoder.layers.{i}.mlp.experts.bias",
    },
    spec_from_config=_original_spec,
    reference_class=None,
)
