"""Jina's XLM-RoBERTa (Sturua et al. 2024, arXiv:2409.10173): rotary positions, and adapters for tasks.

transformers has it as ``jina_embeddings_v3``. The original code (jinaai/xlm-roberta-flash-implementation) uses
XLM-RoBERTa's model type and other names, and its positions may be learned ones instead: jina-embeddings-v3 and
jina-colbert-v2 are rotary, jina-reranker-v2-base-multilingual is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import Family, late_interaction, padding_id, require
from bei_build.families.bert import ROBERTA_HEAD_WEIGHTS, bert_like_spec, roberta_architectures
from bei_build.families.rope import rope_from_config
from bei_build.spec.model_spec import HeadSpec, ModelSpec

# The class of the original code's config, which identifies the code, wherever a copy of it lies.
_CONFIG_CLASS = "XLMRobertaFlashConfig"
# Keys with other defaults in its versions, or without a class of ours with the same default: config.json must have
# them.
_SAID = ("position_embedding_type", "num_attention_heads", "layer_norm_eps", "hidden_act", "max_position_embeddings")
# Settings of the code with a single supported value: key -> that value.
_SWITCHES: Mapping[str, object] = {
    "last_layer_subset": False,
    "pad_vocab_size_multiple": 1,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "truncate_dim": None,
}


def _rotary_spec(config: Any, architecture: str) -> ModelSpec:
    spec = bert_like_spec(config, architecture)
    attention = spec.attentions[0]
    require(config, "head_dim", attention.head_dim)
    attention = replace(attention, rope=rope_from_config(config, attention.head_dim))
    layer = replace(spec.layers[0], attention=attention)
    embeddings = replace(spec.embeddings, max_positions=0)
    return replace(spec, embeddings=embeddings, layers=(layer,) * len(spec.layers))


def _absolute_spec(config: Any, architecture: str) -> ModelSpec:
    _check(config)
    return bert_like_spec(config, architecture, padding_id(config))


def _original_rotary_spec(config: Any, architecture: str) -> ModelSpec:
    _check(config)
    require(config, "rotary_emb_dim", config.hidden_size // config.num_attention_heads)
    return _rotary_spec(config, architecture)


def _check(config: Any) -> None:
    for key, value in _SWITCHES.items():
        require(config, key, value)


def _from_original(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the original code as keys of a native class."""
    missing = [key for key in _SAID if key not in raw]
    if missing:
        raise CheckpointError(
            f"config.json lacks {missing[0]}, whose default differs between versions of the model's code: add it."
        )
    if raw.get("rope_scaling") is not None:
        raise CheckpointError("config.json has rope_scaling, which the model's code does not read: take it out.")
    config = dict(raw)
    if config["position_embedding_type"] == "rotary":
        del config["position_embedding_type"]
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": raw.get("rotary_emb_base", 10000.0)}
    return config


def _original_embedder(config: Any) -> tuple[HeadSpec, ...]:
    """The outputs of the code's ``encode`` where there are no sentence-transformers files."""
    return (HeadSpec("embedding", ("cls" if getattr(config, "emb_pooler", None) == "cls" else "mean",)),)


def flash_variant(config: Mapping[str, Any]) -> Family | None:
    """The family of the original code, where config.json names that code; None otherwise."""
    auto_map = config.get("auto_map")
    places = auto_map.values() if isinstance(auto_map, dict) else ()
    if not any(str(place).endswith(f".{_CONFIG_CLASS}") for place in places):
        return None
    if config.get("position_embedding_type") != "rotary":
        return ABSOLUTE_FAMILY
    return ADAPTED_FAMILY if config.get("lora_adaptations") else ROTARY_FAMILY


_LAYER = "encoder.layers.{i}"

FAMILY = Family(
    model_type="jina_embeddings_v3",
    architectures=roberta_architectures("JinaEmbeddingsV3"),
    prefix="roberta.",
    weights={
        "embeddings.word": "embeddings.word_embeddings",
        "embeddings.position": "embeddings.position_embeddings",
        "embeddings.type": "embeddings.token_type_embeddings",
        "embeddings.norm": ("embeddings.LayerNorm", "emb_ln"),
        "layers.{i}.attention.query": ("layers.{i}.self_attn.q_proj", f"{_LAYER}.mixer.Wqkv"),
        "layers.{i}.attention.key": ("layers.{i}.self_attn.k_proj", f"{_LAYER}.mixer.Wqkv"),
        "layers.{i}.attention.value": ("layers.{i}.self_attn.v_proj", f"{_LAYER}.mixer.Wqkv"),
        "layers.{i}.attention.output": ("layers.{i}.self_attn.o_proj", f"{_LAYER}.mixer.out_proj"),
        "layers.{i}.attention_norm": ("layers.{i}.post_attention_layernorm", f"{_LAYER}.norm1"),
        "layers.{i}.mlp.up": ("layers.{i}.mlp.fc1", f"{_LAYER}.mlp.fc1"),
        "layers.{i}.mlp.down": ("layers.{i}.mlp.fc2", f"{_LAYER}.mlp.fc2"),
        "layers.{i}.mlp_norm": ("layers.{i}.post_mlp_layernorm", f"{_LAYER}.norm2"),
        "classifier": "classifier",
        **ROBERTA_HEAD_WEIGHTS,
        "colbert": "linear",
    },
    unused=("pooler.", "lm_head.", "embeddings.position_ids"),
    spec_from_config=_rotary_spec,
)

ROTARY_FAMILY = replace(
    FAMILY,
    architectures={
        **roberta_architectures("XLMRoberta"),
        **dict.fromkeys(("XLMRobertaModel", "XLMRobertaLoRA"), _original_embedder),
        "HF_ColBERT": late_interaction("colbert"),
    },
    spec_from_config=_original_rotary_spec,
    translate=_from_original,
    remote_classes=("XLMRoberta",),
)
# transformers' class would leave the adapters out, and has no learned positions.
ADAPTED_FAMILY = replace(ROTARY_FAMILY, reference_class=None)
ABSOLUTE_FAMILY = replace(
    ROTARY_FAMILY, model_type="xlm-roberta", spec_from_config=_absolute_spec, reference_class=None
)
