"""Held-out texts, and references that answer them within a time budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import resources
from typing import Protocol, TypeAlias

import numpy as np
import tokenizers
from tokenizers import Tokenizer

from bei.artifact.certificate.record import Certificate
from bei.core import Encoding, Engine, Expansion, expanded
from bei.engine.words import WORD, kinds_of
from bei.errors import VerificationError
from bei.utils.share_done import Tell, untold
from bei.verification.comparison import ReferenceAnswers, kept_canary
from bei.verification.engine_answers import MIN_TEXTS, EngineAnswers, HeldOut, Rows, joined, run
from bei.verification.retrieval import RetrievalQuestions, ndcgs
from bei_build.checkpoint.heads import tasks_of
from bei_build.spec.model_spec import ModelSpec
from bei_build.tokenizer.library_tokenizer import Texts

CANARY_TEXT = "The quick brown fox jumps over the lazy dog."
_UNPOOLED = 5  # length of the prompt, in models that leave it out of the mean
# The engine's share of a budget: in packed batches it takes a fraction of the reference's time for a text.
ENGINE_SHARE = 0.5


class Budget:
    """The time for a verification, from construction or the last ``start`` on; ``seconds`` None: no limit."""

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self.start()

    def start(self) -> None:
        """Begin anew: an engine that is compiled again is verified again."""
        self._started = self._clock()

    def is_used(self, share: float = 1.0) -> bool:
        """True if ``share`` of the time is over."""
        return self._seconds is not None and self._clock() - self._started >= self._seconds * share


# Encodes texts or pairs, all of one kind, for a model; None for one without tokens.
Encode: TypeAlias = "Callable[[Sequence[Texts]], list[Encoding | None]]"


class Reference(Protocol):
    """An implementation of a model that is independent of the engine under test."""

    name: str
    is_own: bool  # bei's own engine: the certificate states self-consistency

    def run(self, encodings: Sequence[Encoding], outputs: Sequence[str]) -> Rows:
        """Outputs ``outputs`` of each encoding: float32 [width], or [tokens, width] for an output per token."""


class EngineReference:
    """An FP32 engine as the reference where torch is not installed. It runs one text at a time, so that packing is
    still tested."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.name = name
        self.is_own = True
        self._engine = engine

    def run(self, encodings: Sequence[Encoding], outputs: Sequence[str]) -> Rows:
        """Outputs ``outputs`` of each encoding: float32 [width], or [tokens, width] for an output per token."""
        return joined([run(self._engine, [encoding], outputs) for encoding in encodings])


def held_out_texts() -> list[str]:
    """The texts of ``data/held_out.txt``, one per line; lines that start with # are comments."""
    text = (resources.files("bei_build") / "data" / "held_out.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], spec: ModelSpec, max_seq_len: int, *, pairs: bool = False
) -> list[Encoding]:
    """Tokenize ``texts`` like the server: truncated, with special tokens kept. ``pairs``: each text with the next
    one."""
    if pairs:
        return encode_pairs(tokenizer, list(zip(texts, [*texts[1:], texts[0]], strict=True)), spec, max_seq_len)
    tokenizer = _truncating(tokenizer, max_seq_len)
    return [spec.filled(_encoding(tokenizer.encode(text), spec)) for text in texts]


def encode_pairs(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], spec: ModelSpec, max_seq_len: int
) -> list[Encoding]:
    """Like ``encode``, for pairs that the model reads together."""
    tokenizer = _truncating(tokenizer, max_seq_len)
    return [_encoding(tokenizer.encode(first, second), spec) for first, second in pairs]


