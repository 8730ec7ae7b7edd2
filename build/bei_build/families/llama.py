"""Llama (Touvron et al. 2023, arXiv:2302.13971), Mistral (Jiang et al. 2023, arXiv:2310.06825: a window), Ministral
(Mistral 2024: windows by type of layer) and Ministral 3 (2025: YaRN; Nemotron-3-Embed without a causal mask)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.decoder import decoder_family, decoder_spec, last_token_embedder, score
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import Pooling

_POOLINGS: dict[str, Pooling] = {"avg": "mean", "cls": "cls", "last": "last"}


def _llama_spec(config: Any, architecture: str) -> ModelSpec:
    bias = config.attention_bias
    return decoder_spec(config, architecture, bias=bias, output_bias=bias, mlp_bias=config.mlp_bias)


def _mistral_spec(config: Any, architecture: str) -> ModelSpec:
    """The spec of a Mistral; transformers' AutoConfig reads one with layers of several types as a Ministral, which
    supports them."""
    return decoder_spec(config, architecture, windows="by_type" if config.model_type == "ministral" else "all")


def _ministral3_spec(config: Any, architecture: str) -> ModelSpec:
    """The spec of a Ministral 3, of texts within the context that YaRN extends.

    The class multiplies queries by 1 + beta * log(1 + floor(position / context)), which is 1 there.
    """
    spec = decoder_spec(config, architecture, windows="all")
    needed = "llama_4_scaling_beta", "original_max_position_embeddings"
    beta, context = (config.rope_parameters.get(key) for key in needed)
    if beta is None or not context:
        raise CheckpointError(
            f"config.json has {needed[0]} = {beta!r} and {needed[1]} = {context!r} in rope_parameters; transformers' "
            "class needs both: take them from the model that this one was trained from."
        )
    return replace(spec, longest=int(context) if beta else None)


def _ministral3_embedder(config: Any) -> tuple[HeadSpec, ...]:
    """With ``pooling``, as NVIDIA's bidirectional ones have it, that; else the last token's state."""
    return _bidirectional_embedder(config) if getattr(config, "pooling", None) else last_token_embedder(config)


def _pooling(config: Any) -> Pooling:
    """The setting of the bidirectional classes; their code's default is the mean."""
    name = getattr(config, "pooling", "avg")
    if name not in _POOLINGS:
        raise CheckpointError(f"config.json has pooling {name!r}; supported: {', '.join(_POOLINGS)}.")
    return _POOLINGS[name]


def _from_remote(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keep the config; the original code divides a classifier's scores by a temperature, which transformers drops."""
    classifies = "ForSequenceClassification" in str(raw.get("architectures"))
    if raw.get("model_type") == "llama_bidirec" and classifies and raw.get("temperature", 1.0) != 1.0:
        raise CheckpointError(f"config.json has temperature {raw['temperature']!r}; supported for scores: 1.0.")
    return raw


def _bidirectional_embedder(config: Any) -> tuple[HeadSpec, ...]:
    return (HeadSpec("embedding", (_pooling(config),)),)


def _bidirectional_score(config: Any) -> tuple[HeadSpec, ...]:
    (head,) = score(config)
    return (replace(head, pooling=(_pooling(config),), passed_id=None),)  # their code finds the last token by the mask


_LLAMA = decoder_family("llama", "Llama", _llama_spec)
FAMILY = replace(
    _LLAMA,
    aliases=("llama_bidirec",),
    remote_classes=("LlamaBidirectional",),
    translate=_from_remote,
    architectures={
        **_LLAMA.architectures,
        "LlamaBidirectionalModel": _bidirectional_embedder,
        "LlamaBidirectionalForSequenceClassification": _bidirectional_score,
    },
)
MISTRAL_FAMILY = decoder_family("mistral", "Mistral", _mistral_spec)
MINISTRAL_FAMILY = decoder_family("ministral", "Ministral", _mistral_spec)
_MINISTRAL3 = decoder_family("ministral3", "Ministral3", _ministral3_spec)
MINISTRAL3_FAMILY = replace(
    _MINISTRAL3, architectures={**_MINISTRAL3.architectures, "Ministral3Model": _ministral3_embedder}
)
