"""Synthetic traces with seeded arrivals, lengths and lanes. Equal parameters give equal traces."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bei.cli.simulate.devices import SimulatedDevices
from bei.cli.simulate.trace import Trace, TraceRequest
from bei.port import Lane

_Array = npt.NDArray[np.float64]

# Bursts: for this part of every period the rate is this multiple of the mean, and lower in the rest.
_BURST_PERIOD_S = 5.0
_BURST_PART = 0.1
_BURST_FACTOR = 5.0

# A day: the rate varies by this share of its mean, one cycle in the trace.
_DAY_SWING = 0.8

# Requests of a backfill: more than the devices can serve.
_BACKFILL_SPARE = 1.25


@dataclass(frozen=True)
class TokenLengths:
    """Tokens of a text: log-normal with this ``mean``, ``spread`` its sigma, clamped to ``least`` and ``most``."""

    mean: float
    spread: float
    least: int
    most: int

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        drawn = rng.lognormal(math.log(self.mean) - self.spread**2 / 2, self.spread, count)
        return [int(length) for length in np.clip(np.rint(drawn), self.least, self.most)]


# Like the benchmarks' (benchmarks/harness/texts.py): a query or a sentence, and a retrieval corpus with its long tail.
QUERIES = TokenLengths(29, 0.35, 5, 90)
PASSAGES = TokenLengths(78, 0.85, 4, 448)


@dataclass(frozen=True)
class TrafficMix:
    """The parameters of a trace.

    ``load``: engine time of all arrivals, relative to the devices' capacity. ``interactive_share``: the part of it for
    single queries; the rest is bulk requests of ``bulk_texts`` passages. In a backfill, queries take
    ``interactive_share`` of the capacity, bulk requests come in a closed loop of ``concurrency``, and ``load`` is
    ignored.
    """

    seconds: float = 20.0
    load: float = 0.8
    interactive_share: float = 0.1
    bulk_texts: int = 256
    concurrency: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and self.load > 0 and 0 <= self.interactive_share <= 1):
            raise ValueError(f"no mix of work: {self}")
        if self.bulk_texts < 1 or self.concurrency < 1 or self.seed < 0:
            raise ValueError(f"no mix of work: {self}")


def poisson(devices: SimulatedDevices, mix: TrafficMix) -> Trace:
    """Independent Poisson arrivals of both kinds."""
    return _open_loop(devices, mix, _steady, _steady)


def bursts(devices: SimulatedDevices, mix: TrafficMix) -> Trace:
    """Half of the bulk requests arrive within half a second of every five; queries as in ``poisson``."""
    return _open_loop(devices, mix, _steady, _bursty)


def diurnal(devices: SimulatedDevices, mix: TrafficMix) -> Trace:
    """The rate of queries varies between 1/5 and 9/5 of its mean, one cycle in the trace; bulk as in ``poisson``."""
    return _open_loop(devices, mix, lambda times: 1 - _DAY_SWING * np.cos(2 * np.pi * times / mix.seconds), _steady)


def backfill(devices: SimulatedDevices, mix: TrafficMix) -> Trace:
    """Bulk requests in a closed loop, beside queries as in ``poisson``."""
    rng_queries, rng_bulk = _generators(mix)
    rate = mix.interactive_share * devices.num_streams / _seconds_of(devices, QUERIES)
    queries = _singles(rng_queries, _arrivals(rng_queries, rate, mix.seconds, _steady))
    most = _BACKFILL_SPARE * mix.seconds * devices.num_streams / (mix.bulk_texts * _seconds_of(devices, PASSAGES))
    count = mix.concurrency + math.ceil(most)
    requests = _requests(rng_bulk, "bulk", mix.bulk_texts, [None] * count)
    return Trace(queries, requests, mix.concurrency, mix.seconds)


WORKLOADS: dict[str, Callable[[SimulatedDevices, TrafficMix], Trace]] = {
    "poisson": poisson,
    "bursts": bursts,
    "diurnal": diurnal,
    "backfill": backfill,
}


def _open_loop(
    devices: SimulatedDevices,
    mix: TrafficMix,
    shape_of_queries: Callable[[_Array], _Array],
    shape_of_bulk: Callable[[_Array], _Array],
) -> Trace:
    rng_queries, rng_bulk = _generators(mix)
    interactive_s = mix.load * mix.interactive_share * devices.num_streams  # engine seconds a second
    bulk_s = mix.load * (1 - mix.interactive_share) * devices.num_streams
    queries_a_second = interactive_s / _seconds_of(devices, QUERIES)
    requests_a_second = bulk_s / (mix.bulk_texts * _seconds_of(devices, PASSAGES))
    queries = _singles(rng_queries, _arrivals(rng_queries, queries_a_second, mix.seconds, shape_of_queries))
    times = _arrivals(rng_bulk, requests_a_second, mix.seconds, shape_of_bulk)
    bulk = _requests(rng_bulk, "bulk", mix.bulk_texts, times)
    if not queries and not bulk:
        raise ValueError(f"no request arrives within {mix.seconds} s")
    return Trace(sorted([*queries, *bulk], key=lambda request: request.at_s or 0.0), seconds=mix.seconds)


def _generators(mix: TrafficMix) -> list[np.random.Generator]:
    """One generator for each lane, so that changes of one lane leave the other unchanged."""
    return [np.random.default_rng([mix.seed, index]) for index in range(2)]


def _steady(times: _Array) -> _Array:
    return np.ones_like(times)


def _bursty(times: _Array) -> _Array:
    low = (1 - _BURST_PART * _BURST_FACTOR) / (1 - _BURST_PART)
    return np.where(times % _BURST_PERIOD_S < _BURST_PART * _BURST_PERIOD_S, _BURST_FACTOR, low)


def _arrivals(rng: np.random.Generator, rate: float, seconds: float, shape: Callable[[_Array], _Array]) -> list[float]:
    """Times of a Poisson process of ``rate`` times ``shape``, whose mean is 1.

    By thinning: Lewis and Shedler, Simulation of nonhomogeneous Poisson processes by thinning (1979).
    """
    highest = max(_BURST_FACTOR, 1 + _DAY_SWING) if shape is not _steady else 1.0
    times = np.sort(rng.uniform(0.0, seconds, rng.poisson(highest * rate * seconds)))
    kept = rng.uniform(0.0, highest, len(times)) < shape(times)
    return [float(time) for time in times[kept]]


def _singles(rng: np.random.Generator, times: list[float]) -> list[TraceRequest]:
    return _requests(rng, "interactive", 1, times, QUERIES)


def _requests(
    rng: np.random.Generator,
    lane: Lane,
    num_texts: int,
    times: list[float] | list[None],
    lengths: TokenLengths = PASSAGES,
) -> list[TraceRequest]:
    drawn = lengths.draw(rng, num_texts * len(times))
    return [
        TraceRequest(lane, tuple(drawn[index * num_texts : (index + 1) * num_texts]), time)
        for index, time in enumerate(times)
    ]


def _seconds_of(devices: SimulatedDevices, lengths: TokenLengths) -> float:
    """Mean engine time of a text in an efficient step."""
    drawn = lengths.draw(np.random.default_rng(0), 2000)
    costs = devices.table.model()
    most = costs.limits.max_seq_len
    return sum(costs.sequence_seconds(min(length, most)) for length in drawn) / len(drawn)