def _truncating(tokenizer: Tokenizer, max_seq_len: int) -> Tokenizer:
    """A copy with truncation, which is state of a tokenizer."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.enable_truncation(max_seq_len)
    return copy


def _encoding(encoded: tokenizers.Encoding, spec: ModelSpec) -> Encoding:
    types = np.array(encoded.type_ids, np.int32) if spec.embeddings.type_vocab_size > 1 else None
    return Encoding(np.array(encoded.ids, np.int32), types)


def held_out(encode: Encode, spec: ModelSpec, max_seq_len: int, expansion: Expansion | None = None) -> HeldOut:
    """The held-out texts as the model reads them: pairs for a scorer; else every other text gets the ``expansion`` of a
    query, or is pooled without its first tokens where the model leaves prompts out."""
    singles = _encoded(encode, [(text,) for text in held_out_texts()])
    found = [(text, spec.filled(encoding)) for (text,), encoding in singles]
    texts, encodings = [text for text, _ in found], [encoding for _, encoding in found]
    if "rerank" in tasks_of(spec.heads[0], spec.hidden_size) and max_seq_len > 8:
        pairs = list(zip(texts, [*texts[1:], texts[0]], strict=True))
        encodings = [encoding for _, encoding in _encoded(encode, pairs)]
    if expansion is not None:
        encodings[::2] = [expanded(encoding, expansion) for encoding in encodings[::2]]
    if not spec.pools_prompt:
        encodings[::2] = [
            encoding._replace(num_unpooled=min(_UNPOOLED, encoding.num_tokens - 1)) for encoding in encodings[::2]
        ]
    if count := spec.entry_types:
        encodings = [
            encoding._replace(token_type_ids=np.full(encoding.num_tokens, index % count, np.int32))
            for index, encoding in enumerate(encodings)
        ]
    ((_, canary),) = _encoded(encode, [(CANARY_TEXT,)])
    return HeldOut(texts, encodings, CANARY_TEXT, spec.filled(canary))


def with_labels(questions: HeldOut, encode: Callable[[Sequence[str]], list[Encoding]]) -> HeldOut:
    """``questions`` as a model reads them that scores spans, by ``encode``; texts without words are left out."""
    found = list(zip(questions.texts, encode(questions.texts), strict=True))
    found = [(text, encoding) for text, encoding in found if _has_words(encoding)]
    return replace(questions, texts=[text for text, _ in found], encodings=[encoding for _, encoding in found])


def _has_words(encoding: Encoding) -> bool:
    types = encoding.token_type_ids
    return types is not None and bool((kinds_of(types) == WORD).any())


def by_adapter(questions: HeldOut, num_adapters: int) -> HeldOut:
    """``questions`` dealt out to the base model and to each of its adapters, in their order: a reference holds one of
    these models at a time. Raises VerificationError where some would have no text."""
    count = num_adapters + 1
    if len(questions.texts) < count:
        raise VerificationError(
            f"The artifact has {num_adapters} adapters, and {len(questions.texts)} texts to verify them with: build "
            "with fewer."
        )
    order = sorted(range(len(questions.texts)), key=lambda index: index % count)
    encodings = [questions.encodings[index]._replace(adapter=index % count) for index in order]
    return replace(questions, texts=[questions.texts[index] for index in order], encodings=encodings)


def _encoded(encode: Encode, texts: Sequence[Texts]) -> list[tuple[Texts, Encoding]]:
    """The texts that have tokens, with their encodings: without special tokens a text may have none."""
    found = zip(texts, encode(texts), strict=True)
    return [(text, encoding) for text, encoding in found if encoding is not None]


def ask_reference(
    reference: Reference,
    encodings: Sequence[Encoding],
    outputs: Sequence[str],
    budget: Budget,
    tell: Tell = untold,
) -> ReferenceAnswers:
    """The reference's rows for the first of ``encodings``: for all of them unless the budget ends earlier."""
    parts: list[Rows] = []
    for encoding in encodings:
        if len(parts) >= MIN_TEXTS and budget.is_used():
            break
        parts.append(reference.run([encoding], outputs))
        tell(len(parts), len(encodings))
    return ReferenceAnswers(reference.name, reference.is_own, joined(parts))


def rank_by_reference(
    reference: Reference, questions: RetrievalQuestions, budget: Budget, tell: Tell = untold
) -> list[float] | None:
    """The reference's nDCG@10 for each query of ``questions``; None where the budget ends before all are answered."""
    encodings, output = questions.encodings, questions.ranking.output
    parts: list[Rows] = []
    for encoding in encodings:
        if budget.is_used():
            return None
        parts.append(reference.run([encoding], [output]))
        tell(len(parts), len(encodings))
    return ndcgs(questions, joined(parts))


def uncompared_certificate(answers: EngineAnswers, questions: HeldOut) -> Certificate:
    """The certificate of an engine that was compared with nothing. Raises VerificationError for NaN or Inf."""
    if not np.isfinite(answers.canary).all():
        raise VerificationError(
            "The engine gives NaN or Inf for a short text: the checkpoint's weights are damaged, or the precision is "
            "too low for them. Build with verification to see which, or with --precision fp32."
        )
    return Certificate(
        kind="none",
        reference="none",
        reference_is_independent=False,
        device=answers.device,
        num_texts=0,
        num_held_out_texts=len(questions.texts),
        texts_sha256=questions.texts_sha256,
        thresholds=None,
        outputs=[],
        passed=False,
        canary_text=CANARY_TEXT,
        canary_output=answers.canary_output,
        canary_row=kept_canary(answers.canary, answers.canary_output),
    )
