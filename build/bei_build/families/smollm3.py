"""SmolLM3 (Hugging Face 2025): Llama with some layers without positions (arXiv:2501.18795)."""

from __future__ import annotations

from typing import Any

from bei.errors import CheckpointError
from bei_build.families.decoder import decoder_family, decoder_spec, with_layers, without_rope
from bei_build.spec.model_spec import ModelSpec


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    if "sliding_attention" in config.layer_types and not config.use_sliding_window:
        raise CheckpointError(
            "config.json has layers of type sliding_attention and use_sliding_window = False, which transformers obeys "
            "or not, by its implementation of attention: correct one of the two."
        )
    bias = config.attention_bias
    spec = decoder_spec(config, architecture, bias=bias, output_bias=bias, mlp_bias=config.mlp_bias, windows="by_type")
    turned = config.no_rope_layers  # true for layers that have positions, in spite of the name
    return with_layers(spec, lambda index, layer: layer if turned[index] else without_rope(layer))


FAMILY = decoder_family("smollm3", "SmolLM3", _spec_from_config)
