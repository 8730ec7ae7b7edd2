"""A model of the time of an engine step, fitted to measured steps and corrected by the steps that run.

    seconds = speed * (per_step + tokens(T) + tiles(T') + B * (per_sequence + width(S)))

T is the number of tokens of the step, B its sequences, S its longest sequence, each rounded up to the shape bucket that
engines run (bei.engine.packing). T' is T rounded up to whole tiles: matrix kernels share blocks of rows among threads,
so the last tile of a step costs the same however full it is (docs/decisions.md, "Steps are filled up to whole tiles").
``tokens`` and ``tiles`` (matrix products) and ``width`` (attention, per row of the padded view) are piecewise linear
and never decrease; every coefficient is zero or more. So a prediction never falls when a step gets more tokens, more
sequences or a longer one. ``speed`` is the only number that changes while serving.

Pure: no clock, no engine, no files. ``bei.scheduler.cost_measurement`` measures.
"""

from __future__ import annotations

import math
import threading
from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bei.artifact.validation import limits_fault
from bei.core import Limits

_Array = npt.NDArray[np.float64]

# Steps whose throughput is this close to the best one count as efficient. More would gain a single text little, and
# cost a server full of them their throughput.
_EFFICIENT = 0.99

# Bulk work alone runs in larger steps than the smallest efficient ones, where larger ones are as efficient: beside
# other work a step costs more than when it was measured alone (docs/decisions.md, "Steps are filled up to whole
# tiles"). But so much larger at most, since interactive work that comes unexpectedly waits for the end of a step.
_LARGEST_EFFICIENT = 2

# How many of the last steps decide about the speed: their median does, so fewer than half may be outliers.
_WINDOW = 31
# A measured model starts with so many steps that were as predicted, so that a cold start does not undo a measurement.
_PRIOR_STEPS = 15
# A measured speed is corrected by at most this factor: beyond it something is wrong with the steps, not the model.
_MAX_CORRECTION = 16.0

# Widths are tabulated in these steps; every bucket of bei.engine.packing is a multiple of it.
_GRAIN_LOG2 = 3
_GRAIN = 1 << _GRAIN_LOG2
# Fused attention of OpenVINO wants multiples of 16 and is slower, not faster, on the 8 between (docs/decisions.md).
_WIDTH_STEP = 16

_TOKEN_KNOTS = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_WIDTH_KNOTS = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# Sizes of a tile that a fit tries: powers of two, and three times those for three, six or twelve threads. _TILED_FROM:
# the numbers of tokens that it tries as the start of tiles, since kernels for few rows have smaller ones.
_TILES = (32, 48, 64, 96, 128, 192, 256, 384, 512)
_TILED_FROM = (0, 64, 128, 256)
# Tiles show in pairs of steps that differ only in their tokens, by at most this share: the larger step takes longer by
# a whole tile, or hardly at all. A fit keeps tiles only if its error on such pairs is below _TILED_ERROR of the error
# of a fit without tiles: else noise would make stairs.
_FEW_TOKENS = 1 / 8
_TILED_ERROR = 0.8
_FIT_ROUNDS = 5
# Neighbouring slopes of a curve should be alike unless the measurements say otherwise: a difference as large as the
# usual time of a token weighs as much as an error of this size in one step. Noise must not make knees: they decide how
# large steps are.
_SMOOTHNESS = 0.1

_MIN_BEHIND_KNOT = 3  # values

_CANDIDATES = 65  # batch sizes tried for the efficient step of a length


class Sample(NamedTuple):
    """One measured step."""

    num_tokens: int
    batch_size: int
    longest: int
    seconds: float


