"""Scales: the choice of each method, and outliers."""

from __future__ import annotations

import numpy as np
import pytest

from bei_build.quantization.activation_stats import ActivationStats, FloatArray
from bei_build.quantization.rounding import round_rows, round_to
from bei_build.quantization.scales import ChosenScales, KnownScales, choose_scales, worst
from bei_build.spec.linear_layers import LinearLayer
from bei_build.spec.quantization import LARGEST, Format, LayerQuantization, Method, Quantization

METHODS: tuple[Method, ...] = ("max", "mse")
LAYERS = (
    LinearLayer("up", "mlp", ("up",)),
    LinearLayer("gate", "mlp", ("gate",)),
    LinearLayer("down", "down", ("down",)),
)


def matrices(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        name: random.normal(size=shape).astype(np.float32)
        for name, shape in {"up": (24, 16), "gate": (24, 16), "down": (16, 24)}.items()
    }


def stats_of(rows: FloatArray) -> ActivationStats:
    return ActivationStats(np.abs(rows).max(axis=0), rows.max(axis=0), float(rows.min()), rows)


def observations(outlier: float = 1.0) -> dict[str, ActivationStats]:
    """Normal inputs; channel 3 of the first group is ``outlier`` times as large."""
    random = np.random.default_rng(1)
    found = {}
    for group, width in (("mlp", 16), ("down", 24)):
        rows = random.normal(size=(200, width)).astype(np.float32)
        if group == "mlp":
            rows[:, 3] *= outlier
        found[group] = stats_of(rows)
    return found


def chosen(
    method: Method, number_format: Format = "int8", outlier: float = 1.0, percentile: float = 99.0
) -> ChosenScales:
    return choose_scales(LAYERS, observations(outlier), matrices().__getitem__, number_format, method, percentile)


def test_max_is_the_largest_value_seen_and_smooths_nothing() -> None:
    found = chosen("max").quantization.layers
    assert found["down"].input_amax == pytest.approx(observations()["down"].channel_amax.max(), rel=1e-3)
    assert all(layer.smoothing is None for layer in found.values())


def test_a_percentile_is_below_the_largest_value() -> None:
    seen = observations()["down"].sample
    found = chosen("percentile").quantization.layers["down"].input_amax
    assert found == pytest.approx(np.percentile(np.abs(seen), 99.0), rel=1e-3)
    assert found < np.abs(seen).max()


def test_layers_that_read_one_input_have_one_scale_for_it() -> None:
    found = chosen("mse", "fp8", outlier=50.0).quantization.layers
    assert found["up"] == found["gate"]
    assert found["up"] != found["down"]


def test_an_outlying_channel_is_smoothed_and_the_error_falls() -> None:
    """The matrix has small weights for it."""
    weights = matrices()
    for name in ("up", "gate"):
        weights[name][:, 3] *= 1e-4
    seen = observations(60.0)
    plain, best = (choose_scales(LAYERS, seen, weights.__getitem__, "int8", method, 99.0) for method in METHODS)
    factors = best.quantization.layers["up"].smoothing
    assert factors is not None
    assert int(np.argmax(factors)) == 3
    assert best.errors["up"] < 0.5 * plain.errors["up"]


@pytest.mark.parametrize("number_format", ["fp8", "int8"])
def test_the_error_is_what_rounding_does_to_the_product(number_format: Format) -> None:
    found = chosen("max", number_format)
    rows, matrix = observations()["down"].sample, matrices()["down"]
    scale = found.quantization.layers["down"].input_amax / LARGEST[number_format]
    exact = rows @ matrix.T
    off = round_to(rows, scale, number_format) @ round_rows(matrix, number_format).T - exact
    expected = np.mean(((off**2).sum(1) / (exact**2).sum(1)) ** 2) ** 0.25
    assert found.errors["down"] == pytest.approx(expected, rel=1e-3)
    assert found.errors["down"] < 0.1


def test_the_mean_square_error_is_never_above_that_of_the_largest_value() -> None:
    for outlier in (1.0, 5.0, 100.0):
        plain, best = (chosen(method, outlier=outlier) for method in ("max", "mse"))
        for group in (("up", "gate"), ("down",)):
            assert sum(best.errors[name] for name in group) <= 1.001 * sum(plain.errors[name] for name in group)


def of_tokens_unlike_in_size(spread: float) -> dict[str, ActivationStats]:
    """Inputs within ± 1, every fourth token's ``spread`` times as large."""
    random, found = np.random.default_rng(3), {}
    for group, it in observations().items():
        rows = random.uniform(-1, 1, it.sample.shape).astype(np.float32)
        rows[::4] *= spread
        found[group] = stats_of(rows)
    return found


