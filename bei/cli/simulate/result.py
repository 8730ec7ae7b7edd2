"""Figures of a simulated run: latencies and rates by lane, fill of steps, use of devices."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bei.port import LANES, Lane


class SimulatedAnswer(NamedTuple):
    """A request from its arrival to its last text's answer."""

    lane: Lane
    arrived_s: float
    done_s: float
    num_texts: int
    num_tokens: int


class SimulatedStep(NamedTuple):
    """A step on a stream: times, and texts and tokens of each lane. ``longest``: tokens of its longest text."""

    stream: int
    started_s: float
    ended_s: float
    texts: Mapping[Lane, int]
    tokens: Mapping[Lane, int]
    longest: int

    @property
    def num_texts(self) -> int:
        return sum(self.texts.values())

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens.values())

    def within_s(self, from_s: float, to_s: float) -> float:
        """The seconds of its run between two times."""
        return max(0.0, min(self.ended_s, to_s) - max(self.started_s, from_s))


@dataclass(frozen=True)
class LaneFigures:
    """Latencies of requests that arrived within the window; None without any. Rates over all steps that ran in it; a
    step that began before or ended after it counts partially."""

    requests: int
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    texts_per_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class StepFigures:
    """Figures of steps that ended within the window. ``fill``: tokens / slots, where each text has slots for the
    step's longest. ``device_use``: share of the window in which a stream ran a step, mean over all streams."""

    steps: int
    mean_texts: float
    mean_tokens: float
    fill: float
    p99_ms: float | None
    device_use: float


@dataclass(frozen=True)
class SimulationResult:
    """Figures of a window, which ends before the last requests did. ``cut_texts``: texts of the whole trace that
    exceeded the engine's limit."""

    window_s: tuple[float, float]
    lanes: Mapping[Lane, LaneFigures]
    steps: StepFigures
    cut_texts: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of both lanes."""
        return sum(figures.tokens_per_s for figures in self.lanes.values())


def figures(
    answered: Seq[SimulatedAnswer],
    steps: Seq[SimulatedStep],
    num_streams: int,
    window_s: tuple[float, float],
    cut_texts: int,
) -> SimulationResult:
    """The result of a run. Raises ValueError for an empty window."""
    from_s, to_s = window_s
    if not from_s < to_s:
        raise ValueError(f"there is no time between {from_s} and {to_s} s")
    ended = [step for step in steps if from_s <= step.ended_s <= to_s]
    lanes = {lane: _lane(lane, answered, steps, from_s, to_s) for lane in LANES}
    return SimulationResult(window_s, lanes, _steps(ended, steps, num_streams, from_s, to_s), cut_texts)


def _lane(
    lane: Lane, answered: Seq[SimulatedAnswer], steps: Seq[SimulatedStep], from_s: float, to_s: float
) -> LaneFigures:
    latencies = [
        request.done_s - request.arrived_s
        for request in answered
        if request.lane == lane and from_s <= request.arrived_s <= to_s
    ]
    parts = [step.within_s(from_s, to_s) / (step.ended_s - step.started_s) / (to_s - from_s) for step in steps]
    return LaneFigures(
        requests=len(latencies),
        p50_ms=_percentile_ms(latencies, 50),
        p90_ms=_percentile_ms(latencies, 90),
        p99_ms=_percentile_ms(latencies, 99),
        max_ms=_percentile_ms(latencies, 100),
        texts_per_s=sum(part * step.texts[lane] for part, step in zip(parts, steps, strict=True)),
        tokens_per_s=sum(part * step.tokens[lane] for part, step in zip(parts, steps, strict=True)),
    )


def _steps(
    ended: Seq[SimulatedStep], steps: Seq[SimulatedStep], num_streams: int, from_s: float, to_s: float
) -> StepFigures:
    count = max(1, len(ended))
    tokens = sum(step.num_tokens for step in ended)
    slots = sum(step.num_texts * step.longest for step in ended)
    busy_s = sum(step.within_s(from_s, to_s) for step in steps)
    return StepFigures(
        steps=len(ended),
        mean_texts=sum(step.num_texts for step in ended) / count,
        mean_tokens=tokens / count,
        fill=tokens / max(1, slots),
        p99_ms=_percentile_ms([step.ended_s - step.started_s for step in ended], 99),
        device_use=busy_s / (num_streams * (to_s - from_s)),
    )


def _percentile_ms(seconds: Seq[float], percent: int) -> float | None:
    """The percentile as a sample (nearest rank, rounded up); None without samples."""
    if not seconds:
        return None
    return round(1e3 * float(np.percentile(seconds, percent, method="inverted_cdf")), 3)
