"""Model families. A family is data: how an HF config reads as a ModelSpec, and what its tensors are called.

Adding a family is one file beside this one and one line in ``FAMILIES``. No family file emits graph nodes.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from bei.errors import UnsupportedArchitectureError
from bei_build.families import (
    albert,
    bert,
    deberta,
    distilbert,
    electra,
    eurobert,
    gemma,
    granite,
    gte,
    jina,
    llama,
    modernbert,
    mpnet,
    nomic,
    olmo2,
    phi3,
    qwen,
    roberta,
    static,
)
from bei_build.families.base import Family

FAMILIES: tuple[Family, ...] = (
    bert.FAMILY,
    jina.FAMILY,
    roberta.FAMILY,
    roberta.XLM_FAMILY,
    roberta.CAMEMBERT_FAMILY,
    distilbert.FAMILY,
    mpnet.FAMILY,
    electra.FAMILY,
    albert.FAMILY,
    deberta.FAMILY,
    modernbert.FAMILY,
    eurobert.FAMILY,
    nomic.NOMIC_FAMILY,
    gte.FAMILY,
    llama.FAMILY,
    llama.MISTRAL_FAMILY,
    qwen.QWEN2_FAMILY,
    qwen.QWEN3_FAMILY,
    phi3.FAMILY,
    olmo2.FAMILY,
    granite.FAMILY,
    gemma.FAMILY,
    gemma.GEMMA2_FAMILY,
    gemma.GEMMA3_FAMILY,
    static.MODEL2VEC_FAMILY,
    static.SENTENCE_TRANSFORMERS_FAMILY,
)


def family_of(model_type: str, architecture: str, config: Mapping[str, Any]) -> Family:
    """The family whose config class is ``model_type`` and that lists ``architecture``, or its variant for ``config``.

    Raises UnsupportedArchitectureError with the supported names and the nearest one.
    """
    for family in FAMILIES:
        if model_type in (family.model_type, *family.aliases) and architecture in family.architectures:
            return (family.variant and family.variant(config)) or family
    supported = [name for family in FAMILIES for name in family.architectures]
    own = [name for family in FAMILIES if family.model_type == model_type for name in family.architectures]
    near = difflib.get_close_matches(architecture, own or supported, n=1, cutoff=0.0)
    raise UnsupportedArchitectureError(
        f"Architecture {architecture} (model type {model_type!r}) is not supported; the nearest supported one is "
        f"{near[0]}. Supported: {', '.join(supported)}."
    )
