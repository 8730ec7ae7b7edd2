"""OpenDecider-nano (manjunathshiva/opendecider), decisions by a ModernBERT: an MLP scores each token as an option's
marker.

Its config is that of the encoder under a model type of bei's own, and its head has a file (``checkpoint.opendecider``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bei_build.families import modernbert
from bei_build.spec.model_spec import HeadSpec
from bei_build.spec.parts import DenseSpec, NormLayerSpec, NormSpec

MODEL_TYPE = "opendecider"
ARCHITECTURE = "NanoModel"
ENCODER = modernbert.FAMILY.model_type


def _scores(config: Any) -> tuple[HeadSpec, ...]:
    width = config.hidden_size
    layers = (
        DenseSpec("scorer.dense", width, width, activation="gelu"),
        NormLayerSpec("scorer.norm", width, NormSpec(1e-5)),  # torch's default
        DenseSpec("scorer.out", width, 1),
    )
    return (HeadSpec("option_logits", token_layers=layers),)


FAMILY = replace(
    modernbert.FAMILY,
    aliases=(MODEL_TYPE,),
    architectures={ARCHITECTURE: _scores},
    reference_class=None,  # transformers has no such head
)
