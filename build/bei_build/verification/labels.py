"""The tower of labels of a build: compiled and certified like a model of its own, before that of texts, whose questions
need vectors of labels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from bei.artifact.certificate.record import Certificate
from bei.artifact.manifest import ENGINE_DIR, LABELS_DIR, TOKENIZER, EngineRequirements, LabelTower, Manifest
from bei.core import LabelVectors, Limits
from bei.tokenizer.encoder import TextEncoder
from bei.tokenizer.label_encoder import LabelEncoder, LabelText, vectors_of
from bei.verification.engine_answers import run
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.config import BuildConfig
from bei_build.job import Job
from bei_build.limits import limits_of
from bei_build.progress import Progress
from bei_build.targets.base import Numerics
from bei_build.verification.certify import VerificationJob, certify
from bei_build.verification.questions import SPAN_LABELS, Questions

_OUTPUT = "embedding"


@dataclass(frozen=True)
class BuiltLabels:
    """``vectors``: of the labels that the questions about texts have."""

    tower: LabelTower
    certificate: Certificate
    vectors: LabelVectors

    def added(self, manifest: Manifest, certificate: Certificate) -> tuple[Manifest, Certificate]:
        """Manifest and certificate of the whole model, of those of the tower of texts."""
        passed = certificate.passed and self.certificate.passed
        return (
            msgspec.structs.replace(manifest, labels=self.tower),
            msgspec.structs.replace(certificate, labels=self.certificate, passed=passed),
        )


def config_of_labels(config: BuildConfig) -> BuildConfig:
    """Without the settings of texts. Vectors of labels keep their lengths."""
    return BuildConfig(
        model=config.model,
        target=config.target,
        precision=config.precision,
        name=config.name,
        normalize=False,
        verify=config.verify,
        verify_budget=config.verify_budget,
        min_cosine=config.min_cosine,
        allow_below_threshold=config.allow_below_threshold,
        reference=config.reference,
    )


def build_label_tower(
    job: Job,
    labels: Checkpoint,
    describe: Callable[[BuildConfig, Limits, EngineRequirements], Manifest],
    progress: Progress,
) -> BuiltLabels:
    """Into the artifact of ``job``, which is that of texts. Raises what a build raises."""
    root, config = job.root / LABELS_DIR, config_of_labels(job.config)
    root.mkdir()
    limits = limits_of(job.config, job.compiler, labels.max_seq_len)
    labels.tokenizer.save(str(root / TOKENIZER), pretty=False)
    with labels.weights() as weights:
        own = replace(
            job,
            config=config,
            checkpoint=labels,
            weights=weights,
            limits=limits,
            root=root,
            describe=lambda needs: describe(config, limits, needs),
        )
        questions = Questions(own, progress)
        with progress.step(f"Compile labels ({config.target}, {job.precision})") as step:
            needs = own.compile(Numerics(job.precision), step.say)
            step.details.append(f"{labels.spec.num_parameters / 1e6:.1f} M parameters")
        manifest, certificate = certify(VerificationJob(own, own.describe(needs), questions), LABELS_DIR, progress)
    assert manifest.embedding is not None, "its only head"
    assert manifest.tokenization is not None, "it reads texts"
    tower = LabelTower(
        spec=manifest.spec,
        outputs=manifest.outputs,
        embedding=manifest.embedding,
        tokenization=manifest.tokenization,
        engine=needs,
        max_num_tokens=limits.max_num_tokens,
        max_batch_size=limits.max_batch_size,
        max_seq_len=limits.max_seq_len,
    )
    return BuiltLabels(tower, certificate, _vectors(own, manifest))


def _vectors(job: Job, manifest: Manifest) -> LabelVectors:
    encoder = LabelEncoder(TextEncoder(job.root / TOKENIZER, manifest.max_seq_len), manifest.max_seq_len)
    encodings = encoder.encode([LabelText(label) for label in SPAN_LABELS])
    with closing(job.open_engine(job.root / ENGINE_DIR, manifest)) as engine:
        return vectors_of(np.stack(run(engine, encodings, [_OUTPUT])[_OUTPUT]))
