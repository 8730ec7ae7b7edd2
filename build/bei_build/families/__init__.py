"""Model families. A family is data: how an HF config reads as a ModelSpec, and what its tensors are called.

Adding a family is one file beside this one and one line in ``FAMILIES``. No family file emits graph nodes.
"""

from __future__ import annotations

import difflib

from bei.errors import UnsupportedArchitectureError
from bei_build.families import bert, distilbert, roberta
from bei_build.families.base import Family

FAMILIES: tuple[Family, ...] = (
    bert.FAMILY,
    roberta.FAMILY,
    roberta.XLM_FAMILY,
    distilbert.FAMILY,
)


def family_of(model_type: str, architecture: str) -> Family:
    """The family whose config class is ``model_type`` and that lists ``architecture``.

    Raises UnsupportedArchitectureError with the supported names and the nearest one.
    """
    for family in FAMILIES:
        if family.model_type == model_type and architecture in family.architectures:
            return family
    supported = [name for family in FAMILIES for name in family.architectures]
    near = difflib.get_close_matches(architecture, supported, n=1, cutoff=0.0)
    raise UnsupportedArchitectureError(
        f"Architecture {architecture} (model type {model_type!r}) is not supported; the nearest supported one is "
        f"{near[0]}. Supported: {', '.join(supported)}."
    )
