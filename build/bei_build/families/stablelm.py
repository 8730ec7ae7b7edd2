"""StableLM 3B and StableLM 2 (arXiv:2402.17834): Llama with LayerNorm, and partial rotations of heads.

In some models attention and MLP both read one norm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei_build.families.base import require
from bei_build.families.decoder import decoder_family, decoder_spec, rope_of_all, with_layers
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import NormSpec


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    require(config, "qk_layernorm", False)  # StableLM 2 12B has a norm for each head
    norm = NormSpec(config.layer_norm_eps)
    spec = decoder_spec(config, architecture, bias=config.use_qkv_bias, norm=norm, rope=rope_of_all(partial=True))
    if not config.use_parallel_residual:
        return spec
    return with_layers(spec, lambda _, layer: replace(layer, parallel=True))


FAMILY = decoder_family("stablelm", "StableLm", _spec_from_config)
