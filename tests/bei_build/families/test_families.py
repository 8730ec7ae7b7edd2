"""The table of families against transformers itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import transformers

from bei.errors import UnsupportedArchitectureError
from bei_build.families.base import Family
from bei_build.families.table import FAMILIES, family_of
from bei_build.spec.parts import DenseSpec
from tests.support.zoo import CASES, FIRST_OF_FAMILY, config_of, spec_of

# Classes that came with their authors' own code.
REMOTE_CODE = (
    "ColQwen2",
    "ColQwen2_5",
    "Contriever",
    "DecisionModel",
    "GLiClassModel",
    "GLiNER2",
    "GLiREL",
    "GmeQwen2VL",
    "HF_ColBERT",
    "JinaBertForMaskedLM",
    "JinaBertForSequenceClassification",
    "JinaBertModel",
    "JinaEmbeddingsV5Model",
    "JinaForRanking",
    "JinaVLForRanking",
    "LlamaBidirectionalForSequenceClassification",
    "LlamaBidirectionalModel",
    "NewForMaskedLM",
    "NewForSequenceClassification",
    "NewForTokenClassification",
    "NewModel",
    "NVEmbedModel",
    "NanoModel",
    "NomicBertForPreTraining",
    "PPLXQwen3Model",
    "Qwen2ForRewardModel",
    "Qwen3BidirectionalModel",
    "SSE",
    "StaticEmbedding",
    "StaticModel",
    "UniEncoderSpanGLiNER",
    "UniEncoderTokenGLiNER",
)
ARCHITECTURES = [(family, name) for family in FAMILIES for name in family.architectures]


OF_SEVERAL_TOWERS = (
    "ColPaliForRetrieval",
    "CLIPModel",
    "CLIPTextModel",
    "SiglipModel",
    "Siglip2Model",
    "EmbeddingGemma2Model",
    "EmbeddingGemma2TextModel",
    "ColQwen2ForRetrieval",
    "Qwen2VLForConditionalGeneration",
    "Qwen2VLModel",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen2_5_VLModel",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLModel",
)


@pytest.mark.parametrize(("family", "architecture"), ARCHITECTURES, ids=[name for _, name in ARCHITECTURES])
def test_architectures_are_classes_of_transformers(family: Family, architecture: str) -> None:
    assert family_of(family.model_type, architecture, {}) is family
    if architecture in REMOTE_CODE:
        return
    if architecture in OF_SEVERAL_TOWERS:  # the family reads one
        return
    model_class = getattr(transformers, architecture)
    assert model_class.config_class.model_type == family.model_type
    assert family.prefix in ("", f"{model_class.base_model_prefix}.")  # T5's classes put nothing in front


def test_classes_of_remote_code_are_not_in_transformers() -> None:
    assert [name for name in REMOTE_CODE if hasattr(transformers, name)] == []
    assert set(REMOTE_CODE) <= {name for _, name in ARCHITECTURES}


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family.aliases], ids=lambda family: family.model_type
)
def test_a_model_type_of_remote_code_finds_the_native_family(family: Family) -> None:
    for alias in family.aliases:
        assert family_of(alias, next(iter(family.architectures)), {}) is family


def test_an_architecture_belongs_to_its_model_type() -> None:
    with pytest.raises(UnsupportedArchitectureError, match=r"RobertaModel of model_type 'bert' is not supported"):
        family_of("bert", "RobertaModel", {})


def test_what_norms_add_to_their_weights_is_the_familys() -> None:
    """Stores of other forms of weights ask the family, graphs the norms."""
    for case in FIRST_OF_FAMILY:
        spec = spec_of(case)
        norms = [layer.norm for layer in spec.layers]
        norms += [norm for norm in (spec.final_norm, *(attention.qk_norm for attention in spec.attentions)) if norm]
        family = family_of(config_of(case).model_type, case.architecture, {})
        assert {norm.offset for norm in norms} == {family.norm_offset}, case.name


@pytest.mark.parametrize(("architecture", "activation"), [("NewForMaskedLM", "silu"), ("GteForMaskedLM", "gelu")])
def test_the_own_code_of_gte_scores_words_with_the_configs_activation_and_transformers_with_its_own(
    architecture: str, activation: str
) -> None:
    """modeling.py of Alibaba-NLP/new-impl: ACT2FN[config.hidden_act] in NewLMPredictionHead."""
    case = next(case for case in CASES if case.name == "GteForMaskedLM")
    config = config_of(replace(case, settings={**case.settings, "hidden_act": "silu"}))
    (head,) = family_of("gte", architecture, config.to_dict()).architectures[architecture](config)
    dense = head.token_layers[0]
    assert isinstance(dense, DenseSpec)
    assert dense.activation == activation
