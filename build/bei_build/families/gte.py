"""GTE (Zhang et al. 2024, arXiv:2407.19669): NomicBERT with biases.

Both names of every tensor are read: those of the original remote code and those that transformers saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import Family, classifier, embedder, masked_lm, require, token_classifier
from bei_build.families.nomic import HEADS, encoder_spec
from bei_build.spec.model_spec import ModelSpec


def _from_remote(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The original code's fixed NTK scaling (https://kexue.fm/archives/9706, equation 6) as keys of the native class.

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


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    require(config, "position_embedding_type", "rope")
    require(config, "layer_norm_type", "layer_norm")
    require(config, "logn_attention_scale", False)
    return encoder_spec(config, architecture, bias=True)


FAMILY = Family(
    model_type="gte",
    aliases=("new",),
    architectures={
        "GteModel": embedder,
        "NewModel": embedder,
        "GteForMaskedLM": masked_lm(activation="gelu"),
        "NewForMaskedLM": masked_lm(),
        "GteForSequenceClassification": classifier("pooler", "classifier", activation="tanh"),
        "NewForSequenceClassification": classifier("pooler", "classifier", activation="tanh"),
        "GteForTokenClassification": token_classifier(),
        "NewForTokenClassification": token_classifier(),
    },
    prefix="gte.",
    weights={
        **HEADS,
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
        "mlm.dense": "lm_head.dense",
        "mlm.norm": ("lm_head.layer_norm", "lm_head.norm"),
        "mlm.decoder.weight": ("lm_head.decoder.weight", "embeddings.word_embeddings.weight"),
        "mlm.decoder.bias": "lm_head.decoder.bias",
    },
    unused=("pooler.", "lm_head.", "embeddings.position_ids"),
    spec_from_config=_spec_from_config,
    translate=_from_remote,
    remote_classes=("New", "Gte"),
)
