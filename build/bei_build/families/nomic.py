"""NomicBERT (Nussbaum et al. 2024, arXiv:2402.01613) and GTE (Zhang et al. 2024, arXiv:2407.19669).

BERT with rotary positions and a gated MLP. Both names of every tensor are read: the ones of the original remote code
and the ones transformers saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import Family, activation_named, classifier, embedder, require, token_classifier
from bei_build.families.rope import rope_from_config
from bei_build.spec import AttentionSpec, EmbeddingsSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec


def _spec(config: Any, architecture: str, *, bias: bool) -> ModelSpec:
    """``bias``: of the attention and of the MLP's second layer."""
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


# What the original code can be configured to and the published models are not: key -> the only value read here.
_NOMIC_SWITCHES: Mapping[str, object] = {
    "causal": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "num_experts": 0,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_fraction": 1,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
}
_NOMIC_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
}
_NOMIC_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu"}


def _nomic_from_remote(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the original code, which is GPT-2's with switches, in the native class's keys."""
    if "n_embd" not in raw:
        return raw
    activation = raw.get("activation_function")
    if activation not in _NOMIC_ACTIVATIONS:
        raise CheckpointError(
            f"config.json has activation_function {activation!r}; bei's nomic_bert family supports only "
            f"{' or '.join(_NOMIC_ACTIVATIONS)}."
        )
    config = {_NOMIC_KEYS.get(key, key): value for key, value in raw.items()}
    config["hidden_act"] = _NOMIC_ACTIVATIONS[activation]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": raw.get("rotary_emb_base", 10000.0)}
    if config.get("intermediate_size") is None:
        config["intermediate_size"] = 4 * config["hidden_size"]
    if raw.get("rotary_scaling_factor"):  # behind the trained length the frequencies would change with every token
        config["max_position_embeddings"] = raw.get("max_trained_positions", 2048)
    return config


def _nomic_spec(config: Any, architecture: str) -> ModelSpec:
    for key, value in _NOMIC_SWITCHES.items():
        require(config, key, value)
    return _spec(config, architecture, bias=False)


def _gte_from_remote(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The original code's fixed NTK scaling (https://kexue.fm/archives/9706, equation 6) in terms of the native class.

    It multiplies the base by ``factor`` and divides all frequencies by ``factor ** (2 / head_dim)``: a linear scaling.
    """
    scaling = raw.get("rope_scaling")
    if not isinstance(scaling, dict) or (kind := scaling.get("type", scaling.get("rope_type"))) != "ntk":
        return raw
    if scaling.get("mixed_b") is not None:
        raise CheckpointError(f"config.json asks for rope_scaling {kind!r} with mixed_b; supported: without it.")
    factor, head_dim = scaling["factor"], raw["hidden_size"] // raw["num_attention_heads"]
    theta = raw.get("rope_theta", 10000.0) * factor
    rope = {"rope_type": "linear", "factor": factor ** (2 / head_dim), "rope_theta": theta}
    kept = {key: value for key, value in raw.items() if key not in ("rope_scaling", "rope_theta")}
    return {**kept, "rope_parameters": rope}


def _gte_spec(config: Any, architecture: str) -> ModelSpec:
    require(config, "position_embedding_type", "rope")
    require(config, "layer_norm_type", "layer_norm")
    require(config, "logn_attention_scale", False)
    return _spec(config, architecture, bias=True)


_HEADS = {"pooler": "pooler.dense", "classifier": "classifier"}

NOMIC_FAMILY = Family(
    model_type="nomic_bert",
    architectures={
        "NomicBertModel": embedder,
        "NomicBertForSequenceClassification": classifier("pooler", "classifier", activation="tanh"),
        "NomicBertForTokenClassification": token_classifier(),
    },
    prefix="nomic_bert.",
    weights={
        **_HEADS,
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
    },
    unused=("pooler.", "cls.", "embeddings.position_ids", "embeddings.token_type_ids"),
    spec_from_config=_nomic_spec,
    translate=_nomic_from_remote,
)

GTE_FAMILY = Family(
    model_type="gte",
    aliases=("new",),
    architectures={
        "GteModel": embedder,
        "NewModel": embedder,
        "GteForSequenceClassification": classifier("pooler", "classifier", activation="tanh"),
        "NewForSequenceClassification": classifier("pooler", "classifier", activation="tanh"),
        "GteForTokenClassification": token_classifier(),
        "NewForTokenClassification": token_classifier(),
    },
    prefix="gte.",
    weights={
        **_HEADS,
        "embeddings.word": "embeddings.word_embeddings",
        "embeddings.type": "embeddings.token_type_embeddings",
        "embeddings.norm": "embeddings.LayerNorm",
        "layers.{i}.attention.query": ("layers.{i}.self_attn.q_proj", "encoder.layer.{i}.attention.qkv_proj"),
        "layers.{i}.attention.key": ("layers.{i}.self_attn.k_proj", "encoder.layer.{i}.attention.qkv_proj"),
        "layers.{i}.attention.value": ("layers.{i}.self_attn.v_proj", "encoder.layer.{i}.attention.qkv_proj"),
        "layers.{i}.attention.output": ("layers.{i}.self_attn.o_proj", "encoder.layer.{i}.attention.o_proj"),
        "layers.{i}.attention_norm": ("layers.{i}.post_attention_layernorm", "encoder.layer.{i}.attn_ln"),
        "layers.{i}.mlp.up": ("layers.{i}.mlp.up_proj", "encoder.layer.{i}.mlp.up_gate_proj"),
        "layers.{i}.mlp.gate": ("layers.{i}.mlp.gate_proj", "encoder.layer.{i}.mlp.up_gate_proj"),
        "layers.{i}.mlp.down": ("layers.{i}.mlp.down_proj", "encoder.layer.{i}.mlp.down_proj"),
        "layers.{i}.mlp_norm": ("layers.{i}.post_mlp_layernorm", "encoder.layer.{i}.mlp_ln"),
    },
    unused=("pooler.", "lm_head.", "embeddings.position_ids"),
    spec_from_config=_gte_spec,
    translate=_gte_from_remote,
)
