"""Agreement of a model that scores spans for labels: by the scores and the spans that a request would get."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bei.artifact.certificate.record import Thresholds
from bei.core import Encoding, Float32Array
from bei.engine.words import WORD, kinds_of

_THRESHOLD = 0.5  # of the gliner library, and of requests that name none


class SpanFigures(NamedTuple):
    """``score_difference``: 99th percentile of the differences of scores, which are from 0 to 1. ``span_agreement``:
    of the spans that either finds, the share that both find; those within twice the tolerance of the threshold are not
    counted. ``failures``: what misses the thresholds."""

    score_difference: float
    span_agreement: float
    failures: list[str]


def of_words(rows: Sequence[Float32Array], encodings: Sequence[Encoding], columns: int) -> list[Float32Array]:
    """Of each text's ``rows`` [tokens, n], those of tokens that start a word, and the first ``columns``: the others
    mean nothing. Without token types every token is a word."""
    kept = []
    for scores, encoding in zip(rows, encodings, strict=True):
        types = encoding.token_type_ids
        kept.append((scores if types is None else scores[kinds_of(types) == WORD])[:, :columns])
    return kept


def span_figures(actual: npt.NDArray[np.float32], expected: npt.NDArray[np.float32], least: Thresholds) -> SpanFigures:
    """Figures of logits [words, n]. The tolerance is that of the mean cosine m: a difference d whose share of a
    correlation, 1 - d^2 / 2, is m. Spans must agree as the first percentile of cosines."""
    ours, theirs = (1 / (1 + np.exp(-np.clip(side.astype(np.float64), -50, 50))) for side in (actual, expected))
    tolerance = float(np.sqrt(2 * (1 - least.mean)))
    difference = round(float(np.percentile(np.abs(ours - theirs), 99)), 5)
    is_clear = np.abs(theirs - _THRESHOLD) > 2 * tolerance
    found, wanted = (side > _THRESHOLD for side in (ours, theirs))
    either = int(((found | wanted) & is_clear).sum())
    agreement = round(float((found & wanted & is_clear).sum() / either), 5) if either else 1.0
    return SpanFigures(difference, agreement, list(_failures(difference, tolerance, agreement, least.p1)))


def _failures(difference: float, tolerance: float, agreement: float, least: float) -> Iterator[str]:
    if difference > tolerance:
        yield f"99th percentile of the scores' differences {difference:.5f} above {tolerance:.5f}"
    if agreement < least:
        yield f"share of equal spans {agreement:.5f} below {least:g}"
