"""The cost model: laws of its predictions, what it learns from steps, what a fit recovers."""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.core import Limits
from bei.engine.packing import bucket
from bei.scheduler.cost_measurement import steps_to_measure
from bei.scheduler.cost_model import Coefficients, CostModel, Curve, Sample, fit, nonnegative_least_squares

LIMITS = Limits(max_num_tokens=4096, max_batch_size=128, max_seq_len=512)

slopes = st.floats(0, 1e-2)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    knots = (0, *sorted(draw(st.sets(st.integers(1, 8192), max_size=4))))
    return Curve(knots, tuple(draw(slopes) for _ in knots))


@st.composite
def models(draw: st.DrawFn) -> CostModel:
    longest = draw(st.integers(1, 600))
    most = draw(st.integers(longest, 5000))
    limits = Limits(most, draw(st.integers(1, min(200, most))), longest)
    tile = 8 * draw(st.integers(1, 40))
    coefficients = Coefficients(
        draw(st.floats(1e-6, 1)), draw(slopes), draw(curves()), draw(curves()), draw(curves()), tile
    )
    return CostModel(limits, coefficients, speed=draw(st.floats(1e-3, 1e3)), is_measured=draw(st.booleans()))


# Beyond the limits too: nobody asks for such steps, and an answer that fell there would be a trap.
steps = st.tuples(st.integers(1, 10_000), st.integers(1, 300), st.integers(1, 1200))


@given(models(), steps, steps)
def test_more_tokens_sequences_or_width_never_predict_less(
    model: CostModel, step: tuple[int, int, int], more: tuple[int, int, int]
) -> None:
    larger = (step[0] + more[0], step[1] + more[1], step[2] + more[2])
    base = model.seconds(*step)
    assert 0 < base < math.inf
    for place in range(3):
        grown = tuple(larger[i] if i == place else step[i] for i in range(3))
        assert model.seconds(*grown) >= base * (1 - 1e-12)
    assert model.seconds(*larger) >= base * (1 - 1e-12)


@given(models(), st.integers(1, 1200), st.integers(0, 100))
def test_a_longer_sequence_never_costs_less(model: CostModel, length: int, more: int) -> None:
    assert 0 < model.sequence_seconds(length) <= model.sequence_seconds(length + more) < math.inf


