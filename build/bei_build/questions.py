"""What an engine is asked to verify it, and what the reference answers. The reference is asked once a build."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bei.artifact import Thresholds
from bei.certification.answers import HeldOut
from bei.certification.comparison import MIN_COSINES, ReferenceAnswers, thresholds_of
from bei.core import Float32Array
from bei.errors import ConfigError
from bei_build import reference as hf
from bei_build.checkpoint import Checkpoint
from bei_build.config import BuildConfig
from bei_build.job import Job, fp32_compiler, opened_fp32
from bei_build.progress import Progress
from bei_build.targets import Compiler
from bei_build.verification import Budget, EngineReference, Reference, ask_reference, held_out


class Questions:
    """The held-out texts, and the reference's answers to them, asked for once."""

    def __init__(self, job: Job) -> None:
        self.held_out = _held_out(job.checkpoint)
        self.budget = Budget(job.config.verify_budget)
        self.outputs = [str(head.output) for head in job.checkpoint.spec.heads]  # the canary's first
        self._job = job
        self._canary: Float32Array | None = None
        self._answers: ReferenceAnswers | None = None

    @property
    def thresholds(self) -> Thresholds:
        """As the user says, else the precision's."""
        least = self._job.config.min_cosine
        return thresholds_of(MIN_COSINES[self._job.precision] if least is None else least)

    def answered(self, progress: Progress, num_texts: int | None = None) -> tuple[ReferenceAnswers, Float32Array]:
        """The reference's rows for the first ``num_texts`` texts (None: all), and for the canary."""
        if self._answers is None or self._canary is None:
            with progress.step("Ask reference") as step, _reference(self._job) as reference:
                encodings = self.held_out.encodings[:num_texts]
                self._answers = ask_reference(reference, encodings, self.outputs, self.budget)
                self._canary = reference.run([self.held_out.canary], self.outputs[:1])[self.outputs[0]][0]
                step.details.append(f"{self._answers.num_texts} texts, {self._answers.name}")
        return self._answers, self._canary


def check_verifiable(config: BuildConfig, compiler: Compiler, checkpoint: Checkpoint) -> None:
    """Raise ConfigError or MissingDependencyError before anything is compiled that could not be verified then."""
    absent = compiler.cannot_run()
    if config.verify:
        if not _is_hf(config, checkpoint):
            fp32_compiler(config, compiler).check_able()
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


@contextmanager
def _reference(job: Job) -> Iterator[Reference]:
    """The HF model, or bei's own FP32 engine, compiled for the occasion."""
    if _is_hf(job.config, job.checkpoint):
        yield hf.HFReference(job.checkpoint, job.weights)
        return
    with opened_fp32(job, "The FP32 engine to verify with", {}) as (engine, compiler):
        yield EngineReference(engine, f"{compiler} engine, FP32, one text at a time")


def _held_out(checkpoint: Checkpoint) -> HeldOut:
    expansion = next((role.expansion for role in checkpoint.roles.values() if role.expansion), None)
    return held_out(checkpoint.tokenizer, checkpoint.spec, checkpoint.max_seq_len, expansion)
