"""Qwen2 (arXiv:2407.10671: biases of query, key, value) and Qwen3 (arXiv:2505.09388: norms of query and key)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bei.errors import CheckpointError
from bei_build.families.base import AS_STORED, Family, require
from bei_build.families.decoder import decoder_family, decoder_spec, rms
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import DenseSpec

# Remote code under one name: voyage-4-nano's, of a native architecture, and Giga-Embeddings' (0826), its own.
_BIDIRECTIONAL = "Qwen3BidirectionalModel"
_PPLX = "PPLXQwen3Model"  # pplx-embed-v1's: it lets all tokens see each other, whatever config.json says


def _qwen2_spec(config: Any, architecture: str) -> ModelSpec:
    return decoder_spec(config, architecture, bias=True, windows="by_type")


def _qwen3_spec(config: Any, architecture: str) -> ModelSpec:
    bias, causal = config.attention_bias, False if architecture == _PPLX else None
    return decoder_spec(
        config, architecture, bias=bias, output_bias=bias, qk_norm=rms(config), windows="by_type", causal=causal
    )


def _reward(config: Any) -> tuple[HeadSpec, ...]:
    """Qwen2.5-Math-RM (arXiv:2409.12122, remote code): two linear layers on the last token's state, one score."""
    width = config.hidden_size
    layers = (DenseSpec("reward.0", width, width, activation="relu"), DenseSpec("reward.2", width, 1))
    return (HeadSpec("logits", ("last",), layers=layers),)


def _markers(config: Any) -> tuple[HeadSpec, ...]:
    """jina-reranker-v3 and -v3.5 (arXiv:2509.25085, remote code): a projector on the states of a query's and its
    documents' markers, here on every token's."""
    width = config.hidden_size
    layers = (
        DenseSpec("projector.0", width, width // 2, bias=False, activation="relu"),
        DenseSpec("projector.2", width // 2, AS_STORED, bias=False),
    )
    return (HeadSpec("token_projection", token_layers=layers),)


_QWEN2 = decoder_family("qwen2", "Qwen2", _qwen2_spec)


def _voyage_variant(raw: Mapping[str, Any]) -> Family | None:
    """The family of a config.json whose architecture is Qwen3ForCausalLM and whose ``auto_map`` names a
    Qwen3BidirectionalModel."""
    auto_map = raw.get("auto_map")
    place = str(auto_map.get("AutoModel")) if isinstance(auto_map, dict) else ""
    own = raw.get("architectures") == [_BIDIRECTIONAL]
    return VOYAGE_FAMILY if place.rsplit(".", 1)[-1] == _BIDIRECTIONAL and not own else None


def _voyage_spec(config: Any, architecture: str) -> ModelSpec:
    require(config, "sliding_window", None)
    if getattr(config, "use_bidirectional_attention", None) is not True:
        raise CheckpointError(f"config.json names {_BIDIRECTIONAL} and lacks use_bidirectional_attention = true.")
    return _qwen3_spec(config, architecture)


def _projected(config: Any) -> tuple[HeadSpec, ...]:
    """voyage-4-nano (remote code): every token's state through a linear layer, then the mean."""
    layer = DenseSpec("linear", config.hidden_size, config.num_labels, bias=False)
    return (HeadSpec("embedding", ("mean",), token_layers=(layer,)),)


def _mean_of_all(config: Any) -> tuple[HeadSpec, ...]:
    """Giga-Embeddings and pplx-embed (remote code): Qwen3 without a causal mask, the mean of all states."""
    return (HeadSpec("embedding", ("mean",)),)


QWEN2_FAMILY = replace(
    _QWEN2,
    architectures={**_QWEN2.architectures, "Qwen2ForRewardModel": _reward},
    weights={**_QWEN2.weights, "reward.0": "score.0", "reward.2": "score.2"},
    remote_classes=("Qwen2ForRewardModel",),
)
_QWEN3 = decoder_family("qwen3", "Qwen3", _qwen3_spec)
VOYAGE_FAMILY = replace(
    _QWEN3,
    architectures={"Qwen3ForCausalLM": _projected},
    weights={**_QWEN3.weights, "linear": "linear"},
    spec_from_config=_voyage_spec,
    remote_classes=(_BIDIRECTIONAL,),
    attention_keys=(),
)
QWEN3_FAMILY = replace(
    _QWEN3,
    aliases=("qwen3_bidirec", "bidirectional_pplx_qwen3"),
    architectures={
        **_QWEN3.architectures,
        "JinaForRanking": _markers,
        _BIDIRECTIONAL: _mean_of_all,
        _PPLX: _mean_of_all,
    },
    weights={**_QWEN3.weights, "projector.0": "projector.0", "projector.2": "projector.2"},
    remote_classes=("JinaForRanking", _BIDIRECTIONAL, _PPLX),
    variant=_voyage_variant,
)
