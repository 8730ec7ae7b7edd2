"""NV-Embed (Lee et al. 2024, arXiv:2405.17428): Mistral without a causal mask, attention of every token's state to
learned rows, and the mean of the results over the tokens after the instruction. Remote code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import require
from bei_build.families.decoder import decoder_spec
from bei_build.families.llama import MISTRAL_FAMILY
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import LatentAttentionSpec, NormSpec

_BLOCKS = "latent_attention_model.cross_attend_blocks"
_SIZES = ("num_latents_value", "num_cross_heads", "cross_dim_head", "latent_dim", "hidden_dim")
_MLP_RATIO = 4  # fixed in the code
_NORM = NormSpec(eps=1e-5)  # torch's default


def _from_original(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of its Mistral, as transformers' class reads it. The code uses no causal mask and no window."""
    if raw.get("model_type") != "nvembed":
        return raw
    text, latent = raw.get("text_config"), raw.get("latent_attention_config")
    if not isinstance(text, dict) or not isinstance(latent, dict):
        raise CheckpointError("config.json of NV-Embed lacks text_config or latent_attention_config.")
    wrong = [key for key in _SIZES if not isinstance(latent.get(key), int) or latent[key] < 1]
    if wrong:
        raise CheckpointError(
            f"latent_attention_config has {wrong[0]} {latent.get(wrong[0])!r}: it must be a number above 0."
        )
    if raw.get("padding_side", "right") != "right":
        raise CheckpointError(
            "config.json has padding_side = 'left', by which the model's code counts the tokens of instructions; bei "
            "supports only 'right'."
        )
    said = {"architectures": raw["architectures"], "latent_attention_config": latent}
    ours = {"unit_length": bool(latent.get("output_normalize")), "ends_in_eos": bool(raw.get("add_eos"))}
    return {**text, **said, **ours, "is_causal": False, "sliding_window": None}


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    require(config, "attention_bias", False)
    return decoder_spec(config, architecture)


def _latent_attention(config: Any) -> tuple[HeadSpec, ...]:
    latent, width = config.latent_attention_config, config.hidden_size
    if not latent["latent_dim"] == latent["hidden_dim"] == width:
        raise CheckpointError(
            f"config.json has latent_dim {latent['latent_dim']} and hidden_dim {latent['hidden_dim']}, and states of "
            f"{width}: bei builds NV-Embed where the three are the same."
        )
    layer = LatentAttentionSpec(
        "latent",
        width,
        num_latents=latent["num_latents_value"],
        num_heads=latent["num_cross_heads"],
        head_dim=latent["cross_dim_head"],
        intermediate_size=_MLP_RATIO * width,
        norm=_NORM,
    )
    return (HeadSpec("embedding", ("mean",), token_layers=(layer,)),)


FAMILY = replace(
    MISTRAL_FAMILY,
    aliases=("nvembed",),
    architectures={"NVEmbedModel": _latent_attention},
    prefix="embedding_model.",
    weights={
        **MISTRAL_FAMILY.weights,
        "latent.latents.weight": "latent_attention_model.latents",
        "latent.norm": f"{_BLOCKS}.0.norm",
        "latent.latents_norm": f"{_BLOCKS}.0.norm_context",
        "latent.query": f"{_BLOCKS}.0.fn.to_q",
        "latent.key_value": f"{_BLOCKS}.0.fn.to_kv",
        "latent.output": f"{_BLOCKS}.0.fn.to_out",
        "latent.mlp_norm": f"{_BLOCKS}.1.norm",
        "latent.mlp.up": f"{_BLOCKS}.1.fn.net.0",
        "latent.mlp.down": f"{_BLOCKS}.1.fn.net.2",
    },
    spec_from_config=_spec_from_config,
    translate=_from_original,
    remote_classes=("NVEmbed",),
    reference_class="MistralModel",
    reference_names={r"^embedding_model\.": ""},
    asks_about_prompts=True,
)
