"""Granite (IBM 2024, granite-3.0-language-models): Llama with factors of embeddings, scores, sums and token scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.decoder import decoder_family, decoder_spec
from bei_build.spec import LayerSpec, ModelSpec


def _factor(config: Any, key: str) -> float:
    value = float(getattr(config, key))
    if not 0 < value < float("inf"):
        raise CheckpointError(f"config.json has {key} = {value!r}: it must be a number above 0.")
    return value


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    bias = config.attention_bias
    spec = decoder_spec(config, architecture, bias=bias, output_bias=bias, mlp_bias=config.mlp_bias)
    scale, residual_scale = _factor(config, "attention_multiplier"), _factor(config, "residual_multiplier")

    def scaled(layer: LayerSpec) -> LayerSpec:
        return replace(layer, attention=replace(layer.attention, scale=scale), residual_scale=residual_scale)

    return replace(
        spec,
        embeddings=replace(spec.embeddings, scale=_factor(config, "embedding_multiplier")),
        layers=tuple(scaled(layer) for layer in spec.layers),
    )


_DECODER = decoder_family("granite", "Granite", _spec_from_config)
FAMILY = replace(
    _DECODER,
    # transformers has no sequence classifier of it.
    architectures={name: _DECODER.architectures[name] for name in ("GraniteModel", "GraniteForCausalLM")},
    score_factor=lambda config: 1.0 / _factor(config, "logits_scaling"),
)
