"""Compares an engine's answers with a reference's and computes the figures of the certificate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bei.artifact.certificate.canary import BY_COLUMN, canary_row
from bei.artifact.certificate.record import (
    Agreement,
    Certificate,
    CosineHistogram,
    QuantizationRecord,
    RetrievalAgreement,
    Thresholds,
    WorstText,
)
from bei.artifact.manifest import Classification
from bei.core import Float32Array
from bei.errors import VerificationError
from bei.verification.engine_answers import EngineAnswers, HeldOut, Rows
from bei.verification.label_agreement import kl_divergence, label_agreement
from bei.verification.pair_agreement import of_pairs
from bei.verification.rank_correlation import kendall_tau, spearman
from bei.verification.span_agreement import SpanFigures, of_words, span_figures

# Bucket edges of a histogram, as distances from a cosine of 1: half a decade each, so that 0.99999, 0.9999, 0.999, 0.99
# and 0.9 are edges. Cosines are rounded to six digits.
HISTOGRAM_EDGES = (1e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)

_LABELS = ("logits", "token_logits")
_SPANS = "span_logits"
_RELATIONS = "relation_logits"
_NUM_NEIGHBOURS = 10
_NUM_WORST = 10
_MOST_NEIGHBOURS = 1000
_SIMILARITY_DIGITS = 5
# The size below which a score's error is judged as that of a score of this size: at 2 a sigmoid is 0.88.
_LEAST_SIZE = 2.0


@dataclass(frozen=True)
class ReferenceAnswers:
    """Rows of the reference called ``name`` for the first held-out texts.

    ``is_own``: the reference is bei's own engine, so the certificate shows self-consistency only.
    """

    name: str
    is_own: bool
    rows: Rows

    @property
    def num_texts(self) -> int:
        """Number of texts that were answered."""
        return len(next(iter(self.rows.values()), []))


@dataclass(frozen=True)
class OutputMeaning:
    """The meaning of outputs. Scores: ``ranks``: a reranker's; ``classification``: probabilities of labels. Vectors:
    those of ``with_lengths`` are answered with the lengths that the engine gives them. ``most_boundaries``: scores of
    spans are those of pairs of up to so many starts and ends."""

    ranks: bool = False
    classification: Classification | None = None
    with_lengths: frozenset[str] = frozenset()
    most_boundaries: int | None = None


def compare(
    answers: EngineAnswers,
    reference: ReferenceAnswers,
    questions: HeldOut,
    thresholds: Thresholds,
    *,
    meaning: OutputMeaning | None = None,
    quantization: QuantizationRecord | None = None,
    retrieval: RetrievalAgreement | None = None,
) -> Certificate:
    """The certificate of all outputs over the texts that both sides answered; the caller decides ``passed``.

    ``quantization`` and ``retrieval`` are copied into it. Raises VerificationError only if the reference is unusable.
    """
    names, num_texts = list(answers.rows), min(answers.num_texts, reference.num_texts)
    expected = {name: reference.rows[name][:num_texts] for name in names}
    if not all(np.isfinite(rows).all() for name in names for rows in expected[name]):
        raise VerificationError(
            f"The reference ({reference.name}) itself gives NaN or Inf: the checkpoint's weights are damaged. "
            "Download the checkpoint again."
        )
    texts = questions.texts[:num_texts]
    actual = {name: answers.rows[name][:num_texts] for name in names}
    if _SPANS in names and meaning and meaning.most_boundaries:
        sides = actual[_SPANS], expected[_SPANS]
        encodings = questions.encodings[:num_texts]
        actual[_SPANS], expected[_SPANS] = of_pairs(*sides, encodings, meaning.most_boundaries)
    elif _SPANS in names:
        for side in (actual, expected):
            columns = min(actual[_SPANS][0].shape[1], expected[_SPANS][0].shape[1])  # each padded as its step was
            side[_SPANS] = of_words(side[_SPANS], questions.encodings[:num_texts], columns)
    if _RELATIONS in names:  # of the one pair of each text, which fills its rows
        for side in (actual, expected):
            side[_RELATIONS] = [rows[:1, :1] for rows in side[_RELATIONS]]
    outputs = [
        _agreement(name, actual[name], expected[name], texts, thresholds, meaning or OutputMeaning()) for name in names
    ]
    missed = [row.failures for row in outputs] + ([retrieval.failures] if retrieval else [])
    return Certificate(
        kind="self-consistency" if reference.is_own else "reference",
        reference=reference.name,
        reference_is_independent=not reference.is_own,
        device=answers.device,
        num_texts=num_texts,
        num_held_out_texts=len(questions.texts),
        texts_sha256=questions.texts_sha256,
        thresholds=thresholds,
        outputs=outputs,
        retrieval=retrieval,
        quantization=quantization,
        passed=not any(missed),
        canary_text=questions.canary_text,
        canary_output=answers.canary_output,
        canary_row=kept_canary(answers.canary, answers.canary_output),
    )


def kept_canary(answer: Float32Array, output: str) -> list[float]:
    """The canary's ``answer`` in the form that a certificate stores."""
    return [round(float(value), 5) for value in canary_row(answer, output)]


