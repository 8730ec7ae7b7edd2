"""The last question of a build: is the engine what it should be? Asked here, or left to the machine it runs on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from bei.artifact import ENGINE_DIR, Certificate, EngineRequirements, Manifest, QuantizationRecord, Thresholds
from bei.byte_vectors import largest_of
from bei.certification.answers import HeldOut, Rows, ask_canary, ask_engine
from bei.certification.comparison import compare, normalized
from bei.certification.retrieval import RetrievalQuestions, agreement, ask_retrieval
from bei.certification.stored import RetrievalReference, keep, meaning_of
from bei.certification.thresholds import QUANTIZED, min_cosine_of, remedies, thresholds_of
from bei.core import Engine, Limits
from bei.errors import ConfigError, VerificationError
from bei_build import memory
from bei_build import reference as hf
from bei_build.checkpoint import Checkpoint
from bei_build.config import BuildConfig
from bei_build.model_weights import ModelWeights
from bei_build.progress import Progress
from bei_build.retrieval import bundled, check_ranks, questions_of
from bei_build.spec import ModelSpec
from bei_build.targets import Compiler, Say, compiler_for
from bei_build.verification import (
    ENGINE_SHARE,
    Budget,
    EngineReference,
    Reference,
    ask_reference,
    held_out,
    rank_by_reference,
    uncertified,
)

# The manifest and the certificate of an artifact.
Certified: TypeAlias = tuple[Manifest, Certificate]

# Opens a compiled engine; the runtime's loader is handed in, so that what is verified is what will be served.
OpenEngine = Callable[[Path, Manifest], Engine]


def compiled(
    compiler: Compiler, spec: ModelSpec, weights: ModelWeights, precision: str, limits: Limits, root: Path, say: Say
) -> EngineRequirements:
    """What ``compiler`` writes into the engine folder of the artifact at ``root``, and what that needs."""
    folder = root / ENGINE_DIR
    folder.mkdir()
    return compiler.compile(spec, weights, precision, limits, folder, say)


@dataclass(frozen=True)
class Verification:
    """What verifying takes. ``manifest`` and ``root`` are of the artifact under construction.

    ``quantization``: how the engine was quantized, for its certificate.
    """

    config: BuildConfig
    compiler: Compiler
    checkpoint: Checkpoint
    weights: ModelWeights
    manifest: Manifest
    root: Path
    open_engine: OpenEngine
    quantization: QuantizationRecord | None = None

    @property
    def outputs(self) -> list[str]:
        """Names, the canary's first."""
        return [head.output for head in self.checkpoint.spec.heads]

    @property
    def thresholds(self) -> Thresholds:
        """As the user says, else the precision's."""
        least = self.config.min_cosine
        if least is None:
            least = min_cosine_of(self.manifest.precision, is_decoder=self.checkpoint.family.is_decoder)
        return thresholds_of(least, retrieval=self.retrieval is not None)

    @cached_property
    def retrieval(self) -> RetrievalQuestions | None:
        """What is asked of the bundled set; None where retrieval is not to be measured."""
        is_asked = self.config.verify_retrieval
        if not (self.manifest.precision in QUANTIZED if is_asked is None else is_asked):
            return None
        found = questions_of(self.manifest, self.checkpoint.spec, self.checkpoint.tokenizer, bundled())
        if found is None and is_asked:
            raise ConfigError("--verify-retrieval: the model's tokenizer has no tokens for the texts. Leave it out.")
        return found


def certified(work: Verification, name: str, progress: Progress) -> Certified:
    """The manifest and certificate of the artifact called ``name``, verified, or to be verified where its engine runs.

    Raises VerificationError, and what engine and reference raise.
    """
    questions, budget = _held_out(work.checkpoint), Budget(work.config.verify_budget)
    absent = work.compiler.cannot_run()
    if absent is None:
        return _verified(work, questions, budget, progress)
    answer = _to_be_verified(work, questions, budget, progress)
    progress.note(
        f"not verified, because {absent}: 'bei verify {name}', or the first 'bei serve', does it where the engine "
        "runs; until then the certificate says PENDING"
    )
    return answer


