"""Runs an engine on the held-out texts and the canary."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bei.core import Encoding, Engine, Float32Array, Limits, PackedBatch, rows_of_sequences
from bei.utils.share_done import Tell, untold

# Rows of sequences by output: float32 [width], or [tokens, width] for an output per token.
Rows = Mapping[str, list[Float32Array]]

# The minimum number of texts, whatever time they take: with fewer, the first percentile and the minimum would be the
# same text, and neighbours too few.
MIN_TEXTS = 10


@dataclass(frozen=True)
class HeldOut:
    """The held-out texts in a fixed order, tokenized as the server does; and the canary."""

    texts: list[str]
    encodings: list[Encoding]
    canary_text: str
    canary: Encoding

    @property
    def texts_sha256(self) -> str:
        """Hex sha256 of the texts in UTF-8, each followed by a line feed."""
        return hashlib.sha256("".join(text + "\n" for text in self.texts).encode()).hexdigest()


@dataclass(frozen=True)
class EngineAnswers:
    """Rows of the engine on ``device`` for the first held-out texts, and its row for the canary."""

    device: str
    rows: Rows
    canary_output: str
    canary: Float32Array

    @property
    def num_texts(self) -> int:
        """Number of texts that were answered."""
        return len(next(iter(self.rows.values()), []))


def ask_engine(
    engine: Engine,
    questions: HeldOut,
    outputs: Sequence[str],
    is_enough: Callable[[], bool] = lambda: False,
    tell: Tell = untold,
) -> EngineAnswers:
    """Rows of all ``outputs`` for the held-out texts, in packed batches of mixed lengths, until ``is_enough``."""
    canary = ask_canary(engine, questions, outputs[0]).canary
    parts, num_done = [], 0
    for batch in batches(questions.encodings, engine.info.limits):
        parts.append(run(engine, batch, outputs))
        num_done += len(batch)
        tell(num_done, len(questions.encodings))
        if num_done >= MIN_TEXTS and is_enough():
            break
    return EngineAnswers(engine.info.device, joined(parts), outputs[0], canary)


def ask_canary(engine: Engine, questions: HeldOut, output: str) -> EngineAnswers:
    """The canary's row only."""
    row = run(engine, [questions.canary], [output])[output][0]
    return EngineAnswers(engine.info.device, {}, output, row)


def run(engine: Engine, encodings: Sequence[Encoding], outputs: Sequence[str]) -> Rows:
    """Run one packed batch. Raises EngineError."""
    batch = PackedBatch.from_encodings(encodings)
    answer, per_token = engine.run(batch), engine.info.per_token
    return {name: rows_of_sequences(answer[name], batch, per_token=name in per_token) for name in outputs}


def joined(parts: Sequence[Rows]) -> Rows:
    """Rows of several parts, concatenated."""
    return {name: [row for part in parts for row in part[name]] for name in parts[0]}


def batches(encodings: Sequence[Encoding], limits: Limits) -> Iterator[list[Encoding]]:
    """Batches within ``limits`` in the given order, so that short and long texts share them."""
    batch: list[Encoding] = []
    for encoding in encodings:
        tokens = sum(member.num_tokens for member in batch)
        if batch and (tokens + encoding.num_tokens > limits.max_num_tokens or len(batch) == limits.max_batch_size):
            yield batch
            batch = []
        batch.append(encoding)
    yield batch
