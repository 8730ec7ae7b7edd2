"""The simulator against the real CPU engine: one and the same trace, simulated and sent to a server of MiniLM.

    python -m benchmarks.simulated [--traces poisson backfill] [--seconds 40] [--repetitions 3] [--load 0.6]

The server measures its engine at its first start, as ``bei tune`` does, and the simulator reads that file. Before every
repetition two short closed loops of one client, on other texts, say what the front takes of a request and of a text,
and how many times as long as in the file steps take now: measured costs are the shortest times of quiet moments. Each
trace is predicted twice, with the costs as they were tuned and with the speed that was just observed, and then sent.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bei.artifact import TOKENIZER
from bei.batching.scheduler import SchedulingRules
from bei.cores import usable_cores
from bei.port import LANES, Lane
from bei.simulation.devices import CostTable, Fleet, read_table
from bei.simulation.front import Front
from bei.simulation.policies import POLICIES
from bei.simulation.result import Answered
from bei.simulation.simulator import Run
from bei.simulation.trace import Request, Trace
from bei.simulation.workloads import PASSAGES, QUERIES, WORKLOADS, Mix
from benchmarks.common import Quiet, random_texts, with_foreign_load, write
from benchmarks.load import LANE, Stream, closed_loop, drive, embeddings_body
from benchmarks.models import built, minilm_folder
from benchmarks.server import metric, serving
from benchmarks.summaries import latency_ms

_MAX_SEQ_LEN = 256
_WARM_PART = 0.1
_BULK_TEXTS = 32
_INTERACTIVE_SHARE = 0.15
_CONCURRENCY = 4  # of a backfill
# Of the closed loops before a repetition: requests, and texts of each.
_LOOPS = ((100, 1), (20, 32))
_SIDES = ("as tuned", "speed observed")


@dataclass(frozen=True)
class Observed:
    """What the closed loops say: the front, and how many times as long as in the file steps take."""

    front: Front
    slowdown: float


class Side:
    """The real server, and texts for it that it has not met."""

    def __init__(self, port: int, model: str, tokenizer: Tokenizer) -> None:
        self.port = port
        self._model = model
        self._tokenizer = tokenizer
        self._num_drawn = 0

    def bodies(self, requests: Sequence[Request]) -> list[str]:
        """A body for each request, with texts of its lengths."""
        lengths = [min(length, _MAX_SEQ_LEN) for request in requests for length in request.tokens]
        self._num_drawn += 1
        texts = iter(random_texts(self._tokenizer, lengths, seed=self._num_drawn))
        return [embeddings_body([next(texts) for _ in request.tokens]) for request in requests]

    def engine_s(self) -> float:
        """Of all steps so far."""
        return metric(self.port, "bei_engine_seconds_sum", model=self._model) or 0.0

    def observe(self, table: CostTable, seed: int) -> Observed:
        """Run the closed loops, and simulate them."""
        beside_s, engine_s, simulated_s = [], 0.0, 0.0
        for count, num_texts in _LOOPS:
            lengths = (QUERIES if num_texts == 1 else PASSAGES).draw(np.random.default_rng(seed), count * num_texts)
            requests = [Request("bulk", tuple(lengths[i * num_texts : (i + 1) * num_texts])) for i in range(count)]
            began_s = self.engine_s()
            outcome, _ = closed_loop(self.port, 1, self.bodies(requests))
            spent_s = self.engine_s() - began_s
            beside_s.append(float(np.mean(outcome.latencies_s)) - spent_s / count)
            engine_s += spent_s
            run = _run(Trace((), requests), Fleet(table), Front())
            simulated_s += sum(step.ended_s - step.started_s for step in run.steps)
        (_, few), (_, many) = _LOOPS
        text_s = max(0.0, (beside_s[1] - beside_s[0]) / (many - few))
        front = Front(max(0.0, beside_s[0] - few * text_s), text_s, usable_cores())
        return Observed(front, engine_s / simulated_s)

    def send(self, trace: Trace) -> list[Answered]:
        """Send the trace as it is; what became of its requests."""
        requests = {
            lane: [request for request in trace.arrivals if request.lane == lane]
            for lane in LANES
            if any(request.lane == lane for request in trace.arrivals)
        }
        streams = [
            Stream(lane, self.bodies(mine), headers={LANE: lane}, arrivals_s=[each.at_s or 0.0 for each in mine])
            for lane, mine in requests.items()
        ]
        if trace.backfill:
            assert "bulk" not in requests
            requests["bulk"] = list(trace.backfill)
            bodies = self.bodies(trace.backfill)
            streams.append(Stream("bulk", bodies, headers={LANE: "bulk"}, concurrency=trace.concurrency))
        load = drive(self.port, streams, seconds=None if not trace.backfill else trace.seconds)
        found = []
        for lane, mine in requests.items():
            outcome = load[lane].must_be_ok()
            for body, due_s, done_s in zip(outcome.body, outcome.due_s, outcome.done_s, strict=True):
                found.append(_answered(lane, mine[body], due_s, done_s))
        return found


def main() -> None:
    """Predict, measure, and write ``results/simulated.json``."""
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        artifact = built(minilm_folder(), "bf16", Path(scratch), _MAX_SEQ_LEN, "minilm")
        home = Path(scratch) / "home"
        with serving(artifact.path, "--bulk-max-wait", "600", home=home) as server:
            (file,) = (home / ".cache" / "bei" / "costs").glob("minilm-*.json")
            table = read_table(str(file))
            side = Side(server.port, "minilm", Tokenizer.from_file(str(artifact.path / TOKENIZER)))
            side.observe(table, seed=10_000)  # warms the server up
            found = {name: _repeated(name, side, table, options) for name in options.traces}
    summary = {name: _summary(rows) for name, rows in found.items()}
    about = {"load": options.load, "seconds": options.seconds, "costs": table.source}
    write("simulated", {**about, "predicted / measured, medians": summary, "repetitions": found})


def _repeated(name: str, side: Side, table: CostTable, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    quiet = Quiet(options.repetitions)
    while len(rows) < options.repetitions:
        row, foreign = with_foreign_load(lambda: _repetition(name, side, table, options, seed=len(rows)))
        if quiet.keeps([foreign]):
            rows.append({**row, "foreign_load": foreign})
    return rows


def _repetition(name: str, side: Side, table: CostTable, options: argparse.Namespace, *, seed: int) -> dict[str, Any]:
    observed = side.observe(table, seed)
    mix = Mix(
        seconds=options.seconds,
        load=options.load,
        interactive_share=_INTERACTIVE_SHARE,
        bulk_texts=_BULK_TEXTS,
        concurrency=_CONCURRENCY,
        seed=seed,
    )
    fleet = Fleet(table, slowdown=observed.slowdown)
    trace = WORKLOADS[name](fleet, mix)
    predicted = {
        "as tuned": _run(trace, replace(fleet, slowdown=1.0), observed.front).answered,
        "speed observed": _run(trace, fleet, observed.front).answered,
    }
    measured = _figures(side.send(trace), options.seconds)
    front = {"request_ms": 1e3 * observed.front.request_s, "text_us": 1e6 * observed.front.text_s}
    row = {
        "slowdown": round(observed.slowdown, 3),
        "front": {key: round(value, 3) for key, value in front.items()},
        "measured": measured,
        "predicted": {kind: _figures(answered, options.seconds) for kind, answered in predicted.items()},
    }
    _show(name, row)
    return row


def _run(trace: Trace, fleet: Fleet, front: Front) -> Run:
    """bei's scheduler on ``trace``, played. It begins with the table's costs, and observes the fleet's."""
    run = Run(trace, fleet, POLICIES["bei"](fleet.table.model(), SchedulingRules()), front)
    run.play()
    return run


