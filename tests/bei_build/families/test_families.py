"""The table of families against transformers itself."""

from __future__ import annotations

import pytest
import transformers
from transformers.activations import ACT2FN

from bei.errors import CheckpointError, UnsupportedArchitectureError
from bei_build.families import FAMILIES, family_of
from bei_build.families.base import Family, activation_named

ARCHITECTURES = [(family, name) for family in FAMILIES for name in family.architectures]


@pytest.mark.parametrize(("family", "architecture"), ARCHITECTURES, ids=[name for _, name in ARCHITECTURES])
def test_architectures_are_classes_of_transformers(family: Family, architecture: str) -> None:
    model_class = getattr(transformers, architecture)
    assert model_class.config_class.model_type == family.model_type
    assert f"{model_class.base_model_prefix}." == family.prefix
    assert family_of(family.model_type, architecture) is family


def test_an_architecture_belongs_to_its_model_type() -> None:
    with pytest.raises(UnsupportedArchitectureError, match=r"RobertaModel \(model type 'bert'\) is not supported"):
        family_of("bert", "RobertaModel")


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish", "tanh"])
def test_known_activations_are_known_to_transformers(name: str) -> None:
    assert name in ACT2FN
    assert activation_named(name)


@pytest.mark.parametrize("name", ["mish", "", None, 3, "GELU"])
def test_unknown_activations_are_refused_with_the_known_ones(name: object) -> None:
    with pytest.raises(CheckpointError, match=r"is not supported\. Supported: gelu, gelu_new"):
        activation_named(name)
