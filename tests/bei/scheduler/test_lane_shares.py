"""The length of a capped step, computed from measured costs: what it is worth, and how far noise moves it."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

import numpy as np
import pytest

from bei.core import Limits
from bei.scheduler.cost_measurement import steps_to_measure
from bei.scheduler.cost_model import CostModel, Sample, fit
from bei.scheduler.lane_shares import capped_step_s, short_step_s

LIMITS = Limits(max_num_tokens=8192, max_batch_size=256, max_seq_len=512)


@dataclass(frozen=True)
class Curve:
    """Milliseconds of an engine's steps. ``beginning``: what the first few hundred tokens cost beside what each costs,
    since kernels for few rows are slow. ``tile``: by how many tokens the time grows; 1: by each."""

    per_step: float
    per_token: float
    per_sequence: float
    per_slot: float
    beginning: float = 0.0
    tile: int = 1

    def seconds(self, num_tokens: int, batch_size: int, longest: int) -> float:
        whole = -(-num_tokens // self.tile) * self.tile
        per_row = self.per_sequence + self.per_slot * longest
        beginning = self.beginning * (1 - exp(-num_tokens / 400))
        return (self.per_step + self.per_token * whole + batch_size * per_row + beginning) / 1000

    def measured(self, noise: float, seed: int) -> CostModel:
        """What a measurement makes of it whose every step is wrong by up to this share."""
        errors = np.random.default_rng(seed)
        samples = [
            Sample(*shape, self.seconds(*shape) * (1 + errors.uniform(-noise, noise)))
            for shape in ((sum(lengths), len(lengths), max(lengths)) for lengths in steps_to_measure(LIMITS))
        ]
        return fit(samples, LIMITS)


CURVES = {
    "small encoder": Curve(1.2, 0.010, 0.010, 0.0005),
    "BERT-base": Curve(4.0, 0.090, 0.040, 0.002),
    "whole tiles": Curve(1.2, 0.010, 0.010, 0.0005, tile=64),
    "slow beginning": Curve(1.0, 0.020, 0.010, 0.0005, beginning=3.0),
    "tiny": Curve(0.2, 0.001, 0.002, 0.00005),
}


@pytest.mark.parametrize("curve", [*CURVES.values()], ids=[*CURVES])
def test_noise_of_the_measured_costs_moves_a_capped_step_little(curve: Curve) -> None:
    """As the smallest of the predicted sums it was, by chance, from 0.6 to 1.6 times as long as usual."""
    caps_s = [capped_step_s(curve.measured(0.1, seed), LIMITS) for seed in range(6)]
    usual_s = float(np.median(caps_s))
    assert 0.85 * usual_s <= min(caps_s)
    assert max(caps_s) <= 1.15 * usual_s


@pytest.mark.parametrize("curve", [*CURVES.values()], ids=[*CURVES])
def test_a_capped_step_costs_little_more_than_the_best_one(curve: Curve) -> None:
    """The loss of bulk work's rate, and 0.003 of it for each time of a short text that a step takes."""
    sizes = range(64, LIMITS.max_num_tokens + 1, 64)
    times_s = [curve.seconds(size, size // 64, 64) for size in sizes]
    best_rate = max(size / time_s for size, time_s in zip(sizes, times_s, strict=True))
    short_s = curve.seconds(32, 1, 32)

    def cost(size: int, time_s: float) -> float:
        return 1 - size / time_s / best_rate + 0.003 * time_s / short_s

    costs = [cost(*step) for step in zip(sizes, times_s, strict=True)]
    cap_s = capped_step_s(curve.measured(0.0, 0), LIMITS) / 1.15
    chosen = int(np.searchsorted(times_s, cap_s * (1 + 1e-6))) - 1
    assert costs[max(0, chosen)] <= min(costs) + 0.01


@pytest.mark.parametrize("curve", [*CURVES.values()], ids=[*CURVES])
def test_a_capped_step_is_as_long_as_the_texts_allow_that_wait_for_it(curve: Curve) -> None:
    """Images took 40 ms each, so one more hardly counted, and texts of 10 ms waited for steps of 0.6 s."""
    costs = curve.measured(0.0, 0)
    short_s = short_step_s(costs, LIMITS)
    assert capped_step_s(costs, LIMITS, short_s) == capped_step_s(costs, LIMITS)
    caps_s = [capped_step_s(costs, LIMITS, short_s * factor) for factor in (0.1, 0.3, 1.0, 3.0)]
    assert caps_s == sorted(caps_s)
    assert caps_s[0] < caps_s[2]
