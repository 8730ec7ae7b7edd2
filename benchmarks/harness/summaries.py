"""Figures made of samples: percentiles of latencies, and whether something grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64] | Sequence[float]


def latency_ms(seconds: Values) -> dict[str, float | int]:
    """Count, median, 90th and 99th percentile and maximum, in milliseconds; only the count of nothing.

    Percentiles are samples themselves (the nearest rank above), so that a P99 was really waited.
    """
    if not len(seconds):
        return {"count": 0}
    values = np.asarray(seconds, np.float64) * 1e3
    names = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
    figures = np.percentile(values, list(names.values()), method="inverted_cdf")
    return {
        "count": len(values),
        **{name: round(float(figure), 2) for name, figure in zip(names, figures, strict=True)},
    }


def flatness(
    times_s: Values, values: Values, *, warm_s: float, growth: float, spread: float, slack: float = 0.0
) -> dict[str, Any]:
    """Whether ``values`` stay where they are once ``warm_s`` have passed.

    Two bounds, shares of the median or ``slack``, whichever is more: ``growth`` for the rise of the least-squares line
    from ``warm_s`` to the end, ``spread`` for the distance from the 1st to the 99th percentile. Falling is no growth.
    """
    times, samples = np.asarray(times_s, np.float64), np.asarray(values, np.float64)
    kept = times >= times[0] + warm_s
    times, samples = times[kept], samples[kept]
    if len(samples) < 3:
        raise ValueError(f"{len(samples)} samples after {warm_s} s say nothing")
    slope = float(np.polynomial.polynomial.polyfit(times - times[0], samples, 1)[1])
    median, rise = float(np.median(samples)), slope * float(times[-1] - times[0])
    low, high = (float(value) for value in np.percentile(samples, (1, 99)))
    most_rise, most_spread = max(growth * median, slack), max(spread * median, slack)
    return {
        "flat": rise <= most_rise and high - low <= most_spread,
        "median": round(median, 2),
        "rise": round(rise, 2),
        "rise, most": round(most_rise, 2),
        "1st to 99th percentile": round(high - low, 2),
        "1st to 99th percentile, most": round(most_spread, 2),
        "slope an hour": round(slope * 3600, 2),
        "first": round(float(samples[0]), 2),
        "last": round(float(samples[-1]), 2),
        "max": round(float(samples.max()), 2),
        "samples": len(samples),
    }
