"""OLMo (Groeneveld et al. 2024, arXiv:2402.00838): Llama with LayerNorm without weights, and clipped projections."""

from __future__ import annotations

from typing import Any

from bei_build.families.base import positive_number
from bei_build.families.decoder import NO_TOKEN_LABELS, decoder_family, decoder_spec, with_layers
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import NormSpec

_NORM = NormSpec(1e-5, bias=False, weight=False)  # the config has no key for its eps


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    bias = config.attention_bias
    spec = decoder_spec(config, architecture, bias=bias, output_bias=bias, norm=_NORM)
    if config.clip_qkv is None:
        return spec
    clip = positive_number(config, "clip_qkv")
    return with_layers(spec, lambda _, layer: layer.with_attention(clip=clip))


FAMILY = decoder_family("olmo", "Olmo", _spec_from_config, tasks=NO_TOKEN_LABELS)
