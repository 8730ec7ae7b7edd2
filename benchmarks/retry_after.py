"""Retry-After against the time until there was room, on a server that was filled and is then left alone.

A round fills the queue with large requests, each of which is accepted as long as no more than the longest wait is
ahead of it: the last one takes the queue beyond that wait, by up to its own time. Then a prober comes, is refused, and
asks again every 0.1 s until it is accepted: each refusal says how long to wait, the acceptance how long it was. Nobody
else asks meanwhile, so the truth does not depend on luck. Beside it stands when the server had answered everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.harness.load import LANE, FloatArray, Load, Stream, drive, embeddings_body, evenly
from benchmarks.harness.texts import PASSAGES, Prose

_FILLED_S = 60.0  # of work is offered in a round, twice the longest wait of bulk work
_EVERY_S = 0.4  # comes the next part of it: the one before is tokenized by then
_PROBE_TEXTS = 64
_POLL_S = 0.1
_LEAST_S = 0.5  # nearer to the acceptance than this, the time between two polls counts too much
_BOUND = 1.5
_BULK = {LANE: "bulk"}


@dataclass
class Rounds:
    """For every refused poll the Retry-After, when there was room, when all was drained; seconds from the refusal."""

    said_s: list[float] = field(default_factory=list)
    room_s: list[float] = field(default_factory=list)
    drained_s: list[float] = field(default_factory=list)
    first: list[int] = field(default_factory=list)  # positions of each round's first refusal
    num_rounds: int = 0
    num_silent: int = 0  # refusals without the header
    num_near: int = 0  # refusals too short before the acceptance to say anything
    fills: list[int] = field(default_factory=list)  # texts of each round's large requests
    refused: list[int] = field(default_factory=list)  # how often each round's prober was

    def summary(self) -> dict[str, Any]:
        counts = {
            "rounds": self.num_rounds,
            "texts of each round's large requests": self.fills,
            "refusals of each": self.refused,
            "refusals without the header": self.num_silent,
            "refusals less than 0.5 s before there was room, not judged": self.num_near,
        }
        if not self.said_s:
            return counts
        said, room, drained = (np.array(values) for values in (self.said_s, self.room_s, self.drained_s))
        ratios = said / room
        within = (ratios <= _BOUND) & (ratios >= 1 / _BOUND)
        return {
            **counts,
            "said / until there was room": _percentiles(ratios),
            "said / until all was answered": _percentiles(said / drained),
            "within 1.5 times until there was room": round(float(within.mean()), 3),
            "first refusals: said, s": np.round(said[self.first], 2).tolist(),
            "first refusals: room after, s": np.round(room[self.first], 2).tolist(),
            "first refusals: all answered after, s": np.round(drained[self.first], 2).tolist(),
        }


def truth(port: int, prose: Prose, texts_per_s: float, fills: Sequence[int]) -> Rounds:
    """Fill the server with requests of so many texts as each of ``fills`` says, and ask when there is room again.

    ``texts_per_s``: the capacity of the server.
    """
    rounds = Rounds()
    for size in fills:
        count = math.ceil(_FILLED_S * texts_per_s / size)
        bodies = [embeddings_body(prose.take(size, PASSAGES)) for _ in range(count)]
        fill = Stream("fill", bodies, headers=_BULK, arrivals_s=evenly(1 / _EVERY_S, count * _EVERY_S))
        body = embeddings_body(prose.take(_PROBE_TEXTS, PASSAGES))
        comes_s = [count * _EVERY_S]
        prober = Stream("prober", [body], headers=_BULK, arrivals_s=comes_s, retry="poll", poll_s=_POLL_S)
        rounds.fills.append(size)
        _add(rounds, drive(port, [fill, prober], patience_s=600))
    return rounds


def _add(rounds: Rounds, load: Load) -> None:
    rounds.num_rounds += 1
    prober, fill = load["prober"], load["fill"]
    accepted = prober.status == 200
    if not accepted.any():
        raise SystemExit(f"the prober was never accepted: {prober.statuses} {prober.errors}")
    room_s, drained_s = float(prober.sent_s[accepted].min()), float(fill.done_s.max())
    refused = prober.status == 429
    rounds.num_silent += int((refused & np.isnan(prober.retry_after_s)).sum())
    rounds.refused.append(int(refused.sum()))
    rounds.num_near += int((refused & (room_s - prober.done_s < _LEAST_S)).sum())
    told = refused & ~np.isnan(prober.retry_after_s) & (room_s - prober.done_s >= _LEAST_S)
    if told.any():
        rounds.first.append(len(rounds.said_s))
    rounds.said_s += prober.retry_after_s[told].tolist()
    rounds.room_s += (room_s - prober.done_s[told]).tolist()
    rounds.drained_s += (drained_s - prober.done_s[told]).tolist()


def _percentiles(ratios: FloatArray) -> dict[str, float]:
    low, middle, high = np.percentile(ratios, (10, 50, 90))
    return {"p10": round(float(low), 2), "median": round(float(middle), 2), "p90": round(float(high), 2)}
