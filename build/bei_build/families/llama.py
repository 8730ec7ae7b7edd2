"""Llama (Touvron et al. 2023, arXiv:2302.13971) and Mistral (Jiang et al. 2023, arXiv:2310.06825: a window)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei_build.families.base import embedder
from bei_build.families.decoder import decoder_family, decoder_spec, score
from bei_build.spec import ModelSpec


def _llama_spec(config: Any, architecture: str) -> ModelSpec:
    bias = config.attention_bias
    return decoder_spec(config, architecture, bias=bias, output_bias=bias, mlp_bias=config.mlp_bias)


_LLAMA = decoder_family("llama", "Llama", _llama_spec)
FAMILY = replace(
    _LLAMA,
    aliases=("llama_bidirec",),
    architectures={
        **_LLAMA.architectures,
        "LlamaBidirectionalModel": embedder,
        "LlamaBidirectionalForSequenceClassification": score,
    },
)
MISTRAL_FAMILY = decoder_family("mistral", "Mistral", decoder_spec)
