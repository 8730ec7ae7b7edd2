"""Llama (Touvron et al. 2023, arXiv:2302.13971) and Mistral (Jiang et al. 2023, arXiv:2310.06825: a window)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import require
from bei_build.families.decoder import decoder_family, decoder_spec, score
from bei_build.spec import HeadSpec, ModelSpec, Pooling

_POOLINGS: dict[str, Pooling] = {"avg": "mean", "cls": "cls", "last": "last"}


def _llama_spec(config: Any, architecture: str) -> ModelSpec:
    bias = config.attention_bias
    return decoder_spec(config, architecture, bias=bias, output_bias=bias, mlp_bias=config.mlp_bias)


def _pooling(config: Any) -> Pooling:
    """The bidirectional classes' own setting; their code's default is the mean."""
    name = getattr(config, "pooling", "avg")
    if name not in _POOLINGS:
        raise CheckpointError(f"config.json has pooling {name!r}; supported: {', '.join(_POOLINGS)}.")
    return _POOLINGS[name]


def _bidirectional_embedder(config: Any) -> tuple[HeadSpec, ...]:
    return (HeadSpec("embedding", (_pooling(config),)),)


def _bidirectional_score(config: Any) -> tuple[HeadSpec, ...]:
    require(config, "temperature", 1.0)  # the original code divides the scores by it
    (head,) = score(config)
    return (replace(head, pooling=(_pooling(config),)),)


_LLAMA = decoder_family("llama", "Llama", _llama_spec)
FAMILY = replace(
    _LLAMA,
    aliases=("llama_bidirec",),
    architectures={
        **_LLAMA.architectures,
        "LlamaBidirectionalModel": _bidirectional_embedder,
        "LlamaBidirectionalForSequenceClassification": _bidirectional_score,
    },
)
MISTRAL_FAMILY = decoder_family("mistral", "Mistral", decoder_spec)
