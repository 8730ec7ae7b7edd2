"""The compiled engine against the reference, on held-out texts: the numbers of the certificate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from bei.artifact import Certificate
from bei.canary import BY_COLUMN, canary_row
from bei.core import Encoding, Engine, Expansion, Float32Array, PackedBatch, expanded, rows_of_sequences
from bei.errors import VerificationError
from bei_build.heads import tasks_of
from bei_build.spec import ModelSpec

# Mean cosine (of logits: correlation) a build must reach. int8: measured 0.9993 on MiniLM (docs/decisions.md), with
# room for other models.
THRESHOLDS = {"fp32": 0.99999, "bf16": 0.999, "fp16": 0.999, "int8": 0.99}

CANARY_TEXT = "The quick brown fox jumps over the lazy dog."
_NUM_NEIGHBOURS = 10
_NUM_WORST = 3
_MOST_NEIGHBOURS = 1000
_SIMILARITY_DIGITS = 5


class Reference(Protocol):
    """Something that computes a model's outputs by other means than the engine under test."""

    name: str

    def run(self, encodings: Sequence[Encoding], output: str) -> list[Float32Array]:
        """``output`` of each encoding: float32 [width], or [tokens, width] of an output per token."""


class EngineReference:
    """An FP32 engine as the reference where torch is not installed: one text at a time, so packing is still tested."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.name = name
        self._engine = engine

    def run(self, encodings: Sequence[Encoding], output: str) -> list[Float32Array]:
        """``output`` of each encoding: float32 [width], or [tokens, width] of an output per token."""
        return [row for encoding in encodings for row in _run(self._engine, [encoding], output)]


def held_out_texts() -> list[str]:
    """The texts of ``data/held_out.txt``, one a line; lines that start with # are comments."""
    text = (resources.files("bei_build") / "data" / "held_out.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], spec: ModelSpec, max_seq_len: int, *, pairs: bool = False
) -> list[Encoding]:
    """Tokenize ``texts`` as the server will: truncated with special tokens kept. ``pairs``: each with the next one."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())  # a copy: truncation is state
    tokenizer.enable_truncation(max_seq_len)
    encodings = []
    for index, text in enumerate(texts):
        encoding = tokenizer.encode(text, texts[(index + 1) % len(texts)] if pairs else None)
        types = np.array(encoding.type_ids, np.int32) if spec.embeddings.type_vocab_size > 1 else None
        encodings.append(Encoding(np.array(encoding.ids, np.int32), types))
    return encodings


def certify(
    engine: Engine,
    reference: Reference,
    tokenizer: Tokenizer,
    spec: ModelSpec,
    threshold: float,
    expansion: Expansion | None = None,
) -> Certificate:
    """Run engine (packed batches of mixed lengths) and reference over the held-out texts and compare the first output.

    A scorer of pairs is compared on pairs; every other text gets the ``expansion`` of a query. Raises VerificationError
    only where the reference cannot be compared with; the caller judges ``passed``.
    """
    output = spec.heads[0].output
    texts = [text for text in held_out_texts() if tokenizer.encode(text).ids]  # without special ones there may be none
    longest = engine.info.limits.max_seq_len
    pairs = "rerank" in tasks_of(spec.heads[0], spec.hidden_size)
    encodings = encode(tokenizer, texts, spec, longest, pairs=pairs and longest > 8)
    if expansion is not None:
        encodings[::2] = [expanded(encoding, expansion) for encoding in encodings[::2]]
    expected = reference.run(encodings, output)
    if not all(np.isfinite(rows).all() for rows in expected):
        raise VerificationError(
            f"The reference ({reference.name}) itself gives NaN or Inf: the checkpoint's weights are damaged. "
            "Download the checkpoint again."
        )
    agreement = _compare(_run_in_batches(engine, encodings, output), expected, output)
    canary = _run(engine, encode(tokenizer, [CANARY_TEXT], spec, longest), output)[0]
    mean = float(agreement.cosines.mean())
    return Certificate(
        reference=reference.name,
        output=output,
        num_texts=len(texts),
        cosine_mean=round(mean, 6),
        cosine_p1=round(float(np.percentile(agreement.cosines, 1)), 6),
        cosine_min=round(float(agreement.cosines.min()), 6),
        max_abs_difference=round(float(agreement.differences.max()), 5),
        ranking_overlap=round(agreement.ranking_overlap, 4),
        worst_texts=[texts[index] for index in np.argsort(-agreement.differences, kind="stable")[:_NUM_WORST]],
        threshold=threshold,
        passed=bool(mean >= threshold),
        canary_text=CANARY_TEXT,
        canary_row=[round(float(value), 5) for value in canary_row(canary, output)],
    )


@dataclass(frozen=True)
class _Agreement:
    """``cosines`` of rows or columns; ``differences`` the largest of each text."""

    cosines: npt.NDArray[np.float64]
    differences: npt.NDArray[np.float64]
    ranking_overlap: float


def _compare(actual: Sequence[Float32Array], expected: Sequence[Float32Array], output: str) -> _Agreement:
    # NaN and Inf have no place in a certificate: such an answer counts as the opposite of what it should be.
    checked = [
        rows if np.isfinite(rows).all() else -reference for rows, reference in zip(actual, expected, strict=True)
    ]
    by_column = output in BY_COLUMN  # compared column by column over all texts, not row by row
    ours, theirs = (
        (_centred if by_column else normalized)(np.concatenate([np.atleast_2d(rows) for rows in side]))
        for side in (checked, expected)
    )
    # Rounded before anything is decided: the reference's last bits depend on torch's number of threads, and equal
    # builds must have equal certificates. In float64 the figures move by 1e-9 with them, far below the rounding.
    differences = np.round(np.abs(ours - theirs).max(axis=1), 6)
    ends = np.cumsum([len(np.atleast_2d(rows)) for rows in expected])
    of_texts = np.array([part.max() for part in np.split(differences, ends[:-1])])
    if by_column:
        return _Agreement(np.round(_cosines(ours.T, theirs.T), 6), of_texts, _top_overlap(ours.T, theirs.T))
    return _Agreement(np.round(_cosines(ours, theirs), 6), of_texts, _neighbour_overlap(ours, theirs))


def _centred(rows: Float32Array) -> npt.NDArray[np.float64]:
    """Columns less their means, in float64; a column that hardly varies stays as it is."""
    wide = rows.astype(np.float64)
    centred: npt.NDArray[np.float64] = np.where(wide.std(axis=0) > 1e-6, wide - wide.mean(axis=0), wide)
    return centred


def _cosines(ours: npt.NDArray[np.float64], theirs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Row by row. Two rows of zeros agree: a sparse vector may be empty."""
    products = (normalized(ours) * normalized(theirs)).sum(axis=1)
    empty = ~ours.any(axis=1) & ~theirs.any(axis=1)
    cosines: npt.NDArray[np.float64] = np.where(empty, 1.0, products)
    return cosines


