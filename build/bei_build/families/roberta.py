"""RoBERTa (Liu et al. 2019, arXiv:1907.11692) and XLM-RoBERTa (arXiv:1911.02116).

BERT, but positions are counted from ``pad_token_id + 1`` (transformers: create_position_ids_from_input_ids).
"""

from __future__ import annotations

from typing import Any

from bei_build.families import bert
from bei_build.families.base import Family
from bei_build.spec import ModelSpec

UNUSED = ("pooler.", "lm_head.", "embeddings.position_ids")


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    return bert.bert_like_spec(config, architecture, position_offset=config.pad_token_id + 1)


FAMILY = Family(
    name="roberta",
    model_type="roberta",
    architectures=("RobertaModel", "RobertaForMaskedLM"),
    prefix="roberta.",
    weights=bert.WEIGHTS,
    unused=UNUSED,
    spec_from_config=_spec_from_config,
)

XLM_FAMILY = Family(
    name="xlm-roberta",
    model_type="xlm-roberta",
    architectures=("XLMRobertaModel", "XLMRobertaForMaskedLM"),
    prefix="roberta.",
    weights=bert.WEIGHTS,
    unused=UNUSED,
    spec_from_config=_spec_from_config,
)