def _agreement(
    output: str,
    actual: Sequence[Float32Array],
    expected: Sequence[Float32Array],
    texts: Sequence[str],
    thresholds: Thresholds,
    meaning: OutputMeaning,
) -> Agreement:
    """The certificate's entry for one output."""
    # A certificate must not hold NaN or Inf: such an answer counts as the opposite of the expected one.
    is_finite = [bool(np.isfinite(rows).all()) for rows in actual]
    checked = [
        rows if finite else -reference for rows, reference, finite in zip(actual, expected, is_finite, strict=True)
    ]
    found = _compare(checked, expected, is_finite, output, has_length=output in meaning.with_lengths)
    scores = _figures_of_scores(checked, expected, output, meaning)
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
    spans: SpanFigures | None = None
    if output == _SPANS:
        spans = span_figures(np.concatenate(checked), np.concatenate(expected), thresholds)
        failures = spans.failures
    worst = np.lexsort((-found.differences, found.of_texts))[:_NUM_WORST]  # stable: ties keep their order
    return Agreement(
        output=output,
        cosine_mean=figures["mean"],
        cosine_p1=figures["p1"],
        cosine_min=figures["min"],
        histogram=_histogram(found.cosines),
        max_abs_difference=round(float(found.differences.max()), 5),
        ranking_overlap=round(found.ranking_overlap, 4),
        spearman=None if found.spearman is None else round(found.spearman, 5),
        kendall_tau=scores.kendall_tau,
        label_agreement=scores.label_agreement,
        kl_divergence=scores.kl_divergence,
        score_difference=spans.score_difference if spans else None,
        span_agreement=spans.span_agreement if spans else None,
        worst_texts=[WorstText(text=texts[index], cosine=float(found.of_texts[index])) for index in worst],
        failures=failures,
    )


class _OfScores(NamedTuple):
    kendall_tau: float | None = None
    label_agreement: float | None = None
    kl_divergence: float | None = None


def _figures_of_scores(
    actual: Sequence[Float32Array], expected: Sequence[Float32Array], output: str, meaning: OutputMeaning
) -> _OfScores:
    """Figures that only scores of labels have."""
    if output not in _LABELS:
        return _OfScores()
    ours, theirs = (np.concatenate([np.atleast_2d(rows) for rows in side]) for side in (actual, expected))
    if output == "logits" and meaning.ranks:
        near = [side[:, 0].round(_SIMILARITY_DIGITS) for side in (ours, theirs)]  # near ties are ties
        return _OfScores(kendall_tau=round(kendall_tau(*near), 5))
    if meaning.classification is None:
        return _OfScores()
    divergence = kl_divergence(ours, theirs, meaning.classification.function)
    return _OfScores(
        label_agreement=round(label_agreement(ours, theirs), 5),
        kl_divergence=None if divergence is None else round(divergence, 6),
    )


def _histogram(cosines: npt.NDArray[np.float64]) -> CosineHistogram:
    places = np.searchsorted(HISTOGRAM_EDGES, np.round(1.0 - cosines, 6), side="right")
    counts: list[int] = np.bincount(places, minlength=len(HISTOGRAM_EDGES) + 1).tolist()
    return CosineHistogram(edges=list(HISTOGRAM_EDGES), counts=counts)


@dataclass(frozen=True)
class _Comparison:
    """``cosines`` of rows, or their shares in the columns' correlations, and the ``mean``; ``of_texts``: the lowest of
    each text; ``differences``: the largest of each text; ``spearman`` of the vectors' similarities."""

    cosines: npt.NDArray[np.float64]
    mean: float
    of_texts: npt.NDArray[np.float64]
    differences: npt.NDArray[np.float64]
    ranking_overlap: float
    spearman: float | None


def _compare(
    actual: Sequence[Float32Array],
    expected: Sequence[Float32Array],
    is_finite: Sequence[bool],
    output: str,
    *,
    has_length: bool,
) -> _Comparison:
    by_column = output in BY_COLUMN  # compared by column over all texts, not by row
    rows = [np.concatenate([np.atleast_2d(part) for part in side]).astype(np.float64) for side in (actual, expected)]
    ours, theirs = rows if by_column else [normalized(side) for side in rows]
    # Rounded before any decision: the reference's last bits depend on torch's number of threads, and equal builds must
    # have equal certificates. In float64 the figures vary by 1e-9, far below the rounding.
    lengths = [len(np.atleast_2d(part)) for part in expected]
    ends = np.cumsum(lengths)[:-1]
    differences = np.array([part.max() for part in np.split(np.round(np.abs(ours - theirs).max(axis=1), 6), ends)])
    correlation = None
    if by_column:
        of_size = _shares_of_size(ours, theirs, output)
        ours, theirs = _centred(ours), _centred(theirs)
        mean, overlap = _cosines(ours.T, theirs.T).mean(), _top_overlap(ours.T, theirs.T)
        by_row = _shares(ours, theirs).min(axis=1)
        if output != _SPANS:  # which have figures of their own
            mean, by_row = min(mean, of_size.mean()), np.minimum(by_row, of_size.min(axis=1))
    else:
        similarities = _similarities(ours), _similarities(theirs)
        overlap, correlation = _neighbour_overlap(*similarities), _similarity_spearman(*similarities)
        by_row = _cosines(ours, theirs)
        if has_length:
            by_row = np.minimum(by_row, _shares_of_length(*rows))
        mean = by_row.mean()
    by_row = np.where(np.repeat(is_finite, lengths), by_row, -1.0).round(6)
    of_texts = np.array([part.min() for part in np.split(by_row, ends)])
    return _Comparison(by_row, float(mean), of_texts, differences, overlap, correlation)


