"""LFM2 (arXiv:2511.23404): gated short convolutions, and attention with norms of query and key in some layers.

LFM2.5-Embedding and -ColBERT (remote code, ``Lfm2Bidirectional...``) have no causal mask, and convolutions that read
as many tokens behind a token as before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import Family
from bei_build.families.decoder import last_token_embedder
from bei_build.families.rope import rope_from_config
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import (
    ActivationSpec,
    AttentionSpec,
    DenseSpec,
    EmbeddingsSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
)
from bei_build.spec.short_convolution import ShortConvolutionSpec

_BIDIRECTIONAL = "Lfm2Bidirectional"


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    causal = not architecture.startswith(_BIDIRECTIONAL)
    norm = NormSpec(config.norm_eps, kind="rms", bias=False)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = AttentionSpec(
        config.num_attention_heads,
        head_dim,
        num_kv_heads=config.num_key_value_heads,
        scale=head_dim**-0.5,
        bias=False,
        output_bias=False,
        causal=causal,
        rope=rope_from_config(config, head_dim),
        qk_norm=norm,
    )
    # transformers' class gives zeros for padding; of the bidirectional code some copies do, and LFM2.5-ColBERT's, the
    # one whose texts have such tokens, does not.
    drops = causal or bool(getattr(config, "conv_zero_padding", False))
    convolution = ShortConvolutionSpec(config.conv_L_cache, causal, config.conv_bias, drops_unattended=drops)
    mlp = MLPSpec(_inner_width(config), "silu", gated=True, bias=False, down_bias=False)

    def layer(layer_type: str) -> LayerSpec:
        if layer_type == "conv":
            return LayerSpec(None, mlp, norm, "pre", convolution=convolution)
        if layer_type != "full_attention":
            raise CheckpointError(
                f"config.json has a layer of type {layer_type!r}; supported in LFM2: full_attention and conv."
            )
        return LayerSpec(attention, mlp, norm, "pre")

    if "full_attention" not in config.layer_types:
        raise CheckpointError("config.json has no layer of type full_attention: bei builds LFM2 with at least one.")
    return ModelSpec(
        family=config.model_type,
        architecture=architecture,
        hidden_size=config.hidden_size,
        embeddings=EmbeddingsSpec(config.vocab_size),
        layers=tuple(map(layer, config.layer_types)),
        final_norm=norm,
    )


def _inner_width(config: Any) -> int:
    """The width of the MLP as transformers' class computes it."""
    width = int(config.intermediate_size)
    if not config.block_auto_adjust_ff_dim:
        return width
    width = 2 * width // 3
    if config.block_ffn_dim_multiplier is None:
        return width
    multiple = int(config.block_multiple_of)
    return -(-int(config.block_ffn_dim_multiplier * width) // multiple) * multiple


def _first_token_embedder(config: Any) -> tuple[HeadSpec, ...]:
    """The first token's state, as LFM2.5-Embedding has it; the checkpoint's files may choose another pooling."""
    return (HeadSpec("embedding", ("cls",)),)


def _masked_lm(config: Any) -> tuple[HeadSpec, ...]:
    """As ``base.masked_lm``, of scores that are one linear layer."""
    layer = DenseSpec("mlm.decoder", config.hidden_size, config.vocab_size, bias=False)
    return (HeadSpec("sparse", ("max",), token_layers=(layer,), layers=(ActivationSpec("log1p_relu"),)),)


def _variant(raw: Mapping[str, Any]) -> Family | None:
    """The bidirectional family, if the config.json names a class of it."""
    architectures = raw.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else ""
    return BIDIRECTIONAL_FAMILY if str(named).startswith(_BIDIRECTIONAL) else None


FAMILY = Family(
    model_type="lfm2",
    architectures={"Lfm2Model": last_token_embedder, "Lfm2ForCausalLM": last_token_embedder},
    prefix="model.",
    weights={
        "embeddings.word": "embed_tokens",
        "layers.{i}.attention.query": "layers.{i}.self_attn.q_proj",
        "layers.{i}.attention.key": "layers.{i}.self_attn.k_proj",
        "layers.{i}.attention.value": "layers.{i}.self_attn.v_proj",
        "layers.{i}.attention.query_norm": "layers.{i}.self_attn.q_layernorm",
        "layers.{i}.attention.key_norm": "layers.{i}.self_attn.k_layernorm",
        "layers.{i}.attention.output": "layers.{i}.self_attn.out_proj",
        "layers.{i}.attention_norm": "layers.{i}.operator_norm",
        "layers.{i}.convolution.input": "layers.{i}.conv.in_proj",
        "layers.{i}.convolution.kernel": "layers.{i}.conv.conv",
        "layers.{i}.convolution.output": "layers.{i}.conv.out_proj",
        "layers.{i}.convolution_norm": "layers.{i}.operator_norm",
        "layers.{i}.mlp.gate": "layers.{i}.feed_forward.w1",
        "layers.{i}.mlp.up": "layers.{i}.feed_forward.w3",
        "layers.{i}.mlp.down": "layers.{i}.feed_forward.w2",
        "layers.{i}.mlp_norm": "layers.{i}.ffn_norm",
        "final_norm": "embedding_norm",
        "score": "score",
        "lm_head.weight": ("lm_head.weight", "embed_tokens.weight"),
    },
    unused=("lm_head.", "rotary_emb."),
    spec_from_config=_spec_from_config,
    variant=_variant,
)
BIDIRECTIONAL_FAMILY = replace(
    FAMILY,
    aliases=("lfm2",),  # before the names of LFM2.5-Encoder's tensors
    architectures={
        f"{_BIDIRECTIONAL}Model": _first_token_embedder,
        f"{_BIDIRECTIONAL}ForMaskedLM": _masked_lm,
    },
    weights={**FAMILY.weights, "mlm.decoder.weight": ("lm_head.weight", "embed_tokens.weight")},
    remote_classes=(_BIDIRECTIONAL,),
    reference_class=None,  # transformers has no class whose convolutions are not causal
)