@dataclass(frozen=True)
class Curve:
    """A piecewise linear function that starts at (0, 0): ``slopes[i]`` holds from ``knots[i]`` on. Slopes are >= 0."""

    knots: tuple[int, ...]
    slopes: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(low < high for low, high in zip(self.knots, self.knots[1:], strict=False))
        if not self.knots or self.knots[0] != 0 or not ascending or len(self.knots) != len(self.slopes):
            raise ValueError(f"knots must ascend from 0, with a slope each: {self.knots}, {self.slopes}")
        if not all(0 <= slope < math.inf for slope in self.slopes):
            raise ValueError(f"slopes must be finite and not negative: {self.slopes}")

    def at(self, values: npt.ArrayLike) -> _Array:
        """The function's values, same shape as ``values``."""
        return np.asarray(_ramps(values, self.knots) @ np.array(self.slopes), np.float64)


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of the module's formula: seconds, and curves of seconds. ``tile``: the size of a tile, in
    tokens; ``_GRAIN`` if the formula has no tiles."""

    per_step: float
    per_sequence: float
    tokens: Curve
    width: Curve
    tiles: Curve = Curve((0,), (0.0,))
    tile: int = _GRAIN

    def __post_init__(self) -> None:
        if not (0 < self.per_step < math.inf and 0 <= self.per_sequence < math.inf):
            raise ValueError(f"a step takes time: {self}")
        if self.tile < 1 or self.tile % _GRAIN:
            raise ValueError(f"a tile is a multiple of {_GRAIN} tokens: {self.tile}")

    def of_tokens(self, tokens: _Array) -> _Array:
        """The seconds of steps without the part of their sequences. ``tokens``: of each, rounded up to its bucket."""
        whole = np.ceil(tokens / self.tile) * self.tile
        return np.asarray(self.per_step + self.tokens.at(tokens) + self.tiles.at(whole), np.float64)


# The shape of a step where nothing was measured, in the time of one token: about that of small encoders on a CPU
# (docs/decisions.md, "What a step costs"). Only ratios matter, the unknown speed is learned.
_ASSUMED = Coefficients(
    per_step=64.0, per_sequence=2.0, tokens=Curve((0,), (1.0,)), width=Curve((0, 128, 512), (0.25, 0.5, 1.0))
)
# Seconds per token that are assumed before the first step has run: those of a small encoder on a few cores.
_ASSUMED_SPEED = 50e-6


class CostModel:
    """Predicts the seconds of one engine step. Every method may be called from any thread."""

    def __init__(
        self, limits: Limits, coefficients: Coefficients, *, speed: float = 1.0, is_measured: bool = True
    ) -> None:
        self.limits = limits
        self.coefficients = coefficients
        self.is_measured = is_measured
        self._initial_speed = self._speed = speed
        self._tokens, self._rows, self._widths = _tables(limits, coefficients)
        self._efficient, self._largest, self._shares = _efficient_steps(limits, coefficients)
        self._lock = threading.Lock()
        self._ratios: deque[float] = deque([1.0] * _PRIOR_STEPS if is_measured else [], _WINDOW)
        self._sorted_ratios = sorted(self._ratios)

    @classmethod
    def assumed(cls, limits: Limits) -> CostModel:
        """A plausible shape of unknown speed, which ``observe`` learns from the first steps."""
        return cls(limits, _ASSUMED, speed=_ASSUMED_SPEED, is_measured=False)

    def continued(self, limits: Limits) -> CostModel:
        """A model with these coefficients and the observed speed, for the next engine of the same model."""
        return CostModel(limits, self.coefficients, speed=self._speed, is_measured=self.is_measured)

    @property
    def tile(self) -> int:
        """The size of a tile in tokens, a multiple of 8: the last tile of a step costs the same however full it is."""
        return self.coefficients.tile

    @property
    def has_tiles(self) -> bool:
        """True if the fit found that whole tiles matter."""
        return any(self.coefficients.tiles.slopes)

    @property
    def speed(self) -> float:
        """Observed time by fitted time: 1 where the engine runs as it did when it was measured."""
        return self._speed

    def seconds(self, num_tokens: int, batch_size: int, longest: int) -> float:
        """Seconds of one step on one stream while all streams are busy. Plain floats and three look-ups: 0.3 us."""
        try:
            return self._speed * (
                self._tokens[(num_tokens + _GRAIN - 1) >> _GRAIN_LOG2]
                + self._rows[batch_size] * self._widths[(longest + _GRAIN - 1) >> _GRAIN_LOG2]
            )
        except IndexError:
            return self._speed * _seconds_beyond(self.coefficients, num_tokens, batch_size, longest)

    def sequence_seconds(self, length: int) -> float:
        """The share of one sequence of ``length`` tokens in an efficient step of alike ones, on one stream."""
        return self._speed * self._shares[min(len(self._shares) - 1, (length + _GRAIN - 1) >> _GRAIN_LOG2)]

    def efficient_tokens(self, length: int) -> int:
        """The smallest step whose tokens per second are within 1 % of the best one's, in tokens.

        The step holds sequences of about ``length`` tokens, and is filled up to whole tiles where the limits allow it.
        """
        return self._efficient[min(len(self._efficient) - 1, (length + _GRAIN - 1) >> _GRAIN_LOG2)]

    def largest_efficient_tokens(self, length: int) -> int:
        """The largest step within 1 % of the best rate, in tokens, for work that nobody waits for at once.

        At least ``efficient_tokens(length)``, and at most twice as many.
        """
        return self._largest[min(len(self._largest) - 1, (length + _GRAIN - 1) >> _GRAIN_LOG2)]

    def observe(self, num_tokens: int, batch_size: int, longest: int, seconds: float) -> None:
        """A step took so long. The speed becomes the median over the last steps; what is no duration is passed over."""
        if not 0 < seconds < math.inf:
            return
        with self._lock:
            fitted = self.seconds(num_tokens, batch_size, longest) / self._speed
            ratio = seconds / fitted / self._initial_speed
            if len(self._ratios) == _WINDOW:
                oldest = self._ratios.popleft()
                del self._sorted_ratios[bisect_left(self._sorted_ratios, oldest)]
            self._ratios.append(ratio)
            insort(self._sorted_ratios, ratio)
            middle = self._sorted_ratios[(len(self._sorted_ratios) - 1) // 2]
            if self.is_measured:
                middle = min(max(middle, 1 / _MAX_CORRECTION), _MAX_CORRECTION)
            self._speed = self._initial_speed * middle

    def follow(self, speed: float) -> None:
        """Take over the speed that this model has in another process, which observes the steps."""
        with self._lock:
            self._speed = speed

    def to_json(self) -> dict[str, Any]:
        """Plain data: limits and coefficients. What was observed since is not kept."""
        return {
            "limits": asdict(self.limits),
            "coefficients": asdict(self.coefficients),
            "speed": self._initial_speed,
            "is_measured": self.is_measured,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CostModel:
        """The inverse of ``to_json``.

        Raises AttributeError, KeyError, OverflowError, TypeError or ValueError for anything else.
        """
        without_tiles = {"tiles": {"knots": [0], "slopes": [0]}, "tile": _GRAIN}  # tables may know of none
        coefficients = without_tiles | data["coefficients"]
        coefficients["tile"] = int(coefficients["tile"])
        for name in ("tokens", "tiles", "width"):
            curve = coefficients[name]
            coefficients[name] = Curve(tuple(map(int, curve["knots"])), tuple(map(float, curve["slopes"])))
        speed = float(data["speed"])
        if not 0 < speed < math.inf:
            raise ValueError(f"speed {speed}")
        limits = Limits(**data["limits"])
        if fault := limits_fault(limits.max_num_tokens, limits.max_batch_size, limits.max_seq_len):
            raise ValueError(fault)  # before tables of these sizes are made
        return cls(limits, Coefficients(**coefficients), speed=speed, is_measured=bool(data["is_measured"]))


def fit(samples: Seq[Sample], limits: Limits) -> CostModel:
    """The model with the smallest relative errors on ``samples`` (at least one), outliers counted less.

    Least squares under the bound that no coefficient is negative, repeated with Huber's weights. Curves get knots
    within the measured range only, so that they go on beyond it as they were at its end. There are tiles only where
    pairs of samples that differ by a few tokens tell of them.
    """
    tokens, rows, widths = (np.array([sample[i] for sample in samples], np.float64) for i in range(3))
    seconds = np.array([sample.seconds for sample in samples], np.float64)
    if not len(samples) or not (seconds > 0).all() or not np.isfinite(seconds).all():
        raise ValueError("a fit needs steps, and each must have taken time")
    steps = _Steps(_bucketed(tokens), _bucketed(rows, 1), _rounded_widths(widths), seconds)
    plain, plain_error = steps.fitted()
    if not plain_error:  # nothing tells of tiles
        return CostModel(limits, plain)
    tiles = [tile for tile in _TILES if 4 * tile <= limits.max_num_tokens]
    tried = [steps.fitted(tile, start) for tile in tiles for start in _TILED_FROM]
    tiled, tiled_error = min(tried, key=lambda pair: pair[1], default=(plain, plain_error))
    return CostModel(limits, tiled if tiled_error < _TILED_ERROR * plain_error else plain)


class _Steps(NamedTuple):
    """Measured steps, [n] each: bucketed tokens, rows and widths, and seconds."""

    tokens: _Array
    rows: _Array
    widths: _Array
    seconds: _Array

    def fitted(self, tile: int = 0, start: int = 0) -> tuple[Coefficients, float]:
        """The best coefficients with tiles of this size from ``start`` tokens on, or without any, and how wrong they
        are about what few tokens more cost: the mean relative error, 0 where nothing tells."""
        token_knots, width_knots = _knots_within(_TOKEN_KNOTS, self.tokens), _knots_within(_WIDTH_KNOTS, self.widths)
        curves = [_ramps(self.tokens, token_knots), self.rows[:, None] * _ramps(self.widths, width_knots)]
        if tile:
            curves.append(np.maximum(0.0, np.ceil(self.tokens / tile) * tile - start)[:, None])
        ends = np.cumsum([2, *(curve.shape[1] for curve in curves)])
        places = [slice(low, high) for low, high in pairwise(ends)]
        features = np.column_stack([np.ones(len(self.seconds)), self.rows, *curves]) / self.seconds[:, None]
        # Slopes are compared in units of the usual time of a token.
        usual = float(np.median(self.tokens / self.seconds))
        found = _robust_fit(features, _SMOOTHNESS * usual * _differences(int(ends[-1]), places))
        slopes = [tuple(map(float, found[place])) for place in places]
        found[0] = max(found[0], 1e-3 * self.seconds.min())
        coefficients = Coefficients(
            per_step=float(found[0]),
            per_sequence=float(found[1]),
            tokens=Curve(token_knots, slopes[0]),
            width=Curve(width_knots, slopes[1]),
        )
        if tile:
            tiles = Curve((0, start), (0.0, *slopes[2])) if start else Curve((0,), slopes[2])
            coefficients = replace(coefficients, tiles=tiles, tile=tile)
        few, more = self._pairs()
        predicted = features @ found  # by measured
        return coefficients, float(np.abs(np.log(predicted[more] / predicted[few])).mean()) if len(few) else 0.0

    def _pairs(self) -> tuple[_Array, _Array]:
        """Steps that differ by few tokens and nothing else: the number of the one with fewer and the other's."""
        order = np.lexsort((self.tokens, self.widths, self.rows))
        few, more = order[:-1], order[1:]
        gap = self.tokens[more] - self.tokens[few]
        is_pair = (self.rows[few] == self.rows[more]) & (self.widths[few] == self.widths[more])
        is_pair &= (gap > 0) & (gap <= _FEW_TOKENS * self.tokens[few])
        return few[is_pair], more[is_pair]