def _shares(ours: npt.NDArray[np.float64], theirs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Each row's share in the mean correlation of the columns: 1 - d^2 / 2 for a difference d of the columns at a mean
    square of 1; at least -1."""
    scaled = [
        side / np.maximum(np.sqrt(np.mean(side**2, axis=0, keepdims=True)), 1e-12)  # two zeros agree
        for side in (ours, theirs)
    ]
    shares: npt.NDArray[np.float64] = np.maximum(1 - (scaled[0] - scaled[1]) ** 2 / 2, -1.0)
    return shares


def _shares_of_size(
    ours: npt.NDArray[np.float64], theirs: npt.NDArray[np.float64], output: str
) -> npt.NDArray[np.float64]:
    """1 - d^2 / 2 for each score's difference d from the expected one, in units of its column's size, but for scores
    that become probabilities at least ``_LEAST_SIZE``: standardized scores hide a factor and a term."""
    least = 1e-12 if output == "token_weights" else _LEAST_SIZE
    size = np.maximum(np.sqrt(np.mean(theirs**2, axis=0, keepdims=True)), least)
    shares: npt.NDArray[np.float64] = np.maximum(1 - ((ours - theirs) / size) ** 2 / 2, -1.0)
    return shares


def _shares_of_length(ours: npt.NDArray[np.float64], theirs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """1 - d^2 / 2 for the distance d of two rows in units of the expected one's length, at least a tenth of the mean:
    the cosine, where both lengths are equal."""
    lengths = np.linalg.norm(theirs, axis=1)
    lengths = np.maximum(lengths, max(lengths.mean() / 10, 1e-12))
    shares: npt.NDArray[np.float64] = np.maximum(1 - (np.linalg.norm(ours - theirs, axis=1) / lengths) ** 2 / 2, -1.0)
    return shares


def _centred(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Columns minus their means; a nearly constant column is unchanged."""
    centred: npt.NDArray[np.float64] = np.where(rows.std(axis=0) > 1e-6, rows - rows.mean(axis=0), rows)
    return centred


def _cosines(ours: npt.NDArray[np.float64], theirs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Cosines by row. Two rows of zeros agree: a sparse vector may be empty."""
    products = (normalized(ours) * normalized(theirs)).sum(axis=1)
    empty = ~ours.any(axis=1) & ~theirs.any(axis=1)
    cosines: npt.NDArray[np.float64] = np.where(empty, 1.0, products)
    return cosines


def normalized(vectors: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Rows at unit length, in float64."""
    wide = vectors.astype(np.float64)
    unit: npt.NDArray[np.float64] = wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-12)
    return unit


def _similarities(vectors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Cosines [n, n] of at most the first thousand unit vectors (tokens are many); nearly equal values are ties."""
    first = vectors[:_MOST_NEIGHBOURS]
    similarities: npt.NDArray[np.float64] = (first @ first.T).round(_SIMILARITY_DIGITS)
    return similarities


def _neighbour_overlap(actual: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]) -> float:
    """Overlap of the nearest neighbours by these similarities; ties go by position."""
    others = [np.where(np.eye(len(side), dtype=np.bool_), -2.0, side) for side in (actual, expected)]
    return _overlap(others[0], others[1], among=len(actual) - 1)


def _similarity_spearman(actual: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]) -> float:
    """Spearman's rho over the similarities of all pairs of vectors."""
    above = np.triu_indices(len(actual), k=1)
    return spearman(actual[above], expected[above])


def _top_overlap(actual: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]) -> float:
    """Overlap of the highest scores. Rows are labels, columns texts or tokens."""
    digits = _SIMILARITY_DIGITS
    return _overlap(actual.round(digits), expected.round(digits), among=actual.shape[1])


def _overlap(actual: npt.NDArray[np.float64], expected: npt.NDArray[np.float64], among: int) -> float:
    count = min(_NUM_NEIGHBOURS, among)
    best = [np.argsort(-scores, axis=1, kind="stable")[:, :count] for scores in (actual, expected)]
    shared = [len(set(a) & set(b)) for a, b in zip(*best, strict=True)]
    return float(np.mean(shared)) / count
