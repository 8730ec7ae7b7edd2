"""``GET /info``: text-embeddings-inference's description of the server, with what bei knows beside it."""

from __future__ import annotations

from typing import Literal, TypedDict

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from bei import __version__
from bei.artifact import Agreement, Manifest, Role, Thresholds, Verification
from bei.config import ServeConfig
from bei.errors import InvalidRequestError, ModelNotFoundError
from bei.server.errors import JSON
from bei.server.models import Models
from bei.server.reads import answers
from bei.service import InferenceService


class Labels(TypedDict):
    """As transformers' config.json has them."""

    id2label: dict[str, str]
    label2id: dict[str, int]


class Pooling(TypedDict):
    """Of an embedder; of other models that answer vectors the name of their output."""

    pooling: str


class ModelType(TypedDict, total=False):
    """TEI's kinds of models, of which one is there."""

    embedding: Pooling
    classifier: Labels
    reranker: Labels


class OutputAgreement(TypedDict):
    """One output of the engine against its reference."""

    output: str
    cosine_mean: float
    cosine_p1: float
    cosine_min: float
    max_abs_difference: float
    ranking_overlap: float
    failures: list[str]


class CertificateInfo(TypedDict):
    """The certificate of the artifact, but for texts and the canary: they are for people who look at the artifact."""

    kind: Verification
    reference: str
    device: str
    num_texts: int
    num_held_out_texts: int
    thresholds: Thresholds | None
    passed: bool
    canary_output: str
    outputs: list[OutputAgreement]


class Info(TypedDict):
    """TEI's fields first. What bei has no value for is null."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: ModelType
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: None
    docker_label: None
    tasks: list[str]
    prompts: list[str]
    roles: dict[Literal["query", "document"], Role]
    target: str
    precision: str
    certificate: CertificateInfo


def info_router(models: Models, config: ServeConfig) -> APIRouter:
    """The route, bound to the served models."""
    router = APIRouter()

    @router.get("/info", summary="Describe the server (TEI)", response_model=None)
    @answers(InvalidRequestError, ModelNotFoundError, bodies={200: Info})
    async def info(model: str | None = None) -> Response:
        """One model and the server's limits; where several models are served, the query names one."""
        return Response(msgspec.json.encode(describe(models.named(model), config)), media_type=JSON)

    return router


def describe(service: InferenceService, config: ServeConfig) -> Info:
    """What a server with ``config`` says of one of its models."""
    manifest, certificate = service.manifest, service.certificate
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
        "roles": manifest.roles,
        "target": manifest.target,
        "precision": manifest.precision,
        "certificate": {
            "kind": certificate.kind,
            "reference": certificate.reference,
            "device": certificate.device,
            "num_texts": certificate.num_texts,
            "num_held_out_texts": certificate.num_held_out_texts,
            "thresholds": certificate.thresholds,
            "passed": certificate.passed,
            "canary_output": certificate.canary_output,
            "outputs": [_agreement(row) for row in certificate.outputs],
        },
    }


def _agreement(row: Agreement) -> OutputAgreement:
    return {
        "output": row.output,
        "cosine_mean": row.cosine_mean,
        "cosine_p1": row.cosine_p1,
        "cosine_min": row.cosine_min,
        "max_abs_difference": row.max_abs_difference,
        "ranking_overlap": row.ranking_overlap,
        "failures": row.failures,
    }


def model_type(manifest: Manifest) -> ModelType:
    """TEI's kinds of models: it has no others, so token classifiers are classifiers, and sparse vectors a pooling."""
    if manifest.classification is not None:
        labels = manifest.classification.labels
        by_index = {str(index): label for index, label in enumerate(labels)}
        named: Labels = {"id2label": by_index, "label2id": {label: index for index, label in enumerate(labels)}}
        return {"reranker": named} if "rerank" in manifest.tasks else {"classifier": named}
    return {"embedding": {"pooling": manifest.embedding.pooling if manifest.embedding else manifest.outputs[0].name}}
