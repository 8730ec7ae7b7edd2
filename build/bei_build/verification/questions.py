"""Questions that verify an engine, and the reference's answers, which are computed once per build."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from bei.artifact.certificate.record import Thresholds, TokenAgreement
from bei.artifact.certificate.thresholds import min_cosine_of, thresholds_of
from bei.artifact.label_layouts import Extraction
from bei.artifact.manifest import TOKENIZER, EngineRequirements
from bei.artifact.store import sha256_of_file
from bei.core import Encoding, Float32Array, LabelVectors
from bei.errors import ConfigError
from bei.tokenizer.label_prompt import LabelPrompt
from bei.tokenizer.schema_prompt import SchemaPart
from bei.verification.comparison import ReferenceAnswers
from bei.verification.engine_answers import HeldOut
from bei.verification.retrieval import RetrievalQuestions
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.config import BuildConfig
from bei_build.job import Job, fp32_compiler, open_fp32
from bei_build.progress import Progress
from bei_build.reference import hf_model as hf
from bei_build.reference import torch_model as module
from bei_build.reference.adapted import AdaptedReference
from bei_build.reference.held_out import (
    Budget,
    EngineReference,
    Reference,
    ask_reference,
    by_adapter,
    held_out,
    held_out_texts,
    rank_by_reference,
    with_labels,
)
from bei_build.reference.retrieval_set import bundled_set, check_ranks, retrieval_questions
from bei_build.spec.precision import PRECISIONS
from bei_build.targets.base import Compiler
from bei_build.tokenizer.library_tokenizer import Texts, own_code
from bei_build.tokenizer.token_comparison import TokenSources, compare_tokens, make_probes, reading_difference

# For models that score spans: what the held-out texts have.
SPAN_LABELS = ("person", "place", "organization", "date")
# Requirements before compiling: the questions do not depend on the engine.
NOT_COMPILED = EngineRequirements(compiler="", compiler_version="", device="", capabilities=[])


@dataclass(frozen=True)
class ExpectedAnswers:
    """The reference's answers: rows for the held-out texts, the row for the canary, and nDCG@10 for each query of the
    retrieval set (None: not asked, or out of time)."""

    texts: ReferenceAnswers
    canary: Float32Array
    ndcgs: list[float] | None


class Questions:
    """The held-out texts and the retrieval set, and the reference's answers, computed once.

    The engine gets the ids of the artifact's tokenizer, the reference those of the model's own library: the two ways
    share only the text. ``tokens``: the comparison of the two.
    """

    def __init__(self, job: Job, progress: Progress, labels: LabelVectors | None = None) -> None:
        """``labels``: the vectors of ``SPAN_LABELS``, for models that read these. Raises TokenizerError where the two
        give different ids."""
        self.tokens, self.held_out, self._of_reference = _tokenized(job, progress, labels)
        self.budget = Budget(job.config.verify_budget)
        self.outputs = [str(head.output) for head in job.checkpoint.spec.heads]  # the canary's is the first
        self._job = job
        self._expected: ExpectedAnswers | None = None

    @property
    def thresholds(self) -> Thresholds:
        """The user's thresholds, else the precision's."""
        least = self._job.config.min_cosine
        if least is None:
            least = min_cosine_of(self._job.precision, is_decoder=self._job.checkpoint.family.is_decoder)
        return thresholds_of(least, retrieval=self.retrieval is not None)

    @cached_property
    def retrieval(self) -> RetrievalQuestions | None:
        """The bundled retrieval set for the model; None where retrieval is not measured. Raises ConfigError."""
        job, is_asked = self._job, self._job.config.verify_retrieval
        if not _measures_retrieval(job):
            return None
        described = job.describe(NOT_COMPILED)
        found = retrieval_questions(described, job.checkpoint.spec, job.checkpoint.tokenizer, bundled_set())
        if found is None and is_asked:
            raise ConfigError("--verify-retrieval: the model's tokenizer has no tokens for the texts. Leave it out.")
        return found

    def expected_answers(
        self, progress: Progress, num_texts: int | None = None, *, ranked: bool = True
    ) -> ExpectedAnswers:
        """The reference's answers to ``num_texts`` texts (None: all) and, if ``ranked``, to the retrieval set."""
        if self._expected is None:
            ndcgs = None
            with ExitStack() as opened:
                with progress.step("Ask reference") as step:
                    reference = opened.enter_context(_reference(self._job))
                    texts = ask_reference(
                        reference, self._of_reference.encodings[:num_texts], self.outputs, self.budget, step.tell
                    )
                    canary = reference.run([self._of_reference.canary], self.outputs[:1])[self.outputs[0]][0]
                    step.details.append(f"{texts.num_texts} texts, {texts.name}")
                if ranked and self.retrieval is not None:
                    with progress.step("Rank by reference") as step:
                        ndcgs = rank_by_reference(reference, self.retrieval, self.budget, step.tell)
                        step.details.append(f"{len(self.retrieval.encodings)} texts")
            self._expected = ExpectedAnswers(texts, canary, ndcgs)
        return self._expected


