"""Differences between scrapes of a bei server's metrics; the names are those that bei exposes."""

from __future__ import annotations

import pytest

from bei.cli.bench.metrics_scraper import samples_of, values_of
from bei.core import Limits
from bei.metrics.registry import Metrics, ModelMetrics
from tests.bei.metrics.test_registry import STATS


def test_samples_are_what_happened_between_scrapes() -> None:
    metrics = Metrics()
    model, other = ModelMetrics(metrics, "m"), ModelMetrics(metrics, "n")
    first = values_of(metrics.render().decode())
    model.batch([60, 40], engine_s=0.25, predicted_s=0.2, waits=[("interactive", 0.010), ("bulk", 0.030)])
    model.batch([50] * 6, engine_s=0.35, predicted_s=0.2, waits=[("bulk", 0.050)] * 6)
    other.batch([200], engine_s=0.4, predicted_s=0.2, waits=[("bulk", 0.130)])
    model.watch(lambda: STATS, Limits(512, 16, 512))
    second = values_of(metrics.render().decode())
    (sample,) = samples_of([(-1.0, first), (1.0, second)])
    assert sample.at_s == -1.0
    assert sample.steps_per_s == 1.5
    assert sample.tokens_per_step == 200
    assert sample.sequences_per_step == 3
    assert sample.tokens_per_s == 300
    assert sample.engine_share == 0.5
    assert sample.slots_per_token == pytest.approx((120 + 300 + 200) / 600, abs=1e-3)
    assert sample.waiting == {"interactive": 1, "bulk": 5}
    assert sample.queue_ms == {"interactive": 10, "bulk": pytest.approx((0.03 + 0.05 * 6 + 0.13) / 8 * 1e3)}


def test_an_interval_without_steps_has_no_means_and_what_was_before_the_window_is_left_out() -> None:
    nothing = values_of('bei_tokens_total 5\nother_total 3\nbei_requests_total{route="x"} 4\n')
    assert dict(nothing) == {("bei_tokens_total", ""): 5}
    samples = samples_of([(-3.0, nothing), (-1.0, nothing), (1.0, nothing)])
    assert len(samples) == 1
    assert (samples[0].tokens_per_step, samples[0].slots_per_token, samples[0].engine_share) == (None, None, 0)
