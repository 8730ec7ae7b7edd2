"""Certification of a build: verifies the engine here, or prepares its verification on the machine it runs on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import msgspec
import numpy as np

from bei.artifact.certificate.record import Certificate
from bei.artifact.certificate.thresholds import AIMS_OF_ENCODERS, remedies
from bei.artifact.int8 import largest_of
from bei.artifact.manifest import ENGINE_DIR, Manifest
from bei.core import Engine
from bei.errors import VerificationError
from bei.verification.comparison import compare, normalized
from bei.verification.engine_answers import Rows, ask_canary, ask_engine
from bei.verification.retrieval import agreement, ask_retrieval
from bei.verification.stored_answers import RetrievalReference, output_meaning, store_reference_answers
from bei_build.config import BuildConfig
from bei_build.job import Job
from bei_build.progress import Progress
from bei_build.quantization.calibrate import Calibration, reaching, with_more_high
from bei_build.reference.held_out import ENGINE_SHARE, uncompared_certificate
from bei_build.targets.base import Numerics
from bei_build.verification.questions import ExpectedAnswers, Questions

# Manifest and certificate of an artifact.
Certified: TypeAlias = tuple[Manifest, Certificate]


@dataclass(frozen=True)
class VerificationJob:
    """Inputs of a verification: the job, the manifest of the artifact so far, and the scales of a quantized engine."""

    job: Job
    manifest: Manifest
    questions: Questions
    calibration: Calibration | None = None


def certify(work: VerificationJob, name: str, progress: Progress) -> Certified:
    """Manifest and certificate of the artifact called ``name``: verified, or prepared to be verified where its engine
    runs.

    A quantized engine below its thresholds is compiled again with more layers kept in high precision, while more are
    allowed. Raises VerificationError, and the errors of engine and reference.
    """
    absent = work.job.compiler.cannot_run()
    if absent is None:
        answer = _verify(work, progress) if work.job.config.verify else _skip_verification(work, progress)
        return _with_tokens(work, answer)
    answer = _prepare_verification(work, progress)
    progress.note(
        f"not verified, because {absent}: 'bei verify {name}', or the first 'bei serve', does it where the engine "
        "runs; until then the certificate says PENDING"
    )
    return _with_tokens(work, answer)


def _with_tokens(work: VerificationJob, answer: Certified) -> Certified:
    manifest, certificate = answer
    return manifest, msgspec.structs.replace(certificate, tokens=work.questions.tokens)


def _verify(work: VerificationJob, progress: Progress) -> Certified:
    """Verify the engine. It is closed before the reference is opened, because each may fill the memory. Raises
    VerificationError."""
    questions, held_out, found = work.questions, work.questions.held_out, None
    questions.budget.start()
    is_enough = partial(questions.budget.is_used, ENGINE_SHARE)
    with ExitStack() as opened:
        with progress.step("Run engine") as step:
            engine = opened.enter_context(_open(work))
            answers = ask_engine(engine, held_out, questions.outputs, is_enough, step.tell)
            step.details.append(f"{answers.num_texts} texts")
        if questions.retrieval is not None:
            with progress.step("Rank by engine") as step:
                found = ask_retrieval(engine, questions.retrieval, is_enough, step.tell)
                step.details.append(f"{len(questions.retrieval.encodings)} texts")
    expected = questions.expected_answers(progress, answers.num_texts, ranked=found is not None)
    ranked = None
    if questions.retrieval is not None and found is not None and expected.ndcgs is not None:
        ranked = agreement(questions.retrieval, expected.ndcgs, found, questions.thresholds.ndcg_loss)
    with progress.step("Verify") as step:
        certificate = compare(
            answers,
            expected.texts,
            held_out,
            questions.thresholds,
            meaning=output_meaning(work.manifest),
            quantization=work.calibration.record if work.calibration else None,
            retrieval=ranked,
        )
        step.details += summary(certificate)
    higher = None
    if not certificate.passed:
        higher = _with_more_high(work, allowed_share(certificate), progress)
    elif (share := _share_of_aim(work.job, certificate)) < 1:
        higher = _with_more_high(work, share, progress, is_aim=True)
    if higher is not None:
        return _verify(higher, progress)
    check_certificate(work.job.config, certificate, progress)
    if work.calibration is not None:
        work.calibration.write(work.job.root)
    if work.job.config.keep_reference:
        _store_reference(work, expected)
    return with_bytes(work.manifest, answers.rows), certificate


def _skip_verification(work: VerificationJob, progress: Progress) -> Certified:
    with progress.step("Run engine") as step:
        with _open(work) as engine:
            answers = ask_canary(engine, work.questions.held_out, work.questions.outputs[0])
        step.details.append("canary only")
    progress.note("not verified, as --no-verify asked; the certificate says so")
    if work.calibration is not None:
        work.calibration.write(work.job.root)
    return work.manifest, uncompared_certificate(answers, work.questions.held_out)


@contextmanager
def _open(work: VerificationJob) -> Iterator[Engine]:
    with closing(work.job.open_engine(work.job.root / ENGINE_DIR, work.manifest)) as engine:
        yield engine


def _share_of_aim(job: Job, certificate: Certificate) -> float:
    """The share of a quantized engine's changes that the precision's aim allows; 1 where the user named a threshold, or
    there is no aim."""
    aim = AIMS_OF_ENCODERS.get(job.precision)
    if aim is None or job.config.min_cosine is not None or job.checkpoint.family.is_decoder:
        return 1.0
    shares = [(1 - aim) / (1 - row.cosine_mean) for row in certificate.outputs if row.cosine_mean < aim]
    return min(shares, default=1.0)


def _with_more_high(
    work: VerificationJob, share: float, progress: Progress, *, is_aim: bool = False
) -> VerificationJob | None:
    """The engine compiled again with more layers kept in high precision; None where it is not quantized, or no more are
    allowed. ``is_aim``: None too where those that are allowed would not suffice, as they only make it slower."""
    job = work.job
    if work.calibration is None:
        return None
    if is_aim:
        calibration = reaching(job, work.calibration, share, progress)
    else:
        calibration = with_more_high(job, work.calibration, share, progress)
    if calibration is None:
        return None
    shutil.rmtree(job.root / ENGINE_DIR)
    with progress.step("Compile again") as step:
        needs = job.compile(Numerics(job.precision, calibration.quantization), step.say)
        why = "below the aim" if is_aim else "below the thresholds"
        step.details.append(f"{why}; not quantized any more: {', '.join(sorted(calibration.high))}")
    return replace(work, manifest=job.describe(needs), calibration=calibration)


def _prepare_verification(work: VerificationJob, progress: Progress) -> Certified:
    """Store the reference's answers in the artifact, for the machine that the engine runs on."""
    work.questions.budget.start()
    expected = work.questions.expected_answers(progress)
    certificate = _store_reference(work, expected)
    if work.calibration is not None:
        work.calibration.write(work.job.root)
    return with_bytes(work.manifest, expected.texts.rows), certificate


