"""The compiled engine against the reference, on held-out texts: the numbers of the certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from bei.artifact import Agreement, Certificate, Thresholds
from bei.canary import BY_COLUMN, canary_row
from bei.core import Encoding, Engine, Expansion, Float32Array, PackedBatch, expanded, rows_of_sequences
from bei.errors import VerificationError
from bei_build.heads import tasks_of
from bei_build.spec import ModelSpec

# Mean cosine (of logits: correlation) that every output must reach. int8: measured 0.9993 on MiniLM
# (docs/decisions.md), with room for other models.
MIN_COSINES = {"fp32": 0.99999, "bf16": 0.999, "fp16": 0.999, "int8": 0.99}

CANARY_TEXT = "The quick brown fox jumps over the lazy dog."
# How much farther from 1 than the mean the first percentile may be, and the lowest (docs/decisions.md).
_P1_FACTOR = 10
_MIN_FACTOR = 50
_UNPOOLED = 5  # tokens of a prompt, where the model leaves it out
_NUM_NEIGHBOURS = 10
_NUM_WORST = 3
_MOST_NEIGHBOURS = 1000
_SIMILARITY_DIGITS = 5


class Reference(Protocol):
    """Something that computes a model's outputs by other means than the engine under test."""

    name: str
    is_own: bool  # bei's own engine: what is certified is self-consistency

    def run(self, encodings: Sequence[Encoding], outputs: Sequence[str]) -> Mapping[str, list[Float32Array]]:
        """Each of ``outputs`` of each encoding: float32 [width], or [tokens, width] of an output per token."""


class EngineReference:
    """An FP32 engine as the reference where torch is not installed: one text at a time, so packing is still tested."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.name = name
        self.is_own = True
        self._engine = engine

    def run(self, encodings: Sequence[Encoding], outputs: Sequence[str]) -> Mapping[str, list[Float32Array]]:
        """Each of ``outputs`` of each encoding: float32 [width], or [tokens, width] of an output per token."""
        return _joined([_run(self._engine, [encoding], outputs) for encoding in encodings])


def thresholds_of(min_cosine: float) -> Thresholds:
    """The three thresholds for a mean of ``min_cosine``."""
    lower = (max(-1.0, round(1 - factor * (1 - min_cosine), 6)) for factor in (_P1_FACTOR, _MIN_FACTOR))
    p1, lowest = lower
    return Thresholds(mean=min_cosine, p1=p1, min=lowest)


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
    min_cosine: float,
    expansion: Expansion | None = None,
) -> Certificate:
    """Run engine (packed batches of mixed lengths) and reference over the held-out texts and compare all outputs.

    A scorer of pairs is compared on pairs; every other text gets the ``expansion`` of a query, or is pooled without its
    first tokens where the model leaves prompts out. Raises VerificationError
    only where the reference cannot be compared with; the caller judges ``passed``.
    """
    names = [head.output for head in spec.heads]
    texts = [text for text in held_out_texts() if tokenizer.encode(text).ids]  # without special ones there may be none
    longest = engine.info.limits.max_seq_len
    pairs = "rerank" in tasks_of(spec.heads[0], spec.hidden_size)
    encodings = encode(tokenizer, texts, spec, longest, pairs=pairs and longest > 8)
    if expansion is not None:
        encodings[::2] = [expanded(encoding, expansion) for encoding in encodings[::2]]
    if not spec.pools_prompt:
        encodings[::2] = [
            replace(encoding, num_unpooled=min(_UNPOOLED, encoding.num_tokens - 1)) for encoding in encodings[::2]
        ]
    expected = reference.run(encodings, names)
    if not all(np.isfinite(rows).all() for name in names for rows in expected[name]):
        raise VerificationError(
            f"The reference ({reference.name}) itself gives NaN or Inf: the checkpoint's weights are damaged. "
            "Download the checkpoint again."
        )
    actual, thresholds = _run_in_batches(engine, encodings, names), thresholds_of(min_cosine)
    outputs = [_agreement(name, actual[name], expected[name], texts, thresholds) for name in names]
    canary = _run(engine, encode(tokenizer, [CANARY_TEXT], spec, longest), names[:1])[names[0]][0]
    return Certificate(
        kind="self-consistency" if reference.is_own else "reference",
        reference=reference.name,
        num_texts=len(texts),
        thresholds=thresholds,
        outputs=outputs,
        passed=not any(agreement.failures for agreement in outputs),
        canary_text=CANARY_TEXT,
        canary_row=[round(float(value), 5) for value in canary_row(canary, names[0])],
    )


def _agreement(
    output: str,
    actual: Sequence[Float32Array],
    expected: Sequence[Float32Array],
    texts: Sequence[str],
    thresholds: Thresholds,
) -> Agreement:
    """One output's row of the certificate."""
    found = _compare(actual, expected, output)
    figures = {
        "mean": round(found.mean, 6),
        "p1": round(float(np.percentile(found.cosines, 1)), 6),
        "min": round(float(found.cosines.min()), 6),
    }
    failures = [
        f"{name} cosine {value:.6f} below {threshold:g}"
        for name, value in figures.items()
        if value < (threshold := getattr(thresholds, name))
    ]
    worst = np.lexsort((-found.differences, found.of_texts))[:_NUM_WORST]  # stable: equal ones stay in order
    return Agreement(
        output=output,
        cosine_mean=figures["mean"],
        cosine_p1=figures["p1"],
        cosine_min=figures["min"],
        max_abs_difference=round(float(found.differences.max()), 5),
        ranking_overlap=round(found.ranking_overlap, 4),
        worst_texts=[texts[index] for index in worst],
        failures=failures,
    )


