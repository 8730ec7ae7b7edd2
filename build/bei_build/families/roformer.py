"""RoFormer (Su et al. 2021, arXiv:2104.09864): BERT with rotary positions; neighbouring components rotate together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bei_build.families import bert
from bei_build.families.base import Family, activation_named, classifier, embedder, masked_lm, require, token_classifier
from bei_build.families.bert import bert_like_spec
from bei_build.families.rope import plain_rope
from bei_build.spec.model_spec import HeadSpec, ModelSpec

_THETA = 10000.0  # transformers fixes it


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    require(config, "rotary_value", False)
    spec = bert_like_spec(config, architecture)
    width = config.embedding_size if config.embedding_size != config.hidden_size else None
    (layer, *_) = spec.layers
    layer = layer.with_attention(rope=replace(plain_rope(_THETA, spec.attentions[0].head_dim), interleaved=True))
    embeddings = replace(spec.embeddings, max_positions=0, width=width)
    return replace(spec, embeddings=embeddings, layers=(layer,) * len(spec.layers))


def _sines(spec: ModelSpec, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """The content of transformers' position table, [positions, head_dim]: sines, then cosines."""
    head_dim = spec.attentions[0].head_dim
    angles = np.outer(np.arange(shape[0] if shape else 0), _THETA ** (-np.arange(0, head_dim, 2) / head_dim))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def _classifier(config: Any) -> tuple[HeadSpec, ...]:
    activation = activation_named(config.hidden_act)
    return classifier("classifier.dense", "classifier.out", activation=activation)(config)


FAMILY = Family(
    model_type="roformer",
    architectures={
        "RoFormerModel": embedder,
        "RoFormerForMaskedLM": masked_lm(width=lambda config: int(config.embedding_size)),
        "RoFormerForSequenceClassification": _classifier,
        "RoFormerForTokenClassification": token_classifier(),
    },
    prefix="roformer.",
    weights={
        **bert.WEIGHTS,
        "embeddings.projection": "embeddings_project",
        "classifier.dense": "classifier.dense",
        "classifier.out": "classifier.out_proj",
        **{name: stored for name, stored in bert.FAMILY.weights.items() if name.startswith("mlm.")},
    },
    unused=("cls.", "embeddings.position_ids"),
    spec_from_config=_spec_from_config,
    computed={"encoder.embed_positions.weight": _sines},
)
