"""Agreement of classifiers: the label that scores highest, and the probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bei.core import ScoreFunction


def label_agreement(actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """The share of rows of scores [n, labels] in which both score the same label highest (the first of equal ones)."""
    return float(np.mean(actual.argmax(axis=1) == expected.argmax(axis=1)))


def kl_divergence(actual: npt.NDArray[Any], expected: npt.NDArray[Any], function: ScoreFunction) -> float | None:
    """Mean over rows of KL(expected || actual) in nats, for logits [n, labels] turned into probabilities by
    ``function``.

    With the sigmoid each label is a distribution of its own, and the divergences are added. None for scores that are
    not probabilities.
    """
    if function not in ("sigmoid", "softmax"):
        return None
    logs = _log_softmax if function == "softmax" else _log_sigmoid
    ours, theirs = logs(actual), logs(expected)
    of_rows = (np.exp(theirs) * (theirs - ours)).sum(axis=tuple(range(1, theirs.ndim)))
    return max(0.0, float(of_rows.mean()))


def _log_softmax(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    below = wide - wide.max(axis=1, keepdims=True)
    logs: npt.NDArray[np.float64] = below - np.log(np.exp(below).sum(axis=1, keepdims=True))
    return logs


def _log_sigmoid(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Logarithms of both probabilities of each label, [n, labels, 2]."""
    wide = logits.astype(np.float64)
    logs: npt.NDArray[np.float64] = -np.logaddexp(0.0, np.stack([-wide, wide], axis=2))
    return logs