def _differences(count: int, curves: Seq[slice]) -> _Array:
    """A row for each two neighbouring slopes of a curve: what it gives is their difference, [rows, count]."""
    identity = np.eye(count)
    return np.concatenate([np.diff(identity[curve], axis=0) for curve in curves])


def _robust_fit(features: _Array, penalties: _Array) -> _Array:
    """Coefficients that bring ``features @ coefficients`` close to 1 in every row; rows far off count less (Huber).

    ``penalties @ coefficients`` is kept close to 0.
    """
    weights = np.ones(len(features))
    nothing = np.zeros(len(penalties))
    for _ in range(_FIT_ROUNDS):
        found = nonnegative_least_squares(
            np.concatenate([features * weights[:, None], penalties]), np.concatenate([weights, nothing])
        )
        errors = np.abs(features @ found - 1)
        bound = max(1.5 * 1.4826 * float(np.median(errors)), 1e-9)  # 1.4826 * median: the deviation of a normal error
        weights = np.sqrt(np.minimum(1.0, bound / np.maximum(errors, bound * 1e-9)))
    return found


def nonnegative_least_squares(matrix: _Array, target: _Array) -> _Array:
    """The x >= 0 that minimizes ``|matrix @ x - target|``.

    The active set method of Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23.
    """
    norms = np.linalg.norm(matrix, axis=0)
    norms[norms == 0] = 1.0
    matrix = matrix / norms
    count = matrix.shape[1]
    x, free = np.zeros(count), np.zeros(count, np.bool_)
    tolerance = 1e-10 * max(1.0, float(np.abs(matrix.T @ target).max()))
    for _ in range(3 * count):
        gradient = np.where(free, -np.inf, matrix.T @ (target - matrix @ x))
        if gradient.max() <= tolerance:
            break
        free[int(gradient.argmax())] = True
        while free.any():
            solution = np.zeros(count)
            solution[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            blocked = free & (solution <= 0)
            if not blocked.any():
                x = solution
                break
            step = np.min(x[blocked] / np.maximum(x[blocked] - solution[blocked], 1e-300))
            x = x + step * (solution - x)
            free &= ~(blocked & (x <= tolerance))
            x[~free] = 0.0
    return np.asarray(x / norms, np.float64)


def _ramps(values: npt.ArrayLike, knots: tuple[int, ...]) -> _Array:
    """The length of each value within each of the segments that begin at ``knots``, [..., knots]."""
    ends = np.array([*knots[1:], np.inf])
    return np.asarray(np.clip(np.asarray(values, np.float64)[..., None], knots, ends) - knots, np.float64)


def _knots_within(knots: tuple[int, ...], values: _Array) -> tuple[int, ...]:
    """0, and those of ``knots`` that have values before them in their segment, and enough well behind them."""
    found = [0]
    for knot in knots[1:]:
        has_below = bool(((values > found[-1]) & (values <= knot)).any())
        # A slope from values just behind its knot would be noise, and would hold for all that is larger.
        if has_below and int((values >= 1.5 * knot).sum()) >= _MIN_BEHIND_KNOT:
            found.append(knot)
    return tuple(found)


def _bucketed(values: _Array, min_step: int = _GRAIN) -> _Array:
    """``bei.engine.packing.bucket`` of whole numbers, [n] to [n]."""
    exponents = np.floor(np.log2(np.maximum(values, 1)))
    steps = np.maximum(min_step, 2.0 ** (exponents - 4))
    return np.asarray(np.ceil(values / steps) * steps, np.float64)


def _rounded_widths(values: _Array) -> _Array:
    return np.asarray(np.ceil(_bucketed(values) / _WIDTH_STEP) * _WIDTH_STEP, np.float64)


def _fitted(coefficients: Coefficients, tokens: _Array, rows: _Array, widths: _Array) -> _Array:
    """Seconds at speed 1, of arrays that broadcast."""
    per_row = coefficients.per_sequence + coefficients.width.at(_rounded_widths(widths))
    return np.asarray(coefficients.of_tokens(_bucketed(tokens)) + _bucketed(rows, 1) * per_row, np.float64)


def _tables(limits: Limits, coefficients: Coefficients) -> tuple[array[float], array[float], array[float]]:
    """Time by tokens, bucketed rows by rows, and time of a row by width; tokens and widths in grains."""
    c = coefficients
    tokens = np.arange(0, limits.max_num_tokens + _GRAIN, _GRAIN).astype(np.float64)
    rows = np.arange(limits.max_batch_size + 1, dtype=np.float64)
    widths = np.arange(0, limits.max_seq_len + _GRAIN, _GRAIN).astype(np.float64)
    return (
        array("d", c.of_tokens(_bucketed(tokens))),
        array("d", _bucketed(rows, 1)),
        array("d", c.per_sequence + c.width.at(_rounded_widths(widths))),
    )


def _seconds_beyond(coefficients: Coefficients, num_tokens: int, batch_size: int, longest: int) -> float:
    """The slow twin of ``CostModel.seconds``, for what the limits do not allow."""
    tokens, rows, widths = (np.array([value], np.float64) for value in (num_tokens, batch_size, longest))
    return float(_fitted(coefficients, tokens, rows, widths)[0])


def _efficient_steps(limits: Limits, coefficients: Coefficients) -> tuple[list[int], list[int], list[float]]:
    """By length in grains: tokens of the smallest efficient step of such sequences, those of the largest, and a
    sequence's share of the smallest one's time."""
    lengths = np.minimum(np.arange(_GRAIN, limits.max_seq_len + _GRAIN, _GRAIN), limits.max_seq_len)
    most = np.clip(limits.max_num_tokens // lengths, 1, limits.max_batch_size)
    # Batch sizes to choose from: geometric, from 1 to the most, [lengths, candidates].
    counts = np.rint(most[:, None] ** np.linspace(0.0, 1.0, _CANDIDATES))

    # Tokens of such steps, filled up to whole tiles with other sequences where the limits allow it.
    tokens = counts * lengths[:, None]
    whole = np.minimum(np.ceil(tokens / coefficients.tile) * coefficients.tile, limits.max_num_tokens)
    tokens = np.where(whole <= limits.max_batch_size * lengths[:, None], whole, tokens)

    widths = np.broadcast_to(lengths[:, None], tokens.shape).astype(np.float64)
    rates = tokens / widths / _fitted(coefficients, tokens, tokens / widths, widths)  # sequences a second
    is_near_best = rates >= _EFFICIENT * rates.max(axis=1, keepdims=True)
    best = np.argmax(is_near_best, axis=1)[:, None]
    efficient, rate = (np.take_along_axis(values, best, axis=1) for values in (tokens, rates))
    largest = np.where(is_near_best & (tokens <= _LARGEST_EFFICIENT * efficient), tokens, 0.0).max(axis=1)
    # A step of the most sequences is one of the most tokens: those of a length are rarely all that wait.
    largest = np.where(largest >= most * lengths, limits.max_num_tokens, largest)
    efficient = efficient[:, 0]
    largest = np.clip(largest, efficient, _LARGEST_EFFICIENT * efficient)
    shares = np.maximum.accumulate(1 / rate[:, 0])
    by_length = efficient.astype(int).tolist(), largest.astype(int).tolist(), shares.tolist()
    of_efficient, of_largest, of_shares = ([values[0], *values] for values in by_length)
    return of_efficient, of_largest, of_shares
