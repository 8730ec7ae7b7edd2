"""``GET /stats``: statistics of the last minute and the current state, which the live view of the page also draws."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, TypedDict

import msgspec

from bei.metrics.last_minute import PackedMinuteWindow, RequestCounts, request_counts, step_sums, summed
from bei.metrics.registry import Metrics
from bei.port import LaneStats
from bei.version import __version__

if TYPE_CHECKING:  # the batch manager's process, which has a part in this too, does not load what answers requests
    from bei.server.endpoint.models import Models
    from bei.service.service import InferenceService

PATH = "/stats"


class Latency(TypedDict):
    """Percentiles of the seconds to a successful answer, exact to 4.5 %; null: there was none."""

    p50: float | None
    p90: float | None
    p99: float | None


class RequestsPerSecond(TypedDict):
    """The last 60 whole seconds, the oldest first: how many requests were answered, and percentiles in seconds."""

    answered: list[int]
    p50: list[float | None]
    p99: list[float | None]


class RequestStats(TypedDict):
    """Requests of one lane that were answered in the last minute, by status."""

    answered: dict[str, int]
    latency_s: Latency
    per_second: RequestsPerSecond


class Requests(TypedDict):
    """By lane. `other`: requests without a lane, which are reads, and requests that were refused early."""

    interactive: RequestStats
    bulk: RequestStats
    other: RequestStats


class QueueStats(TypedDict):
    """Sequences that wait now, their tokens, and the engine seconds that they are predicted to take."""

    sequences: int
    tokens: int
    seconds: float


class QueuesByLane(TypedDict):
    """By lane."""

    interactive: QueueStats
    bulk: QueueStats


class BatchStats(TypedDict):
    """Means over the engine steps of the last minute (null: there was none), and the limits of a step.

    `fill`: tokens as a share of `max_tokens`. `padding`: the share of the attention's work that was spent on padding.
    """

    sequences: float | None
    tokens: float | None
    fill: float | None
    padding: float | None
    max_sequences: int
    max_tokens: int


class TokensPerSecond(TypedDict):
    """The last 60 whole seconds, the oldest first."""

    tokens: list[int]


class ModelStats(TypedDict):
    """One model. Rates are means of the last minute; `busy` is the share of it in which the engine ran steps.
    `unshared_prefixes`: why what texts of a step begin with in common is computed for each of them; null: once."""

    name: str
    target: str
    precision: str
    device: str
    unshared_prefixes: str | None
    is_alive: bool
    open_requests: int
    queue: QueuesByLane
    sequences_per_second: float
    tokens_per_second: float
    steps_per_second: float
    busy: float
    batch: BatchStats
    per_second: TokensPerSecond


class Stats(TypedDict):
    """`window_s` is how much of the last minute the figures cover: less than 60 only soon after the start. `silent`:
    processes of the server that have not answered, whose part is missing."""

    version: str
    window_s: float
    requests: Requests
    models: list[ModelStats]
    silent: list[str]


class Part(msgspec.Struct, array_like=True, frozen=True):
    """The statistics of one process: requests and engine steps (by model) of the last minute, and names of models with
    a dead thread."""

    requests: PackedMinuteWindow
    steps: dict[str, PackedMinuteWindow]
    dead: list[str] = []


_parts = msgspec.msgpack.Decoder(Part)


def part(metrics: Metrics, dead: Seq[str] = ()) -> bytes:
    """The encoded ``Part`` of this process, for another process."""
    steps = {model: recent.window().packed() for model, recent in list(metrics.steps.items())}
    return msgspec.msgpack.encode(Part(metrics.recent.window().packed(), steps, [*dead]))


def describe(models: Models, metrics: Metrics, others: Seq[bytes] = (), silent: Seq[str] = ()) -> Stats:
    """The answer of /stats, with ``others``, the encoded parts of other processes. ``silent``: missing ones."""
    parts = [_parts.decode(other) for other in others]
    mine = metrics.recent.window()
    window = summed([mine, *(other.requests.unpacked_like(mine) for other in parts)])
    counts = request_counts(window)
    return {
        "version": __version__,
        "window_s": round(window.covered_s, 3),
        "requests": {
            "interactive": _requests(counts["interactive"]),
            "bulk": _requests(counts["bulk"]),
            "other": _requests(counts["other"]),
        },
        "models": [_model(service, parts) for service in models],
        "silent": [*silent],
    }


def _requests(found: RequestCounts) -> RequestStats:
    p50, p90, p99 = found.latency
    return {
        "answered": {str(status): count for status, count in found.answered.items()},
        "latency_s": {"p50": p50, "p90": p90, "p99": p99},
        "per_second": {
            "answered": found.answered_per_second,
            "p50": found.p50_per_second,
            "p99": found.p99_per_second,
        },
    }


def _model(service: InferenceService, others: Seq[Part]) -> ModelStats:
    manifest, port, mine = service.manifest, service.port_stats, service.recent.window()
    elsewhere = [other.steps[service.name] for other in others if service.name in other.steps]
    sums = step_sums(summed([mine, *(window.unpacked_like(mine) for window in elsewhere)]))
    mean_tokens = sums.tokens / sums.steps if sums.steps else None
    return {
        "name": service.name,
        "target": manifest.target,
        "precision": manifest.precision,
        "device": port.device,
        "unshared_prefixes": port.unshared,
        "is_alive": service.is_alive and not any(service.name in other.dead for other in others),
        "open_requests": service.num_open,
        "queue": {"interactive": _queue(port.lanes["interactive"]), "bulk": _queue(port.lanes["bulk"])},
        "sequences_per_second": sums.sequences / sums.covered_s,
        "tokens_per_second": sums.tokens / sums.covered_s,
        "steps_per_second": sums.steps / sums.covered_s,
        "busy": min(1.0, sums.engine_s / (sums.covered_s * port.num_streams)),
        "batch": {
            "sequences": sums.sequences / sums.steps if sums.steps else None,
            "tokens": mean_tokens,
            "fill": None if mean_tokens is None else mean_tokens / manifest.max_num_tokens,
            "padding": 1 - sums.tokens / sums.slots if sums.slots else None,
            "max_sequences": manifest.max_batch_size,
            "max_tokens": manifest.max_num_tokens,
        },
        "per_second": {"tokens": sums.tokens_per_second},
    }


def _queue(lane: LaneStats) -> QueueStats:
    return {"sequences": lane.num_sequences, "tokens": lane.num_tokens, "seconds": lane.cost_s}