def _verified(work: Verification, questions: HeldOut, budget: Budget, progress: Progress) -> Certified:
    """The engine is closed before the reference is opened: each may fill the memory. Raises VerificationError."""
    config, found = work.config, None
    with progress.step("Run engine") as step:
        with closing(work.open_engine(work.root / ENGINE_DIR, work.manifest)) as engine:
            if config.verify:
                answers = ask_engine(engine, questions, work.outputs, lambda: budget.is_used(ENGINE_SHARE))
                if work.retrieval is not None:
                    found = ask_retrieval(engine, work.retrieval, lambda: budget.is_used(ENGINE_SHARE))
            else:
                answers = ask_canary(engine, questions, work.outputs[0])
        step.details.append(f"{answers.num_texts} texts" if config.verify else "canary only")
    manifest = _with_bytes(work.manifest, answers.rows)
    if not config.verify:
        progress.note("not verified, as --no-verify asked; the certificate says so")
        return manifest, uncertified(answers, questions)
    with progress.step("Verify") as step, _reference(work) as reference:
        encodings = questions.encodings[: answers.num_texts]
        expected = ask_reference(reference, encodings, work.outputs, budget)
        ranked = None
        if work.retrieval is not None and found is not None:
            theirs = rank_by_reference(reference, work.retrieval, budget)
            ranked = None if theirs is None else agreement(work.retrieval, theirs, found, work.thresholds.ndcg_loss)
        certificate = compare(
            answers,
            expected,
            questions,
            work.thresholds,
            meaning=meaning_of(manifest),
            quantization=work.quantization,
            retrieval=ranked,
        )
        step.details += _figures(certificate)
    _check_certificate(config, certificate, progress)
    return manifest, certificate


def _to_be_verified(work: Verification, questions: HeldOut, budget: Budget, progress: Progress) -> Certified:
    """The reference's answers are kept in the artifact, for the machine that the engine runs on."""
    with progress.step("Ask reference") as step, _reference(work) as reference:
        expected = ask_reference(reference, questions.encodings, work.outputs, budget)
        canary = reference.run([questions.canary], work.outputs[:1])[work.outputs[0]][0]
        step.details.append(f"{expected.num_texts} texts, {expected.name}")
        ndcgs = rank_by_reference(reference, work.retrieval, budget) if work.retrieval else None
    certificate = keep(
        work.root,
        expected,
        questions,
        canary,
        work.thresholds,
        allow_below_threshold=work.config.allow_below_threshold,
        quantization=work.quantization,
        retrieval=RetrievalReference(work.retrieval, ndcgs) if work.retrieval and ndcgs is not None else None,
    )
    return _with_bytes(work.manifest, expected.rows), certificate


def check_verifiable(config: BuildConfig, compiler: Compiler, checkpoint: Checkpoint) -> None:
    """Raise ConfigError or MissingDependencyError before anything is compiled that could not be verified then."""
    absent = compiler.cannot_run()
    if config.verify_retrieval:
        check_ranks(checkpoint.spec, checkpoint.max_seq_len)
    if config.verify:
        if not _is_hf(config, checkpoint):
            _engine_compiler(config, compiler).check_able()
    elif absent is not None:
        raise ConfigError(
            f"--no-verify: engines for {config.target} cannot run here ({absent}), so nothing would say what this one "
            "is to answer. Leave it out; --verify-budget SECONDS bounds what is kept for verifying it."
        )


