"""What the packed module has chosen for a GPU, for the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Choices:
    """What was chosen for a model on its device: the ``inputs`` that it reads, the kernel of each attention layer, and
    the ``reasons`` against faster ones."""

    inputs: tuple[str, ...]
    kernels: tuple[Literal["flash", "ragged", "plain"], ...]
    reasons: tuple[str, ...]


def choices_of(model: Any) -> Choices:
    """The choices of ``model``, a ``PackedModel``."""
    layers = model.spec.layers + (model.spec.decoder.layers if model.spec.decoder else ())
    parts = [part for layer in layers for part in (layer.attention, layer.cross_attention) if part is not None]
    choices = [model.choices[part] for part in parts]
    products = model.products.values()
    reasons = (
        *(f"attention of kind {it.kernel}: {', '.join(it.reasons)}" for it in choices if it.reasons),
        *(f"FP8 products of kind {it.product}: {', '.join(it.reasons)}" for it in products if it.reasons),
    )
    return Choices(model.input_names, tuple(it.kernel for it in choices), tuple(dict.fromkeys(reasons)))