def test_tokens_unlike_in_size_have_a_range_each() -> None:
    for spread, expected in ((1.0, False), (100.0, True)):
        seen = of_tokens_unlike_in_size(spread)
        found = choose_scales(LAYERS, seen, matrices().__getitem__, "int8", "mse", 99.0)
        assert all(layer.per_token == expected for layer in found.quantization.layers.values())
        assert max(found.errors.values()) < 0.03
    plain = choose_scales(LAYERS, seen, matrices().__getitem__, "int8", "max", 99.0)
    assert min(plain.errors.values()) > 0.1


def of_gelu() -> dict[str, ActivationStats]:
    """Inputs as GELU gives them."""
    return {group: stats_of(it.sample / (1 + np.exp(-1.702 * it.sample))) for group, it in observations().items()}


def test_an_input_with_a_bound_near_zero_is_stored_from_there_on_in_unsigned_numbers() -> None:
    found = choose_scales(LAYERS, of_gelu(), matrices().__getitem__, "int8", "mse", 99.0)
    plain = choose_scales(LAYERS, of_gelu(), matrices().__getitem__, "int8", "max", 99.0)
    for name, layer in found.quantization.layers.items():
        assert layer.least == pytest.approx(of_gelu()["down" if name == "down" else "mlp"].least, rel=1e-3)
        assert found.errors[name] < 0.8 * plain.errors[name]
    signed = choose_scales(LAYERS, observations(), matrices().__getitem__, "int8", "mse", 99.0)
    assert all(layer.least is None for layer in signed.quantization.layers.values())


def test_a_range_for_each_token_may_be_smoothed_too() -> None:
    rows = of_tokens_unlike_in_size(100.0)["down"].sample.copy()
    rows[:, 5] *= 50.0
    weights = matrices()
    weights["down"][:, 5] *= 0.01
    seen = {**observations(), "down": stats_of(rows)}
    layer = choose_scales(LAYERS, seen, weights.__getitem__, "int8", "mse", 99.0).quantization.layers["down"]
    assert layer.per_token
    assert layer.input_amax == 1.0
    assert layer.smoothing is not None
    assert int(np.argmax(layer.smoothing)) == 5


def test_fp8_has_one_range_for_all_tokens() -> None:
    seen = of_tokens_unlike_in_size(1000.0)
    found = choose_scales(LAYERS, seen, matrices().__getitem__, "fp8", "mse", 99.0)
    assert not any(layer.per_token for layer in found.quantization.layers.values())


def test_ranges_and_row_scales_that_are_given_are_taken() -> None:
    matrix, scales = matrices()["down"], np.full(16, 0.25, np.float32)
    given = KnownScales({"up": 3.0, "gate": 5.0, "down": 7.0}, {"down": {"down": scales}}, {"down": 9.0})
    found = choose_scales(LAYERS, observations(), matrices().__getitem__, "int8", "mse", 99.0, given)
    layers = found.quantization.layers
    assert [layers[name].input_amax for name in ("up", "gate", "down")] == [5.0, 5.0, 7.0]
    assert [layers[name].output_amax for name in ("up", "gate", "down")] == [None, None, 9.0]
    assert layers["down"].row_scales["down"] is scales
    rows, exact = observations()["down"].sample, observations()["down"].sample @ matrix.T
    off = round_to(rows, 7.0 / 127, "int8") @ round_to(matrix, 0.25, "int8").T - exact
    expected = np.mean(((off**2).sum(1) / (exact**2).sum(1)) ** 2) ** 0.25
    assert found.errors["down"] == pytest.approx(expected, rel=1e-3)


def test_the_same_observations_give_the_same_scales() -> None:
    assert chosen("mse", outlier=7.0) == chosen("mse", outlier=7.0)


def test_an_input_of_zeros_has_a_scale_all_the_same() -> None:
    zeros = {group: stats_of(0 * it.sample) for group, it in observations().items()}
    for method in ("max", "mse"):
        found = choose_scales(LAYERS, zeros, matrices().__getitem__, "int8", method, 99.0)
        assert all(layer.input_amax > 0 for layer in found.quantization.layers.values())
        assert set(found.errors.values()) == {0.0}


def test_the_worst_come_first_and_equal_ones_by_name() -> None:
    errors = {"a": 0.1, "b": 0.3, "c": 0.3, "d": 0.2}
    assert worst(errors, errors, 3) == ["b", "c", "d"]


def test_layers_left_high_are_out_of_the_quantization() -> None:
    quantization = Quantization("fp8", {"a": LayerQuantization(1.0), "b": LayerQuantization(2.0)})
    assert quantization.without(frozenset({"a"})).layers == {"b": LayerQuantization(2.0)}