def _is_hf(config: BuildConfig, checkpoint: Checkpoint) -> bool:
    """Whether the reference is the HF model. Raises ConfigError where that was asked for and cannot be."""
    is_known = checkpoint.family.reference_class is not None
    if config.reference == "auto":
        return is_known and hf.is_available()
    if config.reference == "hf" and not is_known:
        raise ConfigError(
            f"--reference hf: transformers has no {checkpoint.spec.architecture}. Use --reference engine."
        )
    if config.reference == "hf" and not hf.is_available():
        raise ConfigError("--reference hf needs torch, which is not installed: use --reference engine.")
    return config.reference == "hf"


def _engine_compiler(config: BuildConfig, compiler: Compiler) -> Compiler:
    """Of bei's own FP32 engine. Where the target's engines cannot run, or not in FP32, the CPU's can."""
    is_able = "fp32" in compiler.precisions and compiler.cannot_run() is None
    return compiler if is_able else compiler_for(BuildConfig(model=config.model))


@contextmanager
def _reference(work: Verification) -> Iterator[Reference]:
    """The HF model, or bei's own FP32 engine, compiled for the occasion."""
    config, checkpoint = work.config, work.checkpoint
    if _is_hf(config, checkpoint):
        yield hf.HFReference(checkpoint, work.weights)
        return
    memory.require(4 * checkpoint.spec.num_parameters, "The FP32 engine to verify with")
    compiler = _engine_compiler(config, work.compiler)
    with tempfile.TemporaryDirectory(dir=work.root) as root:
        limits = work.manifest.limits
        needs = compiled(compiler, checkpoint.spec, work.weights, "fp32", limits, Path(root), lambda _: None)
        target = config.target if compiler is work.compiler else "cpu"
        manifest = msgspec.structs.replace(work.manifest, target=target, precision="fp32", engine=needs)
        with closing(work.open_engine(Path(root) / ENGINE_DIR, manifest)) as engine:
            yield EngineReference(engine, f"{needs.compiler} engine, FP32, one text at a time")


def _figures(certificate: Certificate) -> list[str]:
    """The certificate in a line."""
    what = "self-consistency: " if certificate.kind == "self-consistency" else ""
    figures = (
        f"{one.output}: mean cosine {one.cosine_mean:.6f}, lowest {one.cosine_min:.6f}" for one in certificate.outputs
    )
    count = f"{certificate.num_texts} of {certificate.num_held_out_texts} texts"
    if certificate.retrieval_is_missing:
        count += "; retrieval not measured: the time was over"
    if ranked := certificate.retrieval:
        count += f"; nDCG@10 {ranked.ndcg_engine:.4f}, the reference's {ranked.ndcg_reference:.4f}"
    return [f"{what}{'; '.join(figures)}, against {certificate.reference}, {count}"]


def _check_certificate(config: BuildConfig, certificate: Certificate, progress: Progress) -> None:
    if certificate.passed:
        return
    message = f"{'; '.join(certificate.failures)}, against {certificate.reference}"
    missed = next((row for row in certificate.outputs if row.failures), None)
    if missed is not None:
        message += f"; worst text: {missed.worst_texts[0].text[:60]!r}"
    if not config.allow_below_threshold:
        raise VerificationError(f"Verification failed: {message}. To do: {', or '.join(remedies(certificate))}.")
    progress.note(f"kept although {message}")


def _with_bytes(manifest: Manifest, rows: Rows) -> Manifest:
    """``manifest`` with the range of vectors of bytes, by ``rows`` for the held-out texts."""
    embeddings = rows.get("embedding")
    if manifest.embedding is None or not embeddings:
        return manifest
    largest = largest_of(normalized(np.stack(embeddings)).astype(np.float32))
    return msgspec.structs.replace(
        manifest, embedding=msgspec.structs.replace(manifest.embedding, int8_largest=largest)
    )


def _held_out(checkpoint: Checkpoint) -> HeldOut:
    expansion = next((role.expansion for role in checkpoint.roles.values() if role.expansion), None)
    return held_out(checkpoint.tokenizer, checkpoint.spec, checkpoint.max_seq_len, expansion)
