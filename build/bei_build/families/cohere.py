"""Command R (Cohere 2024) and Command R7B (Cohere2: windows, and no positions in layers without one).

Attention and MLP both read one LayerNorm; neighbouring components of a head rotate together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei_build.families.base import positive_number, require
from bei_build.families.decoder import (
    NO_LABELS,
    Rope,
    Windows,
    decoder_family,
    decoder_spec,
    rope_of_all,
    with_layers,
)
from bei_build.families.rope import rope_from_config
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import NormSpec, RopeSpec


def _spec(config: Any, architecture: str, windows: Windows, rope: Rope) -> ModelSpec:
    bias, norm = config.attention_bias, NormSpec(config.layer_norm_eps, bias=False)
    spec = decoder_spec(config, architecture, bias=bias, output_bias=bias, norm=norm, windows=windows, rope=rope)
    return with_layers(spec, lambda _, layer: replace(layer, parallel=True))


def _rope_of_windows(config: Any, head_dim: int, layer_type: str) -> RopeSpec | None:
    return rope_from_config(config, head_dim, interleaved=True) if layer_type == "sliding_attention" else None


def _cohere_spec(config: Any, architecture: str) -> ModelSpec:
    require(config, "use_qk_norm", False)  # Command R+ has weights for each head
    return _spec(config, architecture, "none", rope_of_all(interleaved=True))


def _cohere2_spec(config: Any, architecture: str) -> ModelSpec:
    return _spec(config, architecture, "by_type", _rope_of_windows)


FAMILY = replace(
    decoder_family("cohere", "Cohere", _cohere_spec, tasks=NO_LABELS),
    score_factor=lambda config: positive_number(config, "logit_scale"),
)
COHERE2_FAMILY = replace(
    decoder_family("cohere2", "Cohere2", _cohere2_spec, tasks=NO_LABELS),
    score_factor=lambda config: positive_number(config, "logit_scale"),
)