def _store_reference(work: VerificationJob, expected: ExpectedAnswers) -> Certificate:
    """Store ``expected`` in the artifact; returns the certificate of an engine that is yet to be verified."""
    questions, retrieval = work.questions, None
    if questions.retrieval is not None and expected.ndcgs is not None:
        retrieval = RetrievalReference(questions.retrieval, expected.ndcgs)
    return store_reference_answers(
        work.job.root,
        expected.texts,
        questions.held_out,
        expected.canary,
        questions.thresholds,
        allow_below_threshold=work.job.config.allow_below_threshold,
        quantization=work.calibration.record if work.calibration else None,
        retrieval=retrieval,
    )


def allowed_share(certificate: Certificate) -> float:
    """The share of a quantized engine's changes that its thresholds allow: below 1 where cosines miss them."""
    needed = certificate.thresholds
    assert needed is not None, "it was compared"
    shares = [0.5] if certificate.retrieval and certificate.retrieval.failures else []
    for row in certificate.outputs:
        figures = (row.cosine_mean, needed.mean), (row.cosine_p1, needed.p1), (row.cosine_min, needed.min)
        shares += [(1 - least) / (1 - found) for found, least in figures if found < least]
    return min(shares, default=1.0)


def summary(certificate: Certificate) -> list[str]:
    """The certificate in a line."""
    what = "self-consistency: " if certificate.kind == "self-consistency" else ""
    rows = (
        f"{one.output}: mean cosine {one.cosine_mean:.6f}, lowest {one.cosine_min:.6f}" for one in certificate.outputs
    )
    count = f"{certificate.num_texts} of {certificate.num_held_out_texts} texts"
    if certificate.retrieval_is_missing:
        count += "; retrieval not measured: the time was over"
    if ranked := certificate.retrieval:
        count += f"; nDCG@10 {ranked.ndcg_engine:.4f}, the reference's {ranked.ndcg_reference:.4f}"
    return [f"{what}{'; '.join(rows)}, against {certificate.reference}, {count}"]


def check_certificate(config: BuildConfig, certificate: Certificate, progress: Progress) -> None:
    """Raise VerificationError for a failed engine, or note that it is kept all the same."""
    if certificate.passed:
        return
    message = f"{'; '.join(certificate.failures)}, against {certificate.reference}"
    missed = next((row for row in certificate.outputs if row.failures), None)
    if missed is not None:
        message += f"; worst text: {missed.worst_texts[0].text[:60]!r}"
    if not config.allow_below_threshold:
        raise VerificationError(f"Verification failed: {message}. To do: {', or '.join(remedies(certificate))}.")
    progress.note(f"kept although {message}")


def with_bytes(manifest: Manifest, rows: Rows) -> Manifest:
    """``manifest`` with the range of int8 vectors, measured on ``rows`` for the held-out texts."""
    embeddings = rows.get("embedding")
    if manifest.embedding is None or not embeddings:
        return manifest
    largest = largest_of(normalized(np.stack(embeddings)).astype(np.float32))
    return msgspec.structs.replace(
        manifest, embedding=msgspec.structs.replace(manifest.embedding, int8_largest=largest)
    )