@given(models(), st.data())
def test_the_efficient_step_fits_the_limits_and_is_efficient(model: CostModel, data: st.DataObject) -> None:
    limits = model.limits
    length = data.draw(st.integers(1, limits.max_seq_len))
    tokens = model.efficient_tokens(length)
    assert length <= tokens <= limits.max_num_tokens
    length = min(-(-length // 8) * 8, limits.max_seq_len)  # lengths count in eights
    most = min(limits.max_batch_size, limits.max_num_tokens // length)

    def rate(tokens: int) -> float:
        return tokens / model.seconds(tokens, -(-tokens // length), length)

    def filled(count: int) -> int:
        whole = min(-(-count * length // model.tile) * model.tile, limits.max_num_tokens)
        return whole if whole <= limits.max_batch_size * length else count * length

    # Buckets make the true rate uneven by a sixteenth, and not every batch size is tried.
    assert rate(max(tokens, length)) >= 0.85 * max(rate(filled(count)) for count in range(1, most + 1))


@given(models(), st.integers(1, 600))
def test_the_largest_efficient_step_is_up_to_twice_the_smallest_and_as_fast(model: CostModel, length: int) -> None:
    smallest, largest = model.efficient_tokens(length), model.largest_efficient_tokens(length)
    assert smallest <= largest <= min(2 * smallest, model.limits.max_num_tokens)


def test_a_larger_step_is_not_efficient_behind_a_knee() -> None:
    width = Curve((0,), (0.0,))
    linear = CostModel(LIMITS, Coefficients(1e-4, 0.0, Curve((0,), (1e-3,)), width))
    assert linear.largest_efficient_tokens(8) == 2 * linear.efficient_tokens(8) < LIMITS.max_num_tokens
    knee = CostModel(LIMITS, Coefficients(1e-4, 0.0, Curve((0, 8), (1e-3, 2e-3)), width))
    assert knee.largest_efficient_tokens(8) == knee.efficient_tokens(8) == 8


def test_an_efficient_step_does_not_reach_over_a_knee() -> None:
    """A step of 768 tokens would take 2.5 times as long as one of 692."""
    width = Curve((0,), (0.0,))
    model = CostModel(LIMITS, Coefficients(0.5, 0.0, Curve((0, 692), (0.0, 0.01)), width), is_measured=True)
    assert 640 <= model.efficient_tokens(8) <= 692
    flat = CostModel(LIMITS, Coefficients(0.5, 0.0, Curve((0,), (0.0,)), width), is_measured=True)
    assert flat.efficient_tokens(8) == 1024  # all 128 sequences


def test_efficient_steps_are_of_whole_tiles() -> None:
    flat, by_token = Curve((0,), (0.0,)), Curve((0,), (1e-5,))
    model = CostModel(LIMITS, Coefficients(1e-3, 0.0, by_token, flat, Curve((0,), (2e-5,)), 192))
    assert model.tile == 192
    assert model.seconds(193, 2, 100) == pytest.approx(1e-3 + 200e-5 + 2 * 384e-5)  # 200: the bucket of 193
    for length in (10, 50, 100, 500):
        assert model.efficient_tokens(length) % 192 == 0 or length == 10  # 128 sequences of those are 1,280 tokens
        assert model.largest_efficient_tokens(length) % 192 == 0 or model.largest_efficient_tokens(length) == 4096


@given(models(), st.lists(st.tuples(steps, st.floats(1e-6, 10)), max_size=5), steps)
def test_a_model_survives_json(
    model: CostModel, seen: list[tuple[tuple[int, int, int], float]], step: tuple[int, int, int]
) -> None:
    before = model.seconds(*step)
    for shape, seconds in seen:
        model.observe(*shape, seconds)
    copy = CostModel.from_json(json.loads(json.dumps(model.to_json())))
    assert copy.seconds(*step) == before
    assert copy.is_measured == model.is_measured
    assert copy.efficient_tokens(step[2]) == model.efficient_tokens(step[2])
    assert copy.sequence_seconds(step[2]) * model.speed == pytest.approx(model.sequence_seconds(step[2]) * copy.speed)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("speed"),
        lambda data: data.update(speed=-1),
        lambda data: data.update(speed="fast"),
        lambda data: data["limits"].update(max_seq_len=0),
        lambda data: data["coefficients"].update(per_step=math.nan),
        lambda data: data["coefficients"].update(per_step=0),
        lambda data: data["coefficients"].update(unknown=1),
        lambda data: data["coefficients"]["tokens"].update(slopes=[-1]),
        lambda data: data["coefficients"]["width"].update(knots=[5]),
        lambda data: data["coefficients"].update(width=None),
        lambda data: data["coefficients"].update(tile=20),
    ],
)
def test_json_of_no_model_is_refused(damage: Callable[[dict[str, object]], object]) -> None:
    data = CostModel.assumed(LIMITS).to_json()
    damage(data)
    with pytest.raises((KeyError, TypeError, ValueError)):
        CostModel.from_json(data)


def test_an_assumed_model_learns_the_speed_from_a_few_steps() -> None:
    truth, model = CostModel.assumed(LIMITS), CostModel.assumed(LIMITS)
    assert not model.is_measured
    for tokens, rows, longest in [(40, 2, 20), (1000, 10, 128), (7, 1, 7)]:
        model.observe(tokens, rows, longest, 37 * truth.seconds(tokens, rows, longest))
    assert model.seconds(512, 4, 200) == pytest.approx(37 * truth.seconds(512, 4, 200))
    assert model.sequence_seconds(100) == pytest.approx(37 * truth.sequence_seconds(100))


def test_a_measured_model_follows_a_machine_that_has_become_slower() -> None:
    model = fit(synthetic_steps(), LIMITS)
    assert model.is_measured
    before = model.seconds(512, 4, 200)
    for step in synthetic_steps()[:40]:
        model.observe(*step[:3], 2 * model.seconds(*step[:3]) / model.speed)
    assert model.seconds(512, 4, 200) == pytest.approx(2 * before)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=7))
def test_a_few_outliers_do_not_move_a_measured_model(noise: list[float]) -> None:
    model = CostModel(LIMITS, CostModel.assumed(LIMITS).coefficients)
    before = model.seconds(512, 4, 200)
    for factor in noise:
        model.observe(512, 4, 200, factor * before)
    assert model.seconds(512, 4, 200) == pytest.approx(before)


@given(st.lists(st.floats(0, 1e9), min_size=10, max_size=80))
def test_noise_moves_a_measured_model_by_a_bounded_factor(noise: list[float]) -> None:
    model = CostModel(LIMITS, CostModel.assumed(LIMITS).coefficients)
    for factor in noise:
        model.observe(512, 4, 200, factor)
    assert 1 / 16 <= model.speed <= 16


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_duration_is_not_learned(seconds: float) -> None:
    model = CostModel.assumed(LIMITS)
    before = model.seconds(512, 4, 200)
    model.observe(512, 4, 200, seconds)
    assert model.seconds(512, 4, 200) == before


def test_threads_may_observe_while_others_ask() -> None:
    model = CostModel.assumed(LIMITS)
    asked = []

    def serve() -> None:
        for _ in range(2000):
            model.observe(512, 4, 200, 0.01)
            asked.append(model.seconds(512, 4, 200))

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(asked) == 8000
    assert model.seconds(512, 4, 200) == pytest.approx(0.01)
    assert asked[-1] == pytest.approx(0.01)


def padding_engine(num_tokens: int, batch_size: int, longest: int) -> float:
    """Matrix products on bucketed tokens, attention on bucketed slots, dearer above a knee: a CPU."""
    slots = bucket(batch_size, 1) * bucket(longest)
    tokens = bucket(num_tokens)
    return 1e-3 + 25e-6 * tokens + 10e-6 * max(0, tokens - 2048) + slots * (1e-6 + 8e-9 * longest)


def varlen_engine(num_tokens: int, batch_size: int, longest: int) -> float:
    """No padding, and small steps take as long as the launch of the kernels: a GPU."""
    return max(1e-3, 2e-6 * num_tokens)


def shapes(count: int, seed: int) -> list[tuple[int, int, int]]:
    rng = random.Random(seed)
    found: list[tuple[int, int, int]] = []
    while len(found) < count:
        longest = int(2 ** rng.uniform(2, 9))
        lengths = [rng.randint(max(1, longest // rng.choice([1, 2, 8])), longest) for _ in range(rng.randint(1, 64))]
        if sum(lengths) <= LIMITS.max_num_tokens:
            found.append((sum(lengths), len(lengths), max(lengths)))
    return found


def synthetic_steps(engine: Callable[[int, int, int], float] = padding_engine, noise: float = 0.0) -> list[Sample]:
    rng = random.Random(0)
    return [Sample(*shape, engine(*shape) * (1 + rng.random() * noise)) for shape in shapes(120, seed=1)]


@pytest.mark.parametrize("engine", [padding_engine, varlen_engine])
def test_a_fit_predicts_shapes_it_has_not_seen(engine: Callable[[int, int, int], float]) -> None:
    model = fit(synthetic_steps(engine), LIMITS)
    errors = [abs(model.seconds(*shape) / engine(*shape) - 1) for shape in shapes(300, seed=2)]
    assert np.median(errors) < 0.05
    assert np.quantile(errors, 0.9) < 0.15


def test_an_engine_without_padding_has_no_cost_of_slots() -> None:
    model = fit(synthetic_steps(varlen_engine), LIMITS)
    assert model.seconds(4096, 128, 512) < 1.1 * model.seconds(4096, 128, 32)
    # Short sequences alone do not fill it: the efficient step is large.
    assert model.efficient_tokens(16) * varlen_engine(16, 1, 16) > 0.5 * LIMITS.max_batch_size * 16 * 2e-6


def tiled_engine(tile: int, num_tokens: int, batch_size: int, longest: int) -> float:
    """Two thirds of the time of a matrix product are by whole tiles: a CPU of two threads (docs/decisions.md)."""
    whole = -(-bucket(num_tokens) // tile) * tile
    return 1e-3 + 10e-6 * bucket(num_tokens) + 20e-6 * whole + bucket(batch_size, 1) * 10e-6


@pytest.mark.parametrize("tile", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_fit_finds_the_size_of_a_tile_from_the_steps_that_are_measured(tile: int, noise: float) -> None:
    rng = random.Random(0)
    samples = []
    for lengths in steps_to_measure(LIMITS):
        shape = (sum(lengths), len(lengths), max(lengths))
        samples.append(Sample(*shape, tiled_engine(tile, *shape) * (1 + rng.random() * noise)))
    assert fit(samples, LIMITS).tile == tile


@pytest.mark.parametrize("engine", [padding_engine, varlen_engine])
@pytest.mark.parametrize("seed", range(5))
def test_a_fit_finds_no_tiles_where_there_are_none(engine: Callable[[int, int, int], float], seed: int) -> None:
    rng = random.Random(seed)
    shapes = [(sum(lengths), len(lengths), max(lengths)) for lengths in steps_to_measure(LIMITS)]
    model = fit([Sample(*shape, engine(*shape) * (1 + rng.random() * 0.03)) for shape in shapes], LIMITS)
    assert not model.has_tiles


def test_a_fit_bears_steps_that_a_neighbour_disturbed() -> None:
    samples = synthetic_steps()
    disturbed = [s._replace(seconds=4 * s.seconds) if i % 10 == 0 else s for i, s in enumerate(samples)]
    model = fit(disturbed, LIMITS)
    errors = [abs(model.seconds(*shape) / padding_engine(*shape) - 1) for shape in shapes(300, seed=2)]
    assert np.median(errors) < 0.08


def test_a_fit_goes_on_beyond_what_was_measured() -> None:
    small = [s for s in synthetic_steps() if s.num_tokens <= 1024 and s.longest <= 128]
    model = fit(small, LIMITS)
    assert model.seconds(2000, 4, 500) == pytest.approx(padding_engine(2000, 4, 500), rel=0.3)


def test_one_step_is_enough_for_a_fit() -> None:
    model = fit([Sample(8, 1, 8, 0.5)], Limits(8, 1, 8))
    assert model.seconds(8, 1, 8) == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("samples", [[], [Sample(8, 1, 8, 1.0), Sample(16, 1, 16, 0.0)]])
def test_a_fit_of_nothing_is_refused(samples: list[Sample]) -> None:
    with pytest.raises(ValueError, match="needs steps"):
        fit(samples, LIMITS)


@given(st.integers(0, 2**32 - 1), st.integers(1, 12))
def test_least_squares_are_optimal_under_their_bound(seed: int, columns: int) -> None:
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(20, columns)), rng.normal(size=20)
    x = nonnegative_least_squares(matrix, target)
    assert (x >= 0).all()
    gradient = matrix.T @ (target - matrix @ x)  # Karush-Kuhn-Tucker: none may help, those in use are at rest
    assert (gradient <= 1e-8).all()
    assert np.abs(gradient[x > 0]).max(initial=0.0) <= 1e-8
