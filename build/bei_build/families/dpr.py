"""DPR's encoders of questions and passages (Karpukhin et al. 2020, arXiv:2004.04906): BERT with the first token's state
as the embedding, in some models through a linear layer. The two are classes of one config, and their tensors differ by
prefix."""

from __future__ import annotations

from typing import Any

from bei_build.families import bert
from bei_build.families.base import Family
from bei_build.families.bert import bert_like_spec
from bei_build.spec.model_spec import HeadSpec
from bei_build.spec.parts import DenseSpec


def _embedder(config: Any) -> tuple[HeadSpec, ...]:
    width = config.projection_dim
    layers = (DenseSpec("projection", config.hidden_size, width),) if width > 0 else ()
    return (HeadSpec("embedding", ("cls",), layers=layers),)


def _family(architecture: str, prefix: str) -> Family:
    return Family(
        model_type="dpr",
        architectures={architecture: _embedder},
        prefix=f"{prefix}.",
        weights={
            **{name: f"bert_model.{stored}" for name, stored in bert.WEIGHTS.items() if name != "classifier"},
            "projection": "encode_proj",
        },
        unused=("bert_model.pooler.", "bert_model.embeddings.position_ids"),
        spec_from_config=bert_like_spec,
        reference_class=f"{architecture}.{prefix}.bert_model",
    )


QUESTION_FAMILY = _family("DPRQuestionEncoder", "question_encoder")
CONTEXT_FAMILY = _family("DPRContextEncoder", "ctx_encoder")
