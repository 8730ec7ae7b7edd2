"""jina-embeddings-v5-text (arXiv:2602.15547, remote code): Qwen3 (small) or EuroBERT (nano), read by the last token,
with an adapter for each task in ``adapters/``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bei_build.families import eurobert, qwen
from bei_build.families.base import Family
from bei_build.families.decoder import last_token_embedder

_MODEL_TYPE = "jina_embeddings_v5"


def _variant(raw: Mapping[str, Any]) -> Family | None:
    return _NANO if raw.get("is_decoder") is False else None


def _of(backbone: Family) -> Family:
    return replace(
        backbone,
        aliases=(_MODEL_TYPE,),
        architectures={"JinaEmbeddingsV5Model": last_token_embedder},
        remote_classes=("JinaEmbeddingsV5",),
        reference_class=None,  # transformers' classes would leave the adapters out
        variant=_variant,
    )


_NANO = _of(eurobert.FAMILY)
FAMILY = _of(qwen.QWEN3_FAMILY)
