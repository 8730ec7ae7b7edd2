"""What Retry-After says against what is true, on a server that was filled and is then left alone.

A round offers ten times the capacity for some seconds, in requests of 16 texts. Just before the end of it a prober
comes with a larger request, is refused, and then asks again every 0.1 s until it is accepted: each refusal says how
long to wait, the acceptance how long it was. Nobody else asks meanwhile, so the truth does not depend on luck. Beside
it stands when the server had answered everything. (A request of 16 has room as soon as a batch is done: too soon to
measure.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.load import FloatArray, Load, Stream, drive, embeddings_body, evenly
from benchmarks.prose import PASSAGES, Prose

_TIMES = 10.0
_TEXTS = 16
_POLL_S = 0.1
_LEAST_S = 0.5  # nearer to the acceptance than this, the time between two polls counts too much
_MOST_BODIES = 3_000
_BOUND = 1.5


@dataclass
class Rounds:
    """Of every refused poll: what Retry-After said, when there was room, when all was drained; seconds from then."""

    said_s: list[float] = field(default_factory=list)
    room_s: list[float] = field(default_factory=list)
    drained_s: list[float] = field(default_factory=list)
    first: list[int] = field(default_factory=list)  # positions of each round's first refusal
    num_rounds: int = 0
    num_silent: int = 0  # refusals without the header
    num_near: int = 0  # refusals too short before the acceptance to say anything
    probes: list[int] = field(default_factory=list)  # texts of each round's prober
    refused: list[int] = field(default_factory=list)  # how often each round's prober was

    def summary(self) -> dict[str, Any]:
        """Ratios of what was said to what was true."""
        counts = {
            "rounds": self.num_rounds,
            "texts of each round's prober": self.probes,
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


def truth(port: int, prose: Prose, capacity: float, probes: Sequence[int], fill_s: float) -> Rounds:
    """Fill the server and ask when there is room for each of ``probes`` texts.

    ``capacity``: requests of 16 texts a second.
    """
    rounds = Rounds()
    for size in probes:
        arrivals = evenly(_TIMES * capacity, fill_s)
        count = min(len(arrivals), _MOST_BODIES)
        bodies = [embeddings_body(prose.take(_TEXTS, PASSAGES)) for _ in range(count)]
        fill = Stream("fill", bodies, arrivals_s=arrivals, max_connections=4_000)
        body = embeddings_body(prose.take(size, PASSAGES))
        prober = Stream("prober", [body], arrivals_s=[fill_s - _POLL_S], retry="poll", poll_s=_POLL_S)
        rounds.probes.append(size)
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
