"""Granite (IBM 2024, granite-3.0-language-models): Llama with factors for embeddings, scores, sums and token scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei_build.families.base import positive_number
from bei_build.families.decoder import NO_LABELS, decoder_family, decoder_spec
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import LayerSpec


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    bias = config.attention_bias
    spec = decoder_spec(config, architecture, bias=bias, output_bias=bias, mlp_bias=config.mlp_bias)
    scale = positive_number(config, "attention_multiplier")
    residual_scale = positive_number(config, "residual_multiplier")

    def scaled(layer: LayerSpec) -> LayerSpec:
        return replace(layer.with_attention(scale=scale), residual_scale=residual_scale)

    return replace(
        spec,
        embeddings=replace(spec.embeddings, scale=positive_number(config, "embedding_multiplier")),
        layers=tuple(scaled(layer) for layer in spec.layers),
    )


FAMILY = replace(
    decoder_family("granite", "Granite", _spec_from_config, tasks=NO_LABELS),
    score_factor=lambda config: 1.0 / positive_number(config, "logits_scaling"),
)