def check_verifiable(config: BuildConfig, compiler: Compiler, checkpoint: Checkpoint) -> None:
    """Raise ConfigError or MissingDependencyError, before anything is compiled, for a build that could not be
    verified."""
    absent = compiler.cannot_run()
    if checkpoint.adapters and config.verify_budget is not None:
        raise ConfigError(
            "verify_budget: each adapter is verified with texts of its own, and a budget would leave the last ones "
            "out. Leave it out."
        )
    if config.verify_retrieval:
        if checkpoint.token_weights is not None:
            raise ConfigError(
                "--verify-retrieval asks the engine about both sides, and one of this model is a table. Leave it out."
            )
        check_ranks(checkpoint.spec, checkpoint.max_seq_len)
    if config.verify:
        if _kind(config, checkpoint) == "engine":
            fp32_compiler(config, compiler).check_able()
    elif absent is not None:
        raise ConfigError(
            f"--no-verify: engines for {config.target} cannot run here ({absent}), and without the reference's "
            "answers this one could not be verified elsewhere. Leave it out; --verify-budget SECONDS bounds what is "
            "kept for verifying it."
        )


def _kind(config: BuildConfig, checkpoint: Checkpoint) -> Literal["hf", "module", "engine"]:
    """The kind of reference: the HF model, bei's module for PyTorch, or its own FP32 engine. Raises ConfigError where
    the user chose one that is not possible."""
    is_known = checkpoint.family.reference_class is not None
    if config.reference == "auto":
        if is_known:
            return "hf" if hf.is_available() else "engine"
        return "engine" if module.unsupported_reason(checkpoint) else "module"
    if config.reference == "hf" and not is_known:
        raise ConfigError(
            f"--reference hf: transformers has no {checkpoint.spec.architecture}. Use --reference engine."
        )
    if config.reference == "hf" and not hf.is_available():
        raise ConfigError("--reference hf needs torch, which is not installed: use --reference engine.")
    if config.reference == "hf":
        return "hf"
    if config.reference == "engine":
        return "engine"
    if reason := module.unsupported_reason(checkpoint):
        raise ConfigError(f"--reference module: {reason}. Use --reference engine.")
    return "module"


@contextmanager
def _reference(job: Job) -> Iterator[Reference]:
    """The HF model, bei's module for PyTorch, or its own FP32 engine, compiled for this purpose; for an engine with
    adapters one of each, with the adapter merged."""
    adapters = job.checkpoint.adapters
    if adapters is None:
        with _reference_of(job) as reference:
            yield reference
        return
    with ExitStack() as stack:
        yield AdaptedReference(lambda number: _merged_reference(job, number), adapters.names, stack)


@contextmanager
def _merged_reference(job: Job, number: int) -> Iterator[Reference]:
    """The reference of the model with adapter ``number`` merged."""
    checkpoint = job.checkpoint.merged(number)
    with checkpoint.weights() as weights, _reference_of(replace(job, checkpoint=checkpoint, weights=weights)) as found:
        yield found


