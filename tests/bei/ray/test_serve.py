"""The deployment of Ray Serve, without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.errors import ConfigError
from bei.ray.serve import WaitPolicy, deployment


def _replicas(
    waits: dict[str, float] | None,
    least: int = 1,
    most: int = 100,
    wait_s: float = 1.0,
    busy: dict[str, float] | None = None,
    now: int = 1,
) -> int:
    metrics = None if waits is None else {"wait_s": waits, "busy": busy or {}}
    context = SimpleNamespace(
        aggregated_metrics=metrics,
        capacity_adjusted_min_replicas=least,
        capacity_adjusted_max_replicas=most,
        target_num_replicas=now,
    )
    return WaitPolicy(wait_s)(context)[0]


@given(waits=st.dictionaries(st.text(max_size=3), st.floats(0, 50), max_size=9), wait_s=st.floats(0.01, 60))
def test_so_many_replicas_that_each_waits_no_longer_than_asked(waits: dict[str, float], wait_s: float) -> None:
    wanted = _replicas(waits, most=10**6, wait_s=wait_s)
    total_s = sum(waits.values())
    assert total_s / wanted <= wait_s * (1 + 1e-9)
    assert wanted == 1 or total_s / (wanted - 1) > wait_s * (1 - 1e-9)


@pytest.mark.parametrize(("waits", "replicas"), [(None, 2), ({}, 2), ({"a": 0.0}, 2), ({"a": 90.0}, 5)])
def test_the_number_of_replicas_stays_within_its_bounds(waits: dict[str, float] | None, replicas: int) -> None:
    assert _replicas(waits, least=2, most=5) == replicas


@pytest.mark.parametrize(
    ("busy", "now", "replicas"), [([0.9, 0.8, 0.8], 3, 3), ([0.6, 0.4, 0.5], 3, 2), ([1.0], 1, 1), ([1.0, 1.0], 1, 1)]
)
def test_replicas_that_are_busy_are_kept_though_nothing_waits(busy: list[float], now: int, replicas: int) -> None:
    shares = {str(number): share for number, share in enumerate(busy)}
    assert _replicas(dict.fromkeys(shares, 0.0), busy=shares, now=now) == replicas


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"port": 9000}, "port"),
        ({"grpc_port": 9000}, "grpc_port"),
        ({"http_workers": 2}, "http_workers"),
        ({"batch_dir": "/var/lib/bei"}, "batch_dir"),
        ({"min_replicas": 2}, "min_replicas"),
        ({"wait_s": 0.0}, "wait_s"),
        ({"bulk_shares": 0.5}, "bulk_share"),
    ],
)
def test_what_is_rays_to_decide_or_cannot_be_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        deployment("model", **settings)


@pytest.mark.slow  # Ray takes seconds to load
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pydantic's, of Ray
def test_a_replica_that_ends_has_the_time_for_what_it_has_accepted() -> None:
    pytest.importorskip("ray", reason="needs the extra scale")
    made = deployment("model", bulk_max_wait=100.0, deployment_options={"max_surge_percent": 0})._bound_deployment
    assert made._deployment_config.graceful_shutdown_timeout_s == 190
    assert made._deployment_config.max_surge_percent == 0
    assert made._deployment_config.max_ongoing_requests == 2_000
