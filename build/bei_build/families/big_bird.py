"""BigBird (Zaheer et al. 2020, arXiv:2007.14062), where all tokens attend to each other: then it is BERT.

``block_sparse`` attention equals full attention up to the length from which transformers cuts a text into blocks. In
longer texts tokens attend to random blocks, different ones at each start: such texts are not supported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei_build.families import bert
from bei_build.families.base import HeadsOf, activation_named, classifier, require
from bei_build.families.bert import bert_like_spec
from bei_build.spec.model_spec import HeadSpec, ModelSpec


def _spec_from_config(config: Any, architecture: str) -> ModelSpec:
    require(config, "attention_type", "original_full", "block_sparse")
    spec = bert_like_spec(config, architecture)
    scale = config.hidden_size**0.5 if config.rescale_embeddings else 1.0
    attention = replace(spec.attentions[0], bias=config.use_bias)
    is_sparse = config.attention_type == "block_sparse"
    return replace(
        spec,
        embeddings=replace(spec.embeddings, scale=scale),
        layers=(replace(spec.layers[0], attention=attention),) * len(spec.layers),
        longest=(5 + 2 * config.num_random_blocks) * config.block_size if is_sparse else None,
    )


def _classifier(config: Any) -> tuple[HeadSpec, ...]:
    activation = activation_named(config.hidden_act)
    return classifier("classifier.dense", "classifier.out", activation=activation)(config)


_HEADS: dict[str, HeadsOf] = {
    name.replace("Bert", "BigBird"): heads
    for name, heads in bert.FAMILY.architectures.items()
    if name.startswith("Bert")
}

FAMILY = replace(
    bert.FAMILY,
    model_type="big_bird",
    architectures={**_HEADS, "BigBirdForSequenceClassification": _classifier},
    weights={
        **bert.FAMILY.weights,
        "classifier.dense": "classifier.dense",
        "classifier.out": "classifier.out_proj",
    },
    spec_from_config=_spec_from_config,
)
