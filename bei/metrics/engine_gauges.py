"""Gauges of waiting and running work, read from the engine ports at scrape time, once for each model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily

from bei.core import Limits
from bei.port import LANES, Lane, LaneStats, PortStats

# The predicted wait of a request that enters a lane now, in seconds.
WaitS: TypeAlias = Callable[[Lane], float]

_MODEL = ("model",)
_LANE = ("model", "lane")


@dataclass
class GaugeSource:
    """The sources of a model's gauges: ``ports`` and the limits of their steps, lanes that are held back from both of
    its engines, and waits. There are two of each during a swap, the newer one last, and none after the model is closed.
    A swap that is refused takes its own back."""

    ports: tuple[tuple[Callable[[], PortStats], Limits], ...] = ()
    held: tuple[Callable[[], Mapping[Lane, LaneStats]], ...] = ()
    waits: tuple[WaitS, ...] = ()


class PortGauges:
    """The gauges of all models. Those of a closed model are 0; values of two ports of one model are summed, but for the
    longest step, and for limits, which are the newer one's."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._sources: dict[str, GaugeSource] = {}
        registry.register(self)

    def of(self, model: str) -> GaugeSource:
        """The sources of ``model``, for the caller to fill."""
        return self._sources.setdefault(model, GaugeSource())

    def describe(self) -> list[GaugeMetricFamily]:
        """The families without samples, in the order of ``collect``."""
        return [
            GaugeMetricFamily("bei_queue_sequences", "Sequences waiting", labels=_LANE),
            GaugeMetricFamily("bei_queue_tokens", "Tokens waiting", labels=_LANE),
            GaugeMetricFamily("bei_queue_cost_seconds", "Predicted engine seconds of waiting work", labels=_LANE),
            GaugeMetricFamily("bei_drain_seconds", "Predicted wait of a request that comes now", labels=_LANE),
            GaugeMetricFamily("bei_running_sequences", "Sequences of running steps", labels=_MODEL),
            GaugeMetricFamily(
                "bei_step_cap_seconds", "The longest step of bulk work beside interactive work", labels=_MODEL
            ),
            GaugeMetricFamily("bei_batch_sequences_limit", "Sequences that a step may hold", labels=_MODEL),
            GaugeMetricFamily("bei_batch_tokens_limit", "Tokens that a step may hold", labels=_MODEL),
        ]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        *of_lanes, drain, running, step_cap, max_sequences, max_tokens = families = self.describe()
        for model, source in list(self._sources.items()):
            all_stats = [stats() for stats, _ in source.ports]
            all_lanes = [*(stats.lanes for stats in all_stats), *(held() for held in source.held)]
            for lane in LANES:
                for field, family in enumerate(of_lanes):
                    family.add_metric((model, lane), sum(lanes[lane][field] for lanes in all_lanes))
                drain.add_metric((model, lane), source.waits[-1](lane) if source.waits else 0.0)
            running.add_metric((model,), sum(stats.num_running for stats in all_stats))
            step_cap.add_metric((model,), max((stats.step_cap_s for stats in all_stats), default=0.0))
            for _, limits in source.ports[-1:]:
                max_sequences.add_metric((model,), limits.max_batch_size)
                max_tokens.add_metric((model,), limits.max_num_tokens)
        yield from families
