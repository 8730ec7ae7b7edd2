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
_SHARES = (0.8, 0.6, 0.5)  # ranges, as shares of the largest value
# Errors are averaged by their fourth power: a few tokens that lose all they had, as those whose outliers are clipped,
# count for more than many that lose little (docs/decisions.md).
_POWER = 4
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
        """The best smoothing with the range of all tokens, then the best range."""
        plain = self.plain(100.0)
        found = min(map(self._smoothed, _STRENGTHS), key=self.error)
        if self.error(found) > _BETTER * self.error(plain):
            found = plain
        narrower = (replace(found, input_amax=_range(share * found.input_amax)) for share in _SHARES)
        found = min((found, *narrower), key=self.error)
        if self._format != "int8":
            return found
        by_token = LayerQuantization(1.0, per_token=True, matrix_bits=self._bits)
        return by_token if self.error(by_token) < _WORTH_A_RANGE_A_TOKEN * self.error(found) else found

    def error(self, layer: LayerQuantization) -> float:
        """The error of the products with ``layer``'s rounding."""
        product = rounded_product(self._seen.sample, self._matrix, layer, self._format)
        product -= self._exact
        errors = np.square(product, out=product).sum(axis=1)
        known = self._lengths > 0
        if not known.any():
            return 0.0
        return float(np.mean((errors[known] / self._lengths[known]) ** (_POWER / 2)) ** (1 / _POWER))

    def _smoothed(self, strength: float) -> LayerQuantization:
        seen, stored = self._seen.channel_amax, np.abs(self._matrix).max(axis=0)
        factors = np.maximum(seen, LEAST_SIZE) ** strength / np.maximum(stored, LEAST_SIZE) ** (1 - strength)
        factors /= np.exp(np.log(factors).mean())  # geometric mean 1, for 16-bit types
        kept = tuple(map(rounded, np.maximum(factors, LEAST_SIZE).tolist()))
        return LayerQuantization(_range((seen / np.array(kept, np.float32)).max()), kept, matrix_bits=self._bits)


def _range(largest: float | np.floating[npt.NBitBase]) -> float:
    return rounded(max(float(largest), LEAST_SIZE))


def worst(errors: Mapping[str, float], among: Iterable[str], count: int) -> list[str]:
    """The ``count`` layers of ``among`` with the largest errors, worst first; equal ones by name."""
    return sorted(among, key=lambda name: (-errors[name], name))[:count]
