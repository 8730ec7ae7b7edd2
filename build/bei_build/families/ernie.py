"""ERNIE (Sun et al. 2019, arXiv:1904.09223; ERNIE 3.0, arXiv:2107.02137): BERT, in some models with a table of task
types."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei_build.families import bert
from bei_build.families.bert import bert_like_spec
from bei_build.spec.model_spec import ModelSpec


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    spec = bert_like_spec(config, architecture)
    if not config.use_task_id:
        return spec
    return replace(spec, embeddings=replace(spec.embeddings, task_vocab_size=config.task_type_vocab_size))


FAMILY = replace(
    bert.FAMILY,
    model_type="ernie",
    architectures={
        name.replace("Bert", "Ernie"): heads for name, heads in bert.FAMILY.architectures.items() if "Bert" in name
    },
    prefix="ernie.",
    weights={**bert.FAMILY.weights, "embeddings.task": "embeddings.task_type_embeddings"},
    spec_from_config=_spec_from_config,
)
