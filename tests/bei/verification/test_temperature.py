"""Temperatures: the least likelihood, found as a dense search finds it, and the calibration error by its definition."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from bei.errors import ConfigError
from bei.verification.temperature import fitted_temperature, probabilities, reliability


def drawn(
    temperature: float, seed: int = 0, count: int = 4_000
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.intp]]:
    """Logits, and targets of the distribution that they have at ``temperature``."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(count, 4)) * 3
    shares = probabilities(logits, temperature)
    return logits, np.array([random.choice(4, p=row) for row in shares])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5, 8.0])
def test_the_temperature_is_that_of_the_least_likelihood(temperature: float) -> None:
    logits, targets = drawn(temperature)
    found = fitted_temperature(logits, targets)
    grid = temperature * np.linspace(0.8, 1.25, 901)
    best = min(grid, key=lambda one: reliability(logits, targets, one).nll)
    assert found == pytest.approx(best, rel=1e-3)
    assert found == pytest.approx(temperature, rel=0.15)


def test_a_fitted_temperature_makes_the_calibration_error_small() -> None:
    logits, targets = drawn(3.0)
    before, after = (reliability(logits, targets, one) for one in (1.0, fitted_temperature(logits, targets)))
    assert before.error > 0.15
    assert after.error < 0.03
    assert after.nll < before.nll


def test_the_calibration_error_is_that_of_its_definition() -> None:
    shares = np.array([[0.95, 0.05], [0.92, 0.08], [0.35, 0.65], [1.0, 0.0]])
    with np.errstate(divide="ignore"):
        logits = np.maximum(np.log(shares), -1e3)
    found = reliability(logits, np.array([0, 1, 1, 0]), 1.0)
    assert [one.count for one in found.bins] == [0] * 6 + [1, 0, 0, 3]
    assert found.bins[9].accuracy == pytest.approx(2 / 3)
    assert found.error == pytest.approx((abs(1 - 0.65) + 3 * abs(2 / 3 - 2.87 / 3)) / 4)
    assert found.nll == pytest.approx(-(np.log(0.95) + np.log(0.08) + np.log(0.65)) / 4)


def test_texts_that_fit_no_temperature_are_refused() -> None:
    logits = np.random.default_rng(0).normal(size=(100, 3))
    with pytest.raises(ConfigError, match="answered rightly"):
        fitted_temperature(logits, logits.argmax(axis=1))
    with pytest.raises(ConfigError, match="by chance"):
        fitted_temperature(logits, logits.argmin(axis=1))