@contextmanager
def _reference_of(job: Job) -> Iterator[Reference]:
    kind = _kind(job.config, job.checkpoint)
    if kind != "engine":
        made = hf.HFReference if kind == "hf" else module.ModuleReference
        yield made(job.checkpoint, job.weights)
        return
    with open_fp32(job, "The FP32 engine to verify with", {}) as (engine, compiler):
        yield EngineReference(engine, f"{compiler} engine, FP32, one text at a time")


def _measures_retrieval(job: Job) -> bool:
    asked = job.config.verify_retrieval
    return PRECISIONS[job.precision].quantized is not None if asked is None else asked


def _parts(layout: Extraction) -> tuple[SchemaPart, ...]:
    """Of a model that reads a schema: a structure, so that further instances are compared too, and the labels."""
    if not layout.schema:
        return ()
    structure = SchemaPart("structures", "event", ("name", "date"), marker="field", instances=3)
    return structure, SchemaPart("labels", layout.schema.task, SPAN_LABELS)


def _tokenized(job: Job, progress: Progress, labels: LabelVectors | None) -> tuple[TokenAgreement, HeldOut, HeldOut]:
    """The agreement of both ways to token ids, and the held-out texts in ids of the artifact and in ids of the library.

    The library's tokenizer is loaded again: a large one takes hundreds of MB, and the artifact's was made from the
    first.
    """
    checkpoint, limit = job.checkpoint, job.checkpoint.max_seq_len
    with progress.step("Compare tokens") as step:
        path = job.root / TOKENIZER
        sha256 = sha256_of_file(path)  # before it is read: the sealed file must be the compared one
        sources = TokenSources.open(
            checkpoint.folder,
            checkpoint.tokenizer_settings,
            path,
            checkpoint.tokenization,
            limit,
            checkpoint.spec.embeddings.vocab_size,
            types_matter=checkpoint.spec.embeddings.type_vocab_size > 1,
        )
        texts = held_out_texts()
        if _measures_retrieval(job):
            texts += [*bundled_set().queries, *bundled_set().documents]
        probes = make_probes(sources, texts, checkpoint.files.prompts.values(), limit)
        tokens = compare_tokens(sources, probes, limit, sha256)
        step.details.append(
            f"{tokens.num_texts} texts and {tokens.num_pairs} pairs, as {tokens.library} ({tokens.tokenizer_class})"
        )
        other = reading_difference(checkpoint.folder, checkpoint.tokenizer_settings, sources, probes, limit)
    if other is not None:
        progress.note(other)
    if checkpoint.rowless:
        progress.note(
            f"{tokens.tokenizer_class} adds {', '.join(map(repr, checkpoint.rowless))}, for which the model has no "
            "row: the token is left out, and texts that contain it are read as ordinary text, where transformers "
            "fails"
        )
    if checkpoint.tokenizer_settings.choice == "auto" and (code := own_code(checkpoint.folder)) is not None:
        progress.note(
            f"the tokenizer's own code ({code} in tokenizer_config.json) was not run: {tokens.tokenizer_class} of "
            f"{tokens.library} read its files"
        )
    expansion = next((role.expansion for role in checkpoint.roles.values() if role.expansion), None)

    def of(*, library: bool) -> HeldOut:
        def encode(texts: Sequence[Texts]) -> list[Encoding | None]:
            return sources.encodings(texts, limit, of_library=library)

        found = held_out(encode, checkpoint.spec, limit, expansion)
        if (layout := checkpoint.extraction) is not None:
            prompt = LabelPrompt(SPAN_LABELS, layout, labels, parts=_parts(layout))
            found = with_labels(found, lambda texts: sources.with_labels(texts, prompt, limit, of_library=library))
        return by_adapter(found, len(checkpoint.adapters.names)) if checkpoint.adapters else found

    return tokens, of(library=False), of(library=True)