def normalized(vectors: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Rows at unit length, in float64."""
    wide = vectors.astype(np.float64)
    unit: npt.NDArray[np.float64] = wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12)
    return unit


def _run(engine: Engine, encodings: Sequence[Encoding], output: str) -> list[Float32Array]:
    batch = PackedBatch.from_encodings(encodings)
    return rows_of_sequences(engine.run(batch)[output], batch, per_token=output in engine.info.per_token)


def _run_in_batches(engine: Engine, encodings: Sequence[Encoding], output: str) -> list[Float32Array]:
    """In the given order, so that short and long texts share batches."""
    limits, rows, batch = engine.info.limits, list[Float32Array](), list[Encoding]()
    for encoding in encodings:
        tokens = sum(member.num_tokens for member in batch)
        if batch and (tokens + encoding.num_tokens > limits.max_num_tokens or len(batch) == limits.max_batch_size):
            rows += _run(engine, batch, output)
            batch = []
        batch.append(encoding)
    return rows + _run(engine, batch, output)


def _neighbour_overlap(actual: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]) -> float:
    """Over at most the first thousand rows: tokens are many."""

    def similarities(vectors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        first = vectors[:_MOST_NEIGHBOURS]
        similarity: npt.NDArray[np.float64] = (first @ first.T).round(_SIMILARITY_DIGITS)  # near ties go by position
        np.fill_diagonal(similarity, -2.0)
        return similarity

    return _overlap(similarities(actual), similarities(expected), among=min(len(actual), _MOST_NEIGHBOURS) - 1)


def _top_overlap(actual: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]) -> float:
    """Rows are labels, columns texts or tokens."""
    digits = _SIMILARITY_DIGITS
    return _overlap(actual.round(digits), expected.round(digits), among=actual.shape[1])


def _overlap(actual: npt.NDArray[np.float64], expected: npt.NDArray[np.float64], among: int) -> float:
    best = [np.argsort(-scores, axis=1, kind="stable")[:, :_NUM_NEIGHBOURS] for scores in (actual, expected)]
    shared = [len(set(a) & set(b)) for a, b in zip(*best, strict=True)]
    return float(np.mean(shared)) / min(_NUM_NEIGHBOURS, among)
