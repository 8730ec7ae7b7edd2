"""``GET /info``: text-embeddings-inference's description of the server, with what bei knows beside it."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

import msgspec
from starlette.responses import Response

from bei.artifact.certificate.record import (
    Calibration,
    Certificate,
    OutputAgreement,
    QuantizationRecord,
    ReferenceComparison,
)
from bei.artifact.manifest import Manifest
from bei.artifact.sides import Role
from bei.artifact.signature import ArtifactSignature
from bei.config.settings import ServeConfig
from bei.errors import InvalidRequestError, ModelNotFoundError
from bei.server.endpoint.examples import EMBEDDER, HEX
from bei.server.endpoint.get_responses import answers
from bei.server.endpoint.models import Models
from bei.server.http.errors import JSON
from bei.server.http.routing import ApiRouter
from bei.service.service import InferenceService
from bei.version import __version__


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


class QuantizationInfo(Calibration, frozen=True, kw_only=True):
    """How the engine was quantized, but for its layers."""

    num_layers: int
    num_high_layers: int


class CertificateInfo(ReferenceComparison, frozen=True, kw_only=True):
    """The certificate of the artifact, but for texts, histograms, layers and the canary: they are for people who look
    at the artifact."""

    verdict: str
    failures: list[str]
    outputs: list[OutputAgreement]
    quantization: QuantizationInfo | None


class SignatureInfo(TypedDict):
    """Who has signed the artifact: ``key`` is the key's fingerprint, as ssh-keygen has it.

    ``checked``: the signature holds (the server lacks the package to find out where it is false). ``trusted``: the key
    is one of those that ``require_signature`` names.
    """

    algorithm: str
    key: str
    checked: bool
    trusted: bool


class ImagesInfo(TypedDict):
    """The size of images as the model reads them, whatever size they come in, and the tokens that one counts for. Where
    images keep their proportions: the size of a square one, and the most tokens."""

    width: int
    height: int
    tokens: int


class Info(TypedDict):
    """TEI's fields first. What bei has no value for is null. ``digest`` is that of the artifact's manifest.

    ``devices``: as the setting has them; empty where there is one that it does not name.
    """

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
    http_workers: int
    devices: list[str]
    version: str
    sha: None
    docker_label: None
    tasks: list[str]
    prompts: list[str]
    roles: dict[Literal["query", "document"], Role]
    target: str
    precision: str
    digest: str
    images: ImagesInfo | None
    certificate: CertificateInfo
    signature: SignatureInfo | None


_EXAMPLE: dict[str, Any] = {
    "model_id": "sentence-transformers/all-MiniLM-L6-v2",
    "model_sha": None,
    "model_dtype": "bfloat16",
    "served_model_name": EMBEDDER,
    "model_type": {"embedding": {"pooling": "mean"}},
    "max_concurrent_requests": 15625,
    "max_input_length": 256,
    "max_batch_tokens": 1024,
    "max_batch_requests": 128,
    "max_client_batch_size": 16384,
    "auto_truncate": True,
    "tokenization_workers": 1,
    "http_workers": 1,
    "devices": [],
    "version": __version__,
    "sha": None,
    "docker_label": None,
    "tasks": ["embed"],
    "prompts": [],
    "roles": {},
    "target": "cpu",
    "precision": "bf16",
    "digest": HEX * 2,
    "images": None,
    "certificate": {
        "kind": "reference",
        "reference": "transformers, FP32, one text at a time",
        "reference_is_independent": True,
        "device": "Intel(R) Xeon(R) Processor",
        "num_texts": 101,
        "num_held_out_texts": 101,
        "texts_sha256": HEX * 2,
        "thresholds": {"mean": 0.999, "p1": 0.99, "min": 0.95, "ndcg_loss": None},
        "passed": True,
        "retrieval": None,
        "tokens": {
            "library": "transformers 5.24.0",
            "tokenizer_class": "BertTokenizer",
            "num_texts": 131,
            "num_pairs": 122,
            "sha256": HEX * 2,
        },
        "canary_output": "embedding",
        "verdict": "passed on 101 texts",
        "failures": [],
        "outputs": [
            {
                "output": "embedding",
                "cosine_mean": 0.999985,
                "cosine_p1": 0.999955,
                "cosine_min": 0.999949,
                "max_abs_difference": 0.00184,
                "ranking_overlap": 0.9941,
                "spearman": 0.99997,
                "kendall_tau": None,
                "label_agreement": None,
                "kl_divergence": None,
                "score_difference": None,
                "span_agreement": None,
                "failures": [],
            }
        ],
        "quantization": None,
    },
    "signature": None,
}


def info_router(models: Models, config: ServeConfig) -> ApiRouter:
    """The route, bound to the served models."""
    router = ApiRouter()

    @router.get("/info", summary="Describe the server (TEI)")
    @answers(InvalidRequestError, ModelNotFoundError, bodies={200: Info}, example=_EXAMPLE)
    async def info(model: str | None = None) -> Response:
        """One model and the server's limits; where several models are served, the query names one."""
        return Response(msgspec.json.encode(describe(models.named(model), config)), media_type=JSON)

    return router


