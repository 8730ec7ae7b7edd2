"""Temperature scaling (Guo et al. 2017, arXiv:1706.04599): logits divided by one number before the softmax."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bei.artifact.certificate.reliability import LEAST, MOST, Reliability, ReliabilityBin
from bei.errors import ConfigError

NUM_BINS = 10
_STEPS = 60  # halvings: to the last digits of float64

Float64Array = npt.NDArray[np.float64]


def fitted_temperature(logits: Float64Array, targets: npt.NDArray[np.intp]) -> float:
    """The temperature of the least negative log likelihood of ``targets`` [n], columns of ``logits`` [n, labels].

    In the inverse temperature b the likelihood is convex: its derivative, the mean of what the softmax of b z expects
    of z less the target's z, is halved down to its zero. Raises ConfigError where there is none within the bounds.
    """

    def derivative(inverse: float) -> float:
        expected = (probabilities(logits, 1 / inverse) * logits).sum(axis=1)
        return float((expected - logits[np.arange(len(targets)), targets]).mean())

    low, high = 1 / MOST, 1 / LEAST
    if derivative(high) <= 0:
        raise ConfigError(
            "The texts fit no temperature: nearly all are answered rightly, and the surer the better. Give texts "
            "that are as hard as those of your users."
        )
    if derivative(low) >= 0:
        raise ConfigError(
            "The texts fit no temperature: the answers are right no more often than by chance. Check the labels."
        )
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if derivative(middle) < 0 else (low, middle)
    return 1 / ((low + high) / 2)


def probabilities(logits: Float64Array, temperature: float) -> Float64Array:
    """The softmax of ``logits`` [n, labels] divided by ``temperature``."""
    powers: Float64Array = np.exp((logits - logits.max(axis=1, keepdims=True)) / temperature)
    shares: Float64Array = powers / powers.sum(axis=1, keepdims=True)
    return shares


def reliability(logits: Float64Array, targets: npt.NDArray[np.intp], temperature: float) -> Reliability:
    """What probabilities at ``temperature`` are worth against ``targets`` [n]."""
    shares = probabilities(logits, temperature)
    scaled = (logits - logits.max(axis=1, keepdims=True)) / temperature
    likelihoods = scaled[np.arange(len(targets)), targets] - np.log(np.exp(scaled).sum(axis=1))
    best, is_right = shares.max(axis=1), shares.argmax(axis=1) == targets
    places = np.minimum((best * NUM_BINS).astype(np.intp), NUM_BINS - 1)
    bins = [_bin(best[places == place], is_right[places == place]) for place in range(NUM_BINS)]
    error = sum(one.count * abs(one.accuracy - one.confidence) for one in bins) / len(targets)
    return Reliability(nll=max(0.0, float(-likelihoods.mean())), error=error, bins=bins)


def _bin(best: Float64Array, is_right: npt.NDArray[np.bool_]) -> ReliabilityBin:
    if not len(best):
        return ReliabilityBin(count=0, confidence=0.0, accuracy=0.0)
    return ReliabilityBin(count=len(best), confidence=float(best.mean()), accuracy=float(is_right.mean()))
