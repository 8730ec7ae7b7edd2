"""An engine's answers against a reference's: the figures of the certificate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bei.artifact import Agreement, Certificate, Thresholds
from bei.canary import BY_COLUMN, canary_row
from bei.certification.answers import EngineAnswers, HeldOut, Rows
from bei.core import Float32Array
from bei.errors import VerificationError

# Mean cosine (of logits: correlation) that every output must reach. int8: measured 0.9993 on MiniLM
# (docs/decisions.md), with room for other models. fp8: not measured on a GPU; the same as int8.
MIN_COSINES = {"fp32": 0.99999, "bf16": 0.999, "fp16": 0.999, "int8": 0.99, "fp8": 0.99}

# How much farther from 1 than the mean the first percentile may be, and the lowest (docs/decisions.md).
_P1_FACTOR = 10
_MIN_FACTOR = 50
_NUM_NEIGHBOURS = 10
_NUM_WORST = 3
_MOST_NEIGHBOURS = 1000
_SIMILARITY_DIGITS = 5


@dataclass(frozen=True)
class ReferenceAnswers:
    """The rows of the reference called ``name`` for the first of the held-out texts.

    ``is_own``: the reference is bei's own engine, so what is certified is self-consistency.
    """

    name: str
    is_own: bool
    rows: Rows

    @property
    def num_texts(self) -> int:
        """How many texts it answered."""
        return len(next(iter(self.rows.values()), []))


def thresholds_of(min_cosine: float) -> Thresholds:
    """The three thresholds for a mean of ``min_cosine``."""
    lower = (max(-1.0, round(1 - factor * (1 - min_cosine), 6)) for factor in (_P1_FACTOR, _MIN_FACTOR))
    p1, lowest = lower
    return Thresholds(mean=min_cosine, p1=p1, min=lowest)


def compare(
    answers: EngineAnswers, reference: ReferenceAnswers, questions: HeldOut, thresholds: Thresholds
) -> Certificate:
    """The certificate of all outputs, over the texts that both sides answered; the caller judges ``passed``.

    Raises VerificationError only where the reference cannot be compared with.
    """
    names, num_texts = list(answers.rows), min(answers.num_texts, reference.num_texts)
    expected = {name: reference.rows[name][:num_texts] for name in names}
    if not all(np.isfinite(rows).all() for name in names for rows in expected[name]):
        raise VerificationError(
            f"The reference ({reference.name}) itself gives NaN or Inf: the checkpoint's weights are damaged. "
            "Download the checkpoint again."
        )
    texts = questions.texts[:num_texts]
    outputs = [_agreement(name, answers.rows[name][:num_texts], expected[name], texts, thresholds) for name in names]
    return Certificate(
        kind="self-consistency" if reference.is_own else "reference",
        reference=reference.name,
        device=answers.device,
        num_texts=num_texts,
        num_held_out_texts=len(questions.texts),
        thresholds=thresholds,
        outputs=outputs,
        passed=not any(agreement.failures for agreement in outputs),
        canary_text=questions.canary_text,
        canary_output=answers.canary_output,
        canary_row=kept_canary(answers.canary, answers.canary_output),
    )


def kept_canary(answer: Float32Array, output: str) -> list[float]:
    """The canary's ``answer`` as a certificate keeps it."""
    return [round(float(value), 5) for value in canary_row(answer, output)]


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
    count = min(_NUM_NEIGHBOURS, among)
    best = [np.argsort(-scores, axis=1, kind="stable")[:, :count] for scores in (actual, expected)]
    shared = [len(set(a) & set(b)) for a, b in zip(*best, strict=True)]
    return float(np.mean(shared)) / count