# What TEI calls them.
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_POOLINGS = {"last": "last_token", "sparse": "splade"}


def describe(service: InferenceService, config: ServeConfig) -> Info:
    """The facts of one model of a server with ``config``."""
    manifest, certificate = service.manifest, service.certificate
    return {
        "model_id": manifest.source.model,
        "model_sha": manifest.source.revision,
        "model_dtype": _DTYPES.get(manifest.precision, manifest.precision),
        "served_model_name": manifest.name,
        "model_type": model_type(manifest),
        "max_concurrent_requests": max(1, config.max_queue_tokens // manifest.max_seq_len),
        "max_input_length": manifest.max_seq_len,
        "max_batch_tokens": manifest.max_num_tokens,
        "max_batch_requests": manifest.max_batch_size,
        "max_client_batch_size": config.max_client_batch_size,
        "auto_truncate": config.auto_truncate,
        "tokenization_workers": config.tokenizer_threads,
        "http_workers": config.http_workers,
        "devices": list(config.devices),
        "version": __version__,
        "sha": None,
        "docker_label": None,
        "tasks": manifest.tasks,
        "prompts": sorted(manifest.prompts),
        "roles": manifest.roles,
        "target": manifest.target,
        "precision": manifest.precision,
        "digest": manifest.digest,
        "images": _images(manifest),
        "certificate": _certificate(certificate),
        "signature": _signature(service.signed, is_trusted=config.require_signature is not None),
    }


def _signature(signed: ArtifactSignature | None, *, is_trusted: bool) -> SignatureInfo | None:
    if signed is None:
        return None
    return {"algorithm": signed.algorithm, "key": signed.key, "checked": signed.is_checked, "trusted": is_trusted}


def _images(manifest: Manifest) -> ImagesInfo | None:
    if (tower := manifest.image_tower) is None:
        return None
    height, width = tower.image_size
    return {"width": width, "height": height, "tokens": tower.num_tokens}


def _certificate(certificate: Certificate) -> CertificateInfo:
    return CertificateInfo(
        **_fields(certificate, ReferenceComparison),
        verdict=certificate.verdict,
        failures=certificate.failures,
        outputs=[OutputAgreement(**_fields(row, OutputAgreement)) for row in certificate.outputs],
        quantization=_quantization(certificate.quantization) if certificate.quantization else None,
    )


def _quantization(record: QuantizationRecord) -> QuantizationInfo:
    return QuantizationInfo(
        **_fields(record, Calibration),
        num_layers=len(record.layers),
        num_high_layers=sum(layer.is_high for layer in record.layers),
    )


def _fields(record: msgspec.Struct, form: type[msgspec.Struct]) -> dict[str, Any]:
    """What ``record`` has of the fields of ``form``, on which its own class builds."""
    return {name: getattr(record, name) for name in form.__struct_fields__}


def model_type(manifest: Manifest) -> ModelType:
    """TEI's kinds of models: it has no others, so token classifiers are classifiers, and sparse vectors a pooling."""
    if manifest.classification is not None:
        labels = manifest.classification.labels
        by_index = {str(index): label for index, label in enumerate(labels)}
        named: Labels = {"id2label": by_index, "label2id": {label: index for index, label in enumerate(labels)}}
        return {"reranker": named} if "rerank" in manifest.tasks else {"classifier": named}
    pooling = manifest.embedding.pooling if manifest.embedding else manifest.outputs[0].name
    return {"embedding": {"pooling": _POOLINGS.get(pooling, pooling)}}
