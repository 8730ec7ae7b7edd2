"""Megatron-BERT (Shoeybi et al. 2019, arXiv:1909.08053, section 5.3): pre-norm BERT."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei_build.families import bert
from bei_build.families.bert import bert_like_spec, pre_norm
from bei_build.spec.model_spec import ModelSpec


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    return pre_norm(bert_like_spec(config, architecture), embeddings_norm=False)


FAMILY = replace(
    bert.FAMILY,
    model_type="megatron-bert",
    architectures={
        f"Megatron{name}": heads for name, heads in bert.FAMILY.architectures.items() if name.startswith("Bert")
    },
    weights={
        **bert.FAMILY.weights,
        "layers.{i}.attention_norm": "encoder.layer.{i}.attention.ln",
        "layers.{i}.mlp_norm": "encoder.layer.{i}.ln",
        "final_norm": "encoder.ln",
    },
    spec_from_config=_spec_from_config,
)
