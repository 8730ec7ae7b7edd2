"""Verification of a quantization whose engine cannot run here: ONNX Runtime emulates the engine's rounding."""

from __future__ import annotations

import msgspec

from bei.verification.comparison import compare
from bei.verification.engine_answers import EngineAnswers, ask_engine
from bei.verification.stored_answers import output_meaning
from bei_build import memory
from bei_build.job import Job
from bei_build.progress import Progress
from bei_build.quantization.calibrate import Calibration, with_more_high
from bei_build.quantization.emulation import emulated_engine
from bei_build.verification.certify import allowed_share, check_certificate, summary
from bei_build.verification.questions import NOT_COMPILED, Questions


def meet_thresholds(job: Job, calibration: Calibration, questions: Questions, progress: Progress) -> Calibration:
    """``calibration`` with as many layers kept in high precision as the thresholds require.

    Raises VerificationError where they are missed all the same, unless the build was told to keep such an engine; and
    MissingDependencyError, EngineError. Where memory does not suffice, a note says so.
    """
    needed, available = 4 * job.checkpoint.spec.num_parameters, memory.available_bytes()
    if available is not None and needed > available:
        progress.note(
            f"not emulated: that takes {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are available. "
            "Whether the quantized engine is good enough shows where it is verified."
        )
        return calibration
    while True:
        answers = _answers(job, calibration, questions, progress)
        questions.budget.start()  # of the reference alone
        expected = questions.expected_answers(progress)
        with progress.step("Verify emulation") as step:
            meaning, record = output_meaning(job.describe(NOT_COMPILED)), calibration.record
            thresholds = msgspec.structs.replace(questions.thresholds, ndcg_loss=None)  # measured where the engine runs
            certificate = compare(
                answers, expected.texts, questions.held_out, thresholds, meaning=meaning, quantization=record
            )
            step.details += summary(certificate)
        more = None
        if not certificate.passed:
            more = with_more_high(job, calibration, allowed_share(certificate), progress)
        if more is None:
            check_certificate(job.config, certificate, progress)
            return calibration
        progress.note(f"below the thresholds; not quantized any more: {', '.join(sorted(more.high))}")
        calibration = more


def _answers(job: Job, calibration: Calibration, questions: Questions, progress: Progress) -> EngineAnswers:
    spec, read = job.checkpoint.spec, job.weights.read
    with (
        progress.step("Emulate") as step,
        emulated_engine(spec, read, calibration.quantization, job.limits, job.root) as engine,
    ):
        answers = ask_engine(engine, questions.held_out, questions.outputs, tell=step.tell)
        step.details.append(f"{answers.num_texts} texts")
    return answers
