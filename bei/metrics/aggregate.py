"""Aggregates the metrics of a server's processes.

Counters and histograms are summed; the counts of ended processes stay in the sums, so that no counter decreases. Gauges
are aggregated by one rule each (``GAUGES``), and count only while their process responds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Final

import msgspec
from prometheus_client.core import Metric

from bei.metrics.tei import AnsweredRequests

_SUMMED: Final = ("counter", "histogram")

# Every process reports the gauges of the same queue, at slightly different times: the largest value counts.
GAUGES: Final[Mapping[str, Callable[[float, float], float]]] = {
    "bei_queue_sequences": max,
    "bei_queue_tokens": max,
    "bei_queue_cost_seconds": max,
    "bei_drain_seconds": max,
    "bei_running_sequences": max,
    "bei_step_cap_seconds": max,
    "bei_batch_sequences_limit": max,
    "bei_batch_tokens_limit": max,
    "bei_artifact_info": max,
    "bei_artifact_start_time_seconds": min,
    "process_resident_memory_bytes": float.__add__,
    "process_virtual_memory_bytes": float.__add__,
    "process_open_fds": float.__add__,
    "process_max_fds": float.__add__,
    "process_start_time_seconds": min,
}


class Family(msgspec.Struct, array_like=True, frozen=True):
    """A metric: name, help text, type, and samples (name, label names and values, value)."""

    name: str
    text: str
    kind: str
    samples: list[tuple[str, tuple[tuple[str, str], ...], float]]


class Snapshot(msgspec.Struct, array_like=True, frozen=True):
    """The metrics of one process, or the aggregate of several.

    ``answered`` (counts of requests) and ``embedders`` (names of models that embed) are for the metrics that are also
    exposed under TEI's names.
    """

    families: list[Family]
    answered: list[AnsweredRequests] = []
    embedders: list[str] = []

    def encode(self) -> bytes:
        """The snapshot as bytes, for another process."""
        return msgspec.msgpack.encode(self)


_decoder = msgspec.msgpack.Decoder(Snapshot)


def snapshot_of(families: Iterable[Metric], answered: Iterable[AnsweredRequests], embedders: Iterable[str]) -> Snapshot:
    """A snapshot of metrics as a registry collects them."""
    return Snapshot(
        [
            Family(
                family.name,
                family.documentation,
                family.type,
                [(name, tuple(labels.items()), float(value)) for name, labels, value, *_ in family.samples],
            )
            for family in families
        ],
        [*answered],
        [*embedders],
    )


def metrics_of(families: Iterable[Family]) -> list[Metric]:
    """Prometheus' metrics from the families of a snapshot."""
    found = []
    for family in families:
        metric = Metric(family.name, family.text, family.kind)
        for name, labels, value in family.samples:
            metric.add_sample(name, dict(labels), value)
        found.append(metric)
    return found


def merge_snapshots(answers: Iterable[bytes]) -> Snapshot:
    """The aggregate of ``answers``, which are encoded snapshots."""
    snapshots = [_decoder.decode(answer) for answer in answers]
    by_name: dict[str, list[Family]] = {}
    requests: Counter[tuple[str, int]] = Counter()
    for snapshot in snapshots:
        for family in snapshot.families:
            by_name.setdefault(family.name, []).append(family)
        for method, status, number in snapshot.answered:
            requests[method, status] += number
    return Snapshot(
        [_merged(families) for families in by_name.values()],
        [AnsweredRequests(method, status, number) for (method, status), number in requests.items()],
        sorted({name for snapshot in snapshots for name in snapshot.embedders}),
    )


def counts_of_ended(answers: Seq[bytes]) -> bytes:
    """An encoded snapshot of the counters and histograms in ``answers``, without gauges.

    ``answers``: the last encoded snapshots of processes that have ended, or do not respond.
    """
    found = merge_snapshots(answers)
    return msgspec.structs.replace(
        found, families=[family for family in found.families if family.kind in _SUMMED]
    ).encode()


def _merged(families: Seq[Family]) -> Family:
    first = families[0]
    rule = float.__add__ if first.kind in _SUMMED else GAUGES[first.name]
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in families:
        for name, labels, value in family.samples:
            place = name, labels
            if place in values:
                value = rule(values[place], value)
            values[place] = value
    return msgspec.structs.replace(first, samples=[(*place, value) for place, value in values.items()])
