"""Scales from activation statistics. Three methods choose the range of an input:

``max``: the largest absolute value. ``percentile``: the bound of so many percent of the sampled values. ``mse``: the
range, and the strength of smoothing (SmoothQuant moves outliers of the input into the matrix, arXiv:2211.10438,
equation 4), with the least error of the layer's products on the sample. In int8, whose steps are all alike, a layer
whose tokens differ much in size gets a range for each token instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt

from bei_build.quantization.activation_stats import ActivationStats
from bei_build.quantization.rounding import LEAST_SIZE, rounded_product
from bei_build.spec.linear_layers import LinearLayer
from bei_build.spec.quantization import Format, LayerQuantization, Method, Quantization, rounded

FloatArray = npt.NDArray[np.float32]

_STRENGTHS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # strengths of smoothing; 0 is no smoothing
_STRENGTHS_BY_TOKEN = (0.2, 0.3, 0.4, 0.5, 0.6)  # a token's range follows its outliers, so less has to be moved
_SHARES = (0.8, 0.6, 0.5)  # ranges, as shares of the largest value
# Errors are averaged by their fourth power: a few tokens that lose all they had, as those whose outliers are clipped,
# count for more than many that lose little (docs/decisions.md).
_POWER = 4
# Inputs are tried in unsigned numbers if their least value is at most this share of the largest, below zero.
_MOST_BELOW_ZERO = 0.25
_BETTER = 0.98  # required share of the error without smoothing, which costs a multiplication per value
# Required share of the error with one range for all tokens: a range per token takes passes over input and product.
_WORTH_A_RANGE_A_TOKEN = 0.8


@dataclass(frozen=True)
class KnownScales:
    """Known facts about linear layers, by name, before any choice.

    ``ranges``: input ranges that were measured elsewhere; ``row_scales``: scales of matrices that are rounded already
    (as in ``LayerQuantization``); ``products``: largest values of products that are to be rounded too.
    """

    ranges: Mapping[str, float] | None = None
    row_scales: Mapping[str, Mapping[str, FloatArray]] = field(default_factory=dict)
    products: Mapping[str, float] = field(default_factory=dict)


NOTHING = KnownScales()


@dataclass(frozen=True)
class ChosenScales:
    """A quantization, and for each layer, quantized or not, the error that it has or would have: the fourth root of the
    mean over sampled tokens of r^4, where r is |quantized product - exact product| / |exact product|."""

    quantization: Quantization
    errors: Mapping[str, float]


def choose_scales(
    layers: Sequence[LinearLayer],
    observations: Mapping[str, ActivationStats],
    read: Callable[[str], FloatArray],
    number_format: Format,
    method: Method,
    percentile: float,
    given: KnownScales = NOTHING,
    matrix_bits: int = 8,
) -> ChosenScales:
    """Scales for all ``layers``; ``read`` gives a weight by its name. Given ranges are used as they are."""
    chosen: dict[str, LayerQuantization] = {}
    errors: dict[str, float] = {}
    for group, members in groupby(sorted(layers, key=lambda layer: layer.group), key=lambda layer: layer.group):
        named = {layer: layer.matrix(read) for layer in members}
        seen = observations[group]
        trial = _Trial(seen, list(named.values()), number_format, matrix_bits)
        if given.ranges is not None:
            range_ = trial.with_range(max(given.ranges[layer.name] for layer in named))
        elif method == "mse":
            range_ = trial.best()
        else:
            range_ = trial.plain(percentile if method == "percentile" else 100.0)
        for layer, matrix in named.items():
            stored = given.row_scales.get(layer.name, {}) if range_.smoothing is None else {}
            chosen[layer.name] = replace(range_, row_scales=stored, output_amax=given.products.get(layer.name))
            errors[layer.name] = rounded(_Trial(seen, [matrix], number_format, matrix_bits).error(chosen[layer.name]))
    ordered = [layer.name for layer in layers]
    return ChosenScales(
        Quantization(number_format, {name: chosen[name] for name in ordered}), {name: errors[name] for name in ordered}
    )


class _Trial:
    """Trial of ranges for one input, on the products with all ``matrices`` that read it."""

    def __init__(
        self, seen: ActivationStats, matrices: Sequence[FloatArray], number_format: Format, matrix_bits: int
    ) -> None:
        self._seen = seen
        self._bits = matrix_bits
        self._matrix = np.concatenate(matrices)
        self._format = number_format
        self._exact = seen.sample @ self._matrix.T
        self._lengths = np.square(self._exact).sum(axis=1)

    def with_range(self, input_amax: float) -> LayerQuantization:
        """The range ``input_amax``, without smoothing."""
        return LayerQuantization(input_amax, matrix_bits=self._bits)

    def plain(self, percentile: float) -> LayerQuantization:
        """No smoothing, and the range by ``percentile`` of the sample; 100: the largest over all tokens."""
        largest = self._seen.channel_amax.max()
        if percentile < 100.0:
            largest = np.percentile(np.abs(self._seen.sample), percentile)
        return self.with_range(_range(largest))

    def best(self) -> LayerQuantization:
        """The best smoothing and range of all tokens, or the best smoothing with a range for each token."""
        found = self._best(_STRENGTHS, least=None)
        if self._format != "int8":
            return found
        least = None
        if self._seen.least > -_MOST_BELOW_ZERO * self._seen.channel_max.max():
            least = rounded(self._seen.least)
            found = min(found, self._best(_STRENGTHS, least), key=self.error)
        by_token = [
            replace(self._smoothed(strength, least), input_amax=1.0, per_token=True)
            for strength in (0.0, *_STRENGTHS_BY_TOKEN)
        ]
        best = min(by_token, key=self.error)
        return best if self.error(best) < _WORTH_A_RANGE_A_TOKEN * self.error(found) else found

    def _best(self, strengths: Sequence[float], least: float | None) -> LayerQuantization:
        """The best smoothing with the range of all tokens, then the best range."""
        plain = self._smoothed(0.0, least)
        found = min((self._smoothed(strength, least) for strength in strengths), key=self.error)
        if self.error(found) > _BETTER * self.error(plain):
            found = plain
        narrower = (replace(found, input_amax=_range(share * found.input_amax)) for share in _SHARES)
        return min((found, *narrower), key=self.error)

    def error(self, layer: LayerQuantization) -> float:
        """The error of the products with ``layer``'s rounding."""
        product = rounded_product(self._seen.sample, self._matrix, layer, self._format)
        product -= self._exact
        errors = np.square(product, out=product).sum(axis=1)
        known = self._lengths > 0
        if not known.any():
            return 0.0
        return float(np.mean((errors[known] / self._lengths[known]) ** (_POWER / 2)) ** (1 / _POWER))

    def _smoothed(self, strength: float, least: float | None) -> LayerQuantization:
        """Smoothing by ``strength``, 0: none, with the range of all tokens. ``least`` as in ``LayerQuantization``."""
        seen = self._seen.channel_amax if least is None else self._seen.channel_max - np.float32(least)
        kept = self._factors(seen, strength) if strength else None
        width = seen if kept is None else seen / np.array(kept, np.float32)
        return LayerQuantization(_range(width.max()), kept, matrix_bits=self._bits, least=least)

    def _factors(self, seen: FloatArray, strength: float) -> tuple[float, ...]:
        """Smoothing factors for an input whose channels reach ``seen``."""
        stored = np.abs(self._matrix).max(axis=0)
        factors = np.maximum(seen, LEAST_SIZE) ** strength / np.maximum(stored, LEAST_SIZE) ** (1 - strength)
        factors /= np.exp(np.log(factors).mean())  # geometric mean 1, for 16-bit types
        return tuple(map(rounded, np.maximum(factors, LEAST_SIZE).tolist()))


def _range(largest: float | np.floating[npt.NBitBase]) -> float:
    return rounded(max(float(largest), LEAST_SIZE))


def worst(errors: Mapping[str, float], among: Iterable[str], count: int) -> list[str]:
    """The ``count`` layers of ``among`` with the largest errors, worst first; equal ones by name."""
    return sorted(among, key=lambda name: (-errors[name], name))[:count]
