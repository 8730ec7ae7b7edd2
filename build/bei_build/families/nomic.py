"""NomicBERT (Nussbaum et al. 2024, arXiv:2402.01613) and GTE (Zhang et al. 2024, arXiv:2407.19669).

BERT with rotary positions and a gated MLP. Both names of every tensor are read: the ones of the original remote code
and the ones transformers saves.
"""

from __future__ import annotations

from typing import Any

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


def _nomic_spec(config: Any, architecture: str) -> ModelSpec:
    # What the original code can be configured to and the published models are not.
    require(config, "rotary_emb_interleaved", False)
    require(config, "rotary_emb_scale_base", None)
    require(config, "prenorm", False)
    require(config, "num_experts", 0)
    return _spec(config, architecture, bias=False)


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
)
