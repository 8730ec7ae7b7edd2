"""A build of a model that reads images alone: an image tower, compiled and verified, without a tokenizer."""

from __future__ import annotations

import hashlib
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bei.artifact.certificate.record import Certificate, ImageAgreement
from bei.artifact.certificate_faults import SHARED_WITH_IMAGES
from bei.artifact.manifest import (
    SCHEMA_VERSION,
    Artifact,
    CheckpointSource,
    Embedding,
    EngineRequirements,
    Manifest,
    OutputInfo,
)
from bei.core import Limits
from bei.errors import ConfigError
from bei.version import __version__
from bei_build.checkpoint.image_tower import ImageCheckpoint
from bei_build.checkpoint.read import source_of
from bei_build.config import BuildConfig
from bei_build.job import Job, OpenEngine
from bei_build.limits import limits_of
from bei_build.output_folder import scratch_folder, seal
from bei_build.progress import Progress
from bei_build.spec.model_spec import Output
from bei_build.targets.base import Compiler
from bei_build.verification.certify import with_bytes
from bei_build.verification.images import check_buildable, check_reference, compile_and_verify

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

# Settings that such a build honours. All others are of texts.
_HONOURED = frozenset(
    (
        *("model", "out", "target", "precision", "name", "revision", "task", "normalize", "images", "texts"),
        *("max_num_tokens", "max_batch_size", "compute_capability"),
        # TensorRT's.
        *("attention_lowering", "latency_tokens", "latency_sequences", "hardware_compatible", "strip_weights"),
        *("plan_of", "timing_cache"),
        *("min_cosine", "allow_below_threshold", "reference", "verify", "verify_retrieval"),
        *("sign", "sign_passphrase", "sign_passphrase_file"),
    )
)
_OUTPUT: Output = "embedding"


def check_image_model(config: BuildConfig, images: ImageCheckpoint, compiler: Compiler, precision: str) -> None:
    """Raise ConfigError for settings that are not honoured, CheckpointError for invalid weights, and what
    ``check_buildable`` raises."""
    what = f"{images.checkpoint.spec.architecture} is built for images alone"
    if config.max_image_pixels is not None:
        raise ConfigError("max_image_pixels is of images that a decoder reads among tokens: leave it out.")
    for option in fields(config):
        if option.name not in _HONOURED and getattr(config, option.name) != _default(option):
            raise ConfigError(f"{option.name} is a setting of texts, and {what}: leave it out.")
    if config.task not in ("auto", "embed"):
        raise ConfigError(f"task is {config.task}, and {what}, which have embeddings: leave it out.")
    if config.verify_retrieval:
        raise ConfigError(f"The bundled retrieval set has texts, and {what}: leave verify_retrieval out.")
    if not config.images:
        raise ConfigError(f"{what}: leave --no-images out.")
    check_buildable(config, precision, compiler, has_texts=False)
    check_reference(config, images)
    images.checkpoint.weights().close()


def _default(option: Field[Any]) -> object:
    return option.default if option.default_factory is MISSING else option.default_factory()


def build_image_model(
    config: BuildConfig,
    images: ImageCheckpoint,
    compiler: Compiler,
    precision: str,
    out: Path,
    key: Ed25519PrivateKey | None,
    open_engine: OpenEngine,
    progress: Progress,
) -> Artifact:
    """Build the tower into ``out``, after ``check_image_model``. Raises what ``bei_build.pipeline.build`` does."""
    checkpoint = images.checkpoint
    limits = limits_of(config, compiler, checkpoint.max_seq_len)
    with scratch_folder(out, progress) as scratch:
        with checkpoint.weights() as weights:
            with progress.step("Hash checkpoint"):
                source = source_of(checkpoint)

            def describe(needs: EngineRequirements) -> Manifest:
                return _manifest(config, images, source, precision, limits, needs)

            job = Job(config, compiler, precision, checkpoint, weights, limits, scratch, describe, open_engine)
            manifest, agreement, rows = compile_and_verify(job, images, progress)
        artifact = seal(scratch, out, with_bytes(manifest, rows), _certificate(agreement), key, progress)
    progress.finish(f"Built {out}")
    return artifact


def _manifest(
    config: BuildConfig,
    images: ImageCheckpoint,
    source: CheckpointSource,
    precision: str,
    limits: Limits,
    needs: EngineRequirements,
) -> Manifest:
    checkpoint, tower = images.checkpoint, images.tower(needs, limits)
    files = checkpoint.files
    wanted = config.normalize if config.normalize is not None else files.normalize
    return Manifest(
        schema_version=SCHEMA_VERSION,
        bei_version=__version__,
        name=config.name or checkpoint.location.name,
        source=source,
        tasks=["embed"],
        spec=tower.spec,
        outputs=[OutputInfo(name=_OUTPUT, dimension=checkpoint.spec.dimensions[_OUTPUT])],
        embedding=Embedding(
            pooling=tower.pooling,
            normalize=wanted is not False,
            similarity=files.similarity,
            matryoshka_dimensions=None,
            int8_largest=None,  # set from the engine's answers
            layers_follow_pooling=checkpoint.spec.heads[0].layers != (),
        ),
        classification=None,
        rerank_template=None,
        tokenization=None,
        prompts={},
        default_prompt_name=None,
        roles={},
        target=config.target,
        precision=precision,
        engine=needs,
        max_num_tokens=limits.max_num_tokens,
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
        verification="none",  # and the files: sealing the artifact sets them
        files=[],
        images=tower,
    )


def _certificate(agreement: ImageAgreement) -> Certificate:
    """That of a model without texts, whose figures are those of images."""
    return Certificate(
        **{name: getattr(agreement, name) for name in SHARED_WITH_IMAGES},
        num_texts=0,
        num_held_out_texts=0,
        texts_sha256=hashlib.sha256().hexdigest(),
        outputs=[],
        canary_text="",
        canary_output=_OUTPUT,
        images=agreement,
    )
