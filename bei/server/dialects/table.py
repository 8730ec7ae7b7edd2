"""The dialects that have a mount point, one module each: what their servers answer, as data and small functions."""

from __future__ import annotations

from bei.config.settings import ServeConfig
from bei.server.dialects import cohere, infinity, jina, nim, oip, ollama, tei, vllm, voyage
from bei.server.dialects.base import Dialect
from bei.server.endpoint.models import Models
from bei.server.status.whole_server import WholeServer


def all_dialects(models: Models, config: ServeConfig, server: WholeServer) -> tuple[Dialect, ...]:
    """In the order in which messages name them; ``bei.config.settings.DIALECTS`` has the same names."""
    return (
        tei.dialect(models, config, server),
        cohere.dialect(models, config),
        jina.DIALECT,
        voyage.DIALECT,
        nim.dialect(models, server),
        infinity.dialect(models, server),
        vllm.dialect(models, config, server),
        oip.dialect(models, config.max_client_batch_size, server),
        ollama.dialect(models),
    )
