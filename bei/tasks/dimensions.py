"""Vectors that are cut to their first components (Matryoshka, arXiv:2205.13147): to how many, and of which models."""

from __future__ import annotations

from bei.artifact.manifest import Manifest
from bei.errors import InvalidRequestError


def check_dimensions(
    manifest: Manifest, dimensions: int | None, param: str = "dimensions", *, untrained: str = "warn"
) -> str | None:
    """A warning where vectors are cut of a model that does not say that it was trained for it; None where all is well,
    or nothing is cut.

    Raises InvalidRequestError that blames ``param`` where vectors cannot be cut to ``dimensions``, and for such a model
    where ``untrained`` is "refuse".
    """
    if dimensions is None or manifest.embedding is None:
        return None
    width = manifest.dimension("embedding") or 0
    allowed = manifest.embedding.matryoshka_dimensions
    if allowed is not None and dimensions not in (*allowed, width):
        names = ", ".join(map(str, (*allowed, width)))
        raise InvalidRequestError(f"{manifest.name} has dimensions {names}, not {dimensions}.", param)
    if not 1 <= dimensions <= width:
        raise InvalidRequestError(f"{param} must be from 1 to {width}, not {dimensions}.", param)
    if allowed is not None or dimensions == width:
        return None
    unsaid = f"{manifest.name} does not say that its vectors may be cut (Matryoshka)"
    if untrained == "refuse":
        raise InvalidRequestError(f"{unsaid}, and untrained_dimensions is refuse: leave {param} out.", param)
    return f"{unsaid}: those of {dimensions} components may rank much worse"
