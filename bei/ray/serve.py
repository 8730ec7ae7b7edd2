"""The whole application of ``bei serve`` as a deployment of Ray Serve."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bei.artifact.manifest import Artifact
from bei.config.settings import ServeConfig
from bei.config.sources import load
from bei.errors import ConfigError
from bei.port import PortStats
from bei.server.http.request_id import with_outer_request_id
from bei.server.make_app import WholeApp, make_app
from bei.service.resolve import artifact_for, default_artifact
from bei.utils import libraries

_WAIT, _BUSY = "wait_s", "busy"
_MOST_ONGOING = 2_000
# A replica that ends answers what it has accepted: after the longest wait, though a step hangs, in so many seconds.
_LONGEST_REQUEST_S = 60.0
# Of the replicas, which start beside those that they replace: a stopped one serves nobody while its successor loads.
_SURGE_PERCENT = 20
# Settings of sockets and processes, which are Ray's here.
_NOT_HERE = frozenset(
    (
        *("host", "port", "grpc_port"),
        *("tcp", "uds", "uds_mode", "tls_cert", "tls_key", "tls_client_ca", "http_workers", "devices"),
        *("max_connections", "keep_alive_timeout", "header_timeout"),
    )
)


def deployment(
    *models: str | os.PathLike[str],
    name: str = "bei",
    min_replicas: int = 1,
    max_replicas: int = 1,
    wait_s: float = 1.0,
    ray_actor_options: Mapping[str, Any] | None = None,
    deployment_options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """An application for ``serve.run``: every route and dialect of ``bei serve`` with ``models``, in replicas that have
    an engine each.

        from ray import serve
        from bei.ray import deployment

        serve.run(deployment("all-MiniLM-L6-v2", max_replicas=4))

    Between ``min_replicas`` and ``max_replicas``, so many are kept that waiting work is predicted to be done in
    ``wait_s`` seconds: requests that are under way say little, as bei batches them. None is taken away while all are
    busy. Replicas of another artifact start before the former ones end. ``settings``: of ``bei serve``, by
    their names; sockets, TLS and processes are Ray's. ``deployment_options``: of ``serve.deployment``, over those made
    here. Queueing, 429 and lanes are bei's, so Ray passes requests on. A replica counts when its engines are warm and
    have answered as at build time.

    Raises ConfigError, MissingDependencyError.
    """
    for setting in settings:
        if setting in _NOT_HERE:
            raise ConfigError(f"{setting} is Ray Serve's to decide: leave it out.")
    if "batch_dir" in settings:
        raise ConfigError("batch_dir is one server's, and replicas come and go on any node: give batches to bei serve.")
    config = load(ServeConfig, {"tune": "off", **settings})
    if not 0 < min_replicas <= max_replicas or not 0 < wait_s < math.inf:
        raise ConfigError("min_replicas must be from 1 to max_replicas, and wait_s above 0.")
    serve = libraries.load("ray.serve", "ray", "scale", "bei.ray.deployment")
    options: dict[str, Any] = {
        "name": name,
        "max_ongoing_requests": _MOST_ONGOING,
        "graceful_shutdown_timeout_s": max(config.bulk_max_wait, config.interactive_max_wait)
        + config.hang_timeout
        + _LONGEST_REQUEST_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 5.0,
        "max_surge_percent": _SURGE_PERCENT,
        "ray_actor_options": dict(ray_actor_options or {}),
        "autoscaling_config": _autoscaling(min_replicas, max_replicas, wait_s),
        **(deployment_options or {}),
    }
    made = serve.deployment(**options)(serve.ingress()(Replica))
    return made.bind(tuple(os.fspath(model) for model in models), config)


class Replica:
    """A replica of the deployment; ``models`` and ``config`` as ``bei serve`` has them."""

    async def __init__(self, models: tuple[str, ...], config: ServeConfig) -> None:  # type: ignore[misc]  # as Serve has it
        self._held = ExitStack()
        found: list[Path | Artifact] = [artifact_for(model, config, self._held) for model in models]
        self._whole: WholeApp = await make_app(found or [default_artifact(config, self._held)], config)

    def __serve_build_asgi_app__(self) -> Any:
        """As Ray Serve asks for it."""
        return with_outer_request_id(self._whole.app, _request_id)

    async def check_health(self) -> None:
        """As Ray Serve asks for it: raises where a model does not answer as it did at build time."""
        for service in self._whole.models:
            await service.check_ready()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """As Ray Serve asks for it: the predicted seconds of what waits, and 1 where an engine has work."""
        stats = [service.port_stats for service in self._whole.models]
        return {_WAIT: sum(map(_waiting_s, stats)), _BUSY: float(any(one.is_busy for one in stats))}

    async def __del__(self) -> None:
        if hasattr(self, "_whole"):
            await self._whole.aclose()
            self._held.close()


def _waiting_s(stats: PortStats) -> float:
    """Predicted seconds until the engine has done what waits now."""
    queued_s = sum(lane.cost_s for lane in stats.lanes.values())
    return (queued_s + stats.running_s) * stats.slowdown / max(1, stats.num_streams)


class WaitPolicy:
    """So many replicas that what waits is done in ``wait_s`` seconds, if it is shared among them.

    Fewer only where the rest has the time: while enough of them are there nothing waits, and if that took them away
    they would be missing at once.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s

    def __call__(self, context: Any) -> tuple[int, dict[str, float]]:
        """As Ray Serve asks a policy: the number of replicas, and a state to keep."""
        metrics = context.aggregated_metrics or {}
        total_s, busy = (sum((metrics.get(name) or {}).values()) for name in (_WAIT, _BUSY))
        wanted = max(1, math.ceil(total_s / self._wait_s), min(math.ceil(busy), context.target_num_replicas))
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(max(wanted, least), most), {_WAIT: total_s}


def _autoscaling(min_replicas: int, max_replicas: int, wait_s: float) -> Any:
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    return AutoscalingConfig(
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        metrics_interval_s=1.0,
        look_back_period_s=3.0,
        upscale_delay_s=2.0,
        downscale_delay_s=30.0,
        policy=AutoscalingPolicy(policy_function=f"{__name__}:WaitPolicy", policy_kwargs={"wait_s": wait_s}),
    )


def _request_id() -> str:
    from ray.serve.context import _get_serve_request_context

    return str(_get_serve_request_context().request_id)
