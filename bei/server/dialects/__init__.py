"""The dialects that have a mount point, one module each: what their servers answer, as data and small functions."""

from __future__ import annotations

from bei.config import ServeConfig
from bei.metrics import Metrics
from bei.server.dialect import Dialect
from bei.server.dialects import cohere, infinity, jina, nim, tei, vllm, voyage
from bei.server.models import Models


def all_dialects(models: Models, config: ServeConfig, metrics: Metrics) -> tuple[Dialect, ...]:
    """In the order in which messages name them; ``bei.config.DIALECTS`` has the same names."""
    return (
        tei.dialect(models, config, metrics),
        cohere.DIALECT,
        jina.DIALECT,
        voyage.DIALECT,
        nim.dialect(models, metrics),
        infinity.dialect(models, metrics),
        vllm.dialect(models, config, metrics),
    )
