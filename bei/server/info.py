"""``GET /info``: text-embeddings-inference's description of the server, with what bei knows beside it."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter

from bei import __version__
from bei.artifact import Manifest
from bei.config import ServeConfig
from bei.server.models import Models
from bei.service import InferenceService

# The texts that an engine is furthest from its reference on, and the canary: for people who look at the artifact.
_LEFT_OUT = {"worst_texts", "canary_text", "canary_row"}


def info_router(models: Models, config: ServeConfig) -> APIRouter:
    """The route, bound to the served models."""
    router = APIRouter()

    @router.get("/info", summary="Describe the server (TEI)")
    async def info(model: str | None = None) -> dict[str, Any]:
        """One model and the server's limits; where several models are served, the query names one."""
        return describe(models.named(model), config)

    return router


def describe(service: InferenceService, config: ServeConfig) -> dict[str, Any]:
    """TEI's fields first."""
    manifest = service.manifest
    certificate = msgspec.to_builtins(service.certificate)
    outputs = [{name: value for name, value in row.items() if name not in _LEFT_OUT} for row in certificate["outputs"]]
    return {
        "model_id": manifest.source.model,
        "model_sha": manifest.source.revision,
        "model_dtype": manifest.precision,
        "served_model_name": manifest.name,
        "model_type": model_type(manifest),
        "max_concurrent_requests": max(1, config.max_queue_tokens // manifest.max_seq_len),
        "max_input_length": manifest.max_seq_len,
        "max_batch_tokens": manifest.max_num_tokens,
        "max_batch_requests": manifest.max_batch_size,
        "max_client_batch_size": config.max_client_batch_size,
        "auto_truncate": config.auto_truncate,
        "tokenization_workers": config.tokenizer_threads,
        "version": __version__,
        "sha": None,
        "docker_label": None,
        "tasks": manifest.tasks,
        "prompts": sorted(manifest.prompts),
        "roles": msgspec.to_builtins(manifest.roles),
        "target": manifest.target,
        "precision": manifest.precision,
        "certificate": {name: value for name, value in certificate.items() if name not in _LEFT_OUT}
        | {"outputs": outputs},
    }


def model_type(manifest: Manifest) -> dict[str, Any]:
    """TEI's kinds of models: it has no others, so token classifiers are classifiers, and sparse vectors a pooling."""
    if manifest.classification is not None:
        labels = manifest.classification.labels
        kind = "reranker" if "rerank" in manifest.tasks else "classifier"
        by_index = {str(index): label for index, label in enumerate(labels)}
        return {kind: {"id2label": by_index, "label2id": {label: index for index, label in enumerate(labels)}}}
    return {"embedding": {"pooling": manifest.embedding.pooling if manifest.embedding else manifest.outputs[0].name}}
