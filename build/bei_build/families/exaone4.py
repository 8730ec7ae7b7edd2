"""EXAONE 4.0 (LG 2025, arXiv:2507.11407): norms of query and key, and on the outputs of attention and MLP.

Where some layers have a window, the others have no positions.
"""

from __future__ import annotations

from typing import Any

from bei_build.families.decoder import decoder_family, decoder_spec, output_norms, rms, with_layers, without_rope
from bei_build.families.olmo2 import OUTPUT_NORM_WEIGHTS
from bei_build.spec.model_spec import ModelSpec


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    spec = output_norms(decoder_spec(config, architecture, qk_norm=rms(config), windows="by_type"))
    if config.sliding_window is None:
        return spec
    windows = [attention.window for attention in spec.attentions]
    return with_layers(spec, lambda index, layer: without_rope(layer) if windows[index] is None else layer)


FAMILY = decoder_family("exaone4", "Exaone4", _spec_from_config, OUTPUT_NORM_WEIGHTS)
