"""`bei bench` beside nginx: the same requests are compared, or nothing is."""

from __future__ import annotations

import msgspec
import pytest

from bei.cli.bench.result import LatencyFigures, PointResult
from benchmarks.proxied import _compared
from tests.bei.cli.bench.results import LOADS, result_of, setup_of

(POINT,) = result_of(setup_of(rates=None, loads=LOADS[1:])).points


def point(count: int, **percentiles: float) -> PointResult:
    latency = LatencyFigures(count, *[None] * 9)
    load = msgspec.structs.replace(POINT.loads[0], latency=msgspec.structs.replace(latency, **percentiles))
    return msgspec.structs.replace(POINT, loads=[load])


def test_differences_are_of_the_requests_behind_the_first() -> None:
    found = _compared(point(4, p50=204.0, p90=380.0), [9.0, 0.2, 0.1, 0.3, 0.4])
    assert found["requests"] == 4
    assert found["latency_ms"] == {
        "p50": {"bench": 204.0, "proxy": 200.0, "difference": 0.02},
        "p90": {"bench": 380.0, "proxy": 400.0, "difference": -0.05},
    }


def test_other_requests_are_not_compared() -> None:
    with pytest.raises(SystemExit, match="counted 4 requests, the proxy 3"):
        _compared(point(4, p50=204.0), [9.0, 0.2, 0.1, 0.3])