@dataclass(frozen=True)
class _Comparison:
    """``cosines`` of rows, or the shares that rows have in the columns' correlations, and their ``mean``; ``of_texts``
    the lowest of each text, ``differences`` the largest of each text."""

    cosines: npt.NDArray[np.float64]
    mean: float
    of_texts: npt.NDArray[np.float64]
    differences: npt.NDArray[np.float64]
    ranking_overlap: float


def _compare(actual: Sequence[Float32Array], expected: Sequence[Float32Array], output: str) -> _Comparison:
    # NaN and Inf have no place in a certificate: such an answer counts as the opposite of what it should be.
    is_finite = [bool(np.isfinite(rows).all()) for rows in actual]
    checked = [
        rows if finite else -reference for rows, reference, finite in zip(actual, expected, is_finite, strict=True)
    ]
    by_column = output in BY_COLUMN  # compared column by column over all texts, not row by row
    ours, theirs = (
        (_centred if by_column else normalized)(np.concatenate([np.atleast_2d(rows) for rows in side]))
        for side in (checked, expected)
    )
    # Rounded before anything is decided: the reference's last bits depend on torch's number of threads, and equal
    # builds must have equal certificates. In float64 the figures move by 1e-9 with them, far below the rounding.
    lengths = [len(np.atleast_2d(rows)) for rows in expected]
    ends = np.cumsum(lengths)[:-1]
    differences = np.array([part.max() for part in np.split(np.round(np.abs(ours - theirs).max(axis=1), 6), ends)])
    if by_column:
        mean, overlap = _cosines(ours.T, theirs.T).mean(), _top_overlap(ours.T, theirs.T)
        by_row = _shares(ours, theirs).min(axis=1)
    else:
        by_row, overlap = _cosines(ours, theirs), _neighbour_overlap(ours, theirs)
        mean = by_row.mean()
    by_row = np.where(np.repeat(is_finite, lengths), by_row, -1.0).round(6)
    of_texts = np.array([part.min() for part in np.split(by_row, ends)])
    return _Comparison(by_row, float(mean), of_texts, differences, overlap)


def _shares(ours: npt.NDArray[np.float64], theirs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """What each row adds to the correlation of the columns, whose mean it is: 1 - d^2 / 2 for a difference d of the
    columns at a mean square of 1; at least -1."""
    scaled = [
        side / np.maximum(np.sqrt(np.mean(side**2, axis=0, keepdims=True)), 1e-12)  # zeros agree with zeros
        for side in (ours, theirs)
    ]
    shares: npt.NDArray[np.float64] = np.maximum(1 - (scaled[0] - scaled[1]) ** 2 / 2, -1.0)
    return shares


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


def _run(engine: Engine, encodings: Sequence[Encoding], outputs: Sequence[str]) -> Mapping[str, list[Float32Array]]:
    batch = PackedBatch.from_encodings(encodings)
    answer, per_token = engine.run(batch), engine.info.per_token
    return {name: rows_of_sequences(answer[name], batch, per_token=name in per_token) for name in outputs}


def _joined(parts: Sequence[Mapping[str, list[Float32Array]]]) -> Mapping[str, list[Float32Array]]:
    return {name: [row for part in parts for row in part[name]] for name in parts[0]}


def _run_in_batches(
    engine: Engine, encodings: Sequence[Encoding], outputs: Sequence[str]
) -> Mapping[str, list[Float32Array]]:
    """In the given order, so that short and long texts share batches."""
    limits, parts, batch = engine.info.limits, [], list[Encoding]()
    for encoding in encodings:
        tokens = sum(member.num_tokens for member in batch)
        if batch and (tokens + encoding.num_tokens > limits.max_num_tokens or len(batch) == limits.max_batch_size):
            parts.append(_run(engine, batch, outputs))
            batch = []
        batch.append(encoding)
    return _joined([*parts, _run(engine, batch, outputs)])


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
