"""Percentiles that somebody waited, and verdicts that can be no."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.harness.summaries import flatness, latency_ms

TIMES = np.arange(0, 1200.0)
NOISE = np.random.default_rng(0).normal(0, 1, len(TIMES))


def test_percentiles_are_samples_the_nearest_rank_above() -> None:
    figures = latency_ms(np.arange(1, 201) / 1e3)
    assert figures == {"count": 200, "p50": 100, "p90": 180, "p99": 198, "max": 200}
    assert latency_ms([]) == {"count": 0}
    assert latency_ms([0.5])["p99"] == 500


def judged(values: object, **bounds: float) -> bool:
    settings = {"warm_s": 120.0, "growth": 0.05, "spread": 0.15, **bounds}
    return bool(flatness(TIMES, np.asarray(values), **settings)["flat"])


def test_noise_around_a_level_is_flat_and_a_leak_is_not() -> None:
    assert judged(200 + NOISE)
    assert not judged(200 + NOISE + 0.02 * TIMES)  # 21 MB in 18 minutes


def test_what_happens_while_it_warms_up_does_not_count() -> None:
    assert judged(np.where(TIMES < 120, TIMES, 200.0))
    assert not judged(np.where(TIMES < 600, 100.0, 200.0))


def test_a_wide_spread_without_a_slope_is_not_flat_and_falling_is_no_growth() -> None:
    assert not judged(200 + 60 * (TIMES % 2))
    assert judged(200 - 0.02 * TIMES)


def test_small_counts_have_a_slack() -> None:
    descriptors = 20 + (TIMES % 3)
    assert not judged(descriptors, spread=0.05)
    assert judged(descriptors, spread=0.05, slack=4)


def test_the_slope_is_in_units_an_hour_and_too_few_samples_are_refused() -> None:
    assert flatness(TIMES, TIMES, warm_s=120, growth=1, spread=1)["slope an hour"] == pytest.approx(3600)
    assert flatness(TIMES, TIMES, warm_s=120, growth=1, spread=1)["rise"] == pytest.approx(1079)
    with pytest.raises(ValueError, match="say nothing"):
        flatness(TIMES[:100], TIMES[:100], warm_s=120, growth=1, spread=1)
