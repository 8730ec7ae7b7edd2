"""The table of model families. A family is data: an HF config as a ModelSpec, and the names of its tensors.

A new family is one file beside this one and one line in ``FAMILIES``. No family file emits graph nodes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from bei.errors import UnsupportedArchitectureError
from bei_build.families import (
    albert,
    bart,
    bert,
    big_bird,
    clip,
    cohere,
    colpali,
    colqwen2,
    deberta,
    dinov2,
    dinov3,
    distilbert,
    dpr,
    electra,
    embedding_gemma2,
    ernie,
    esm,
    eurobert,
    exaone4,
    gemma,
    gliclass,
    gliner,
    gliner2,
    glirel,
    glm,
    gpt,
    granite,
    gte,
    helium,
    jina,
    jina_v3,
    jina_v5,
    laya,
    lfm2,
    llama,
    megatron_bert,
    modernbert,
    mpnet,
    nemotron,
    nomic,
    nomic_vision,
    nv_embed,
    olmo,
    olmo2,
    opendecider,
    opt,
    phi,
    phi3,
    qwen,
    qwen2_vl,
    qwen3_vl,
    rembert,
    roberta,
    roformer,
    siglip,
    smollm3,
    stablelm,
    starcoder2,
    static,
    t5,
    vit,
)
from bei_build.families.base import Family
from bei_build.families.vision import VisionFamily

FAMILIES: tuple[Family, ...] = (
    bert.FAMILY,
    jina.FAMILY,
    roberta.FAMILY,
    roberta.XLM_FAMILY,
    jina_v3.FAMILY,
    roberta.CAMEMBERT_FAMILY,
    roberta.DATA2VEC_FAMILY,
    roberta.XLM_XL_FAMILY,
    roberta.PRE_NORM_FAMILY,
    roberta.LUKE_FAMILY,
    ernie.FAMILY,
    megatron_bert.FAMILY,
    rembert.FAMILY,
    roformer.FAMILY,
    esm.FAMILY,
    big_bird.FAMILY,
    dpr.QUESTION_FAMILY,
    dpr.CONTEXT_FAMILY,
    distilbert.FAMILY,
    mpnet.FAMILY,
    electra.FAMILY,
    albert.FAMILY,
    deberta.FIRST_FAMILY,
    deberta.FAMILY,
    gliclass.FAMILY,
    gliner.FAMILY,
    gliner2.FAMILY,
    glirel.FAMILY,
    clip.FAMILY,
    siglip.FAMILY,
    siglip.NAFLEX_FAMILY,
    t5.FAMILY,
    t5.MT5_FAMILY,
    bart.FAMILY,
    bart.MBART_FAMILY,
    modernbert.FAMILY,
    modernbert.DECODER_FAMILY,
    laya.FAMILY,
    opendecider.FAMILY,
    eurobert.FAMILY,
    nomic.NOMIC_FAMILY,
    gte.FAMILY,
    llama.FAMILY,
    llama.MISTRAL_FAMILY,
    llama.MINISTRAL_FAMILY,
    llama.MINISTRAL3_FAMILY,
    nv_embed.FAMILY,
    qwen.QWEN2_FAMILY,
    qwen.QWEN3_FAMILY,
    jina_v5.FAMILY,
    phi.FAMILY,
    phi3.FAMILY,
    olmo.FAMILY,
    olmo2.FAMILY,
    olmo2.OLMO3_FAMILY,
    granite.FAMILY,
    gemma.FAMILY,
    gemma.GEMMA2_FAMILY,
    gemma.GEMMA3_FAMILY,
    embedding_gemma2.FAMILY,
    colpali.FAMILY,
    colqwen2.FAMILY,
    colqwen2.ENGINE_FAMILY,
    qwen2_vl.FAMILY,
    qwen2_vl.SECOND_FAMILY,
    qwen3_vl.FAMILY,
    cohere.FAMILY,
    cohere.COHERE2_FAMILY,
    smollm3.FAMILY,
    starcoder2.FAMILY,
    glm.FAMILY,
    glm.GLM4_FAMILY,
    exaone4.FAMILY,
    helium.FAMILY,
    lfm2.FAMILY,
    stablelm.FAMILY,
    nemotron.FAMILY,
    gpt.NEO_FAMILY,
    gpt.J_FAMILY,
    opt.FAMILY,
    static.MODEL2VEC_FAMILY,
    static.SENTENCE_TRANSFORMERS_FAMILY,
    static.SSE_FAMILY,
)

# Image towers, by the classes that have one.
VISION_FAMILIES: Mapping[str, VisionFamily] = {
    name: vision
    for vision in (
        clip.VISION,
        clip.UNPROJECTED_VISION,
        siglip.VISION,
        siglip.NAFLEX_VISION,
        vit.VISION,
        dinov2.VISION,
        dinov2.REGISTERS_VISION,
        dinov3.VISION,
        nomic_vision.VISION,
        colpali.VISION,
        colqwen2.VISION,
        colqwen2.ENGINE_VISION,
        qwen2_vl.VISION,
        qwen2_vl.SECOND_VISION,
        qwen3_vl.VISION,
        embedding_gemma2.VISION,
    )
    for name in vision.family.architectures
}


def vision_family(architecture: str) -> VisionFamily | None:
    """The image tower of the class ``architecture``; None: it has none."""
    return VISION_FAMILIES.get(architecture)


def reads_images_alone(architecture: str) -> bool:
    """True if the class ``architecture`` has an image tower and no other."""
    of_texts = any(architecture in family.architectures for family in FAMILIES)
    return architecture in VISION_FAMILIES and not of_texts


def family_of(model_type: str, architecture: str, config: Mapping[str, Any]) -> Family:
    """The family whose config class is ``model_type`` and that lists ``architecture``, or its variant for ``config``.

    Raises UnsupportedArchitectureError, which names the known architectures of the type, or a type with the same stem.
    """
    for family in FAMILIES:
        if model_type in (family.model_type, *family.aliases):
            read = (family.variant and family.variant(config)) or family
            if architecture in read.architectures:
                return read
    own = next((family for family in FAMILIES if family.model_type == model_type), None)
    if own:
        raise UnsupportedArchitectureError(
            f"Architecture {architecture} of model_type {model_type!r} is not supported; of this type bei builds "
            f"{', '.join(own.architectures)}."
        )
    related = [family.model_type for family in FAMILIES if _stem(family.model_type) == _stem(model_type)]
    nearest = difflib.get_close_matches(model_type, related, n=1, cutoff=0.0)
    raise UnsupportedArchitectureError(
        f"There is no family for model_type {model_type!r} (architecture {architecture})"
        + (f"; the nearest one is {nearest[0]!r}" if nearest else "")
        + ". docs/models.md lists the models that are built."
    )


def _stem(model_type: str) -> str:
    """The leading letters of a type, which qwen2_moe and qwen3 have in common."""
    found = re.match(r"[a-z]+", model_type.lower())
    return found[0] if found else model_type