def _answered(lane: Lane, request: Request, due_s: float, done_s: float) -> Answered:
    num_tokens = sum(min(length, _MAX_SEQ_LEN) for length in request.tokens)
    return Answered(lane, float(due_s), float(done_s), len(request.tokens), num_tokens)


def _figures(answered: Sequence[Answered], seconds: float) -> dict[str, dict[str, float]]:
    """By lane: latencies of requests that came after the warm-up, and the rate of those that ended after it in time.

    Ends the program where there are none.
    """
    warm_s = _WARM_PART * seconds
    found: dict[str, dict[str, float]] = {}
    for lane in LANES:
        mine = [each for each in answered if each.lane == lane]
        latencies = latency_ms([each.done_s - each.arrived_s for each in mine if each.arrived_s >= warm_s])
        if not latencies["count"]:
            raise SystemExit(f"no {lane} request came after the warm-up of {warm_s:g} s: give more --seconds")
        tokens = sum(each.num_tokens for each in mine if warm_s <= each.done_s <= seconds)
        found[lane] = {**latencies, "tokens_per_s": round(tokens / (seconds - warm_s), 1)}
    return found


def _ratios(row: Mapping[str, Any], kind: str) -> dict[str, dict[str, float]]:
    """Predicted over measured, by lane and figure."""
    return {
        lane: {
            name: row["predicted"][kind][lane][name] / row["measured"][lane][name]
            for name in ("p50", "p99", "tokens_per_s")
        }
        for lane in LANES
    }


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    by_row = {kind: [_ratios(row, kind) for row in rows] for kind in _SIDES}
    return {
        kind: {
            lane: {
                name: round(statistics.median(each[lane][name] for each in ratios), 3)
                for name in ("p50", "p99", "tokens_per_s")
            }
            for lane in LANES
        }
        for kind, ratios in by_row.items()
    }


def _show(name: str, row: Mapping[str, Any]) -> None:
    print(f"{name}: steps take {row['slowdown']} times what was tuned; front {row['front']}", flush=True)
    for lane in LANES:
        for figure in ("p50", "p99", "tokens_per_s"):
            values = [row["measured"][lane][figure], *(row["predicted"][kind][lane][figure] for kind in _SIDES)]
            text = ", ".join(
                f"{label} {value:,.1f}" for label, value in zip(("measured", *_SIDES), values, strict=True)
            )
            print(f"  {lane:11} {figure:12} {text}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", nargs="+", choices=tuple(WORKLOADS), default=["poisson", "backfill"])
    parser.add_argument("--seconds", type=float, default=40.0, help="of a trace")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--load", type=float, default=0.6, help="of the engine, by the costs as they were tuned")
    return parser


if __name__ == "__main__":
    main()
