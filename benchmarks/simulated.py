"""The simulator against the real CPU engine: one and the same trace, simulated and sent to a server of MiniLM.

    python -m benchmarks.simulated [--loads 0.7 0.85] [--seconds 25] [--repetitions 3]

The server measures its engine at its first start, as ``bei tune`` does, and the simulator reads that file. It knows the
engine alone, in its quiet moments. So a calibration goes before each trace, on texts of its own: two closed loops of
one client say what the front takes of a request and of a text, and a backfill of smaller requests says how much the
server can do and what its steps take there (``Calibration``). Traces are Poisson arrivals, of shares of what the server
can do, and another backfill. Each is predicted twice, as tuned and as calibrated, before it is sent; and once more
afterwards, at the speed that the machine turned out to have from step to step (a shared machine's moves by tenths for
seconds, and waits in a queue by much more). Figures are of the requests of all repetitions together.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bei.artifact.manifest import TOKENIZER
from bei.cli.simulate.devices import CostTable, SimulatedDevices, read_table
from bei.cli.simulate.http_time import HttpTime
from bei.cli.simulate.policies import POLICIES
from bei.cli.simulate.result import SimulatedAnswer
from bei.cli.simulate.simulator import SimulationRun
from bei.cli.simulate.trace import Trace, TraceRequest
from bei.cli.simulate.workloads import PASSAGES, QUERIES, WORKLOADS, TrafficMix
from bei.port import LANES, Lane
from bei.scheduler.cost_model import Sample, fit
from bei.scheduler.scheduler import SchedulingRules
from bei.utils.cpu_count import usable_cores
from benchmarks.common import least_disturbed, random_texts, with_foreign_load, write
from benchmarks.load import LANE, Stream, closed_loop, drive, embeddings_body
from benchmarks.models import built, minilm_folder
from benchmarks.recorded import FILE, read_steps
from benchmarks.server import metric, serving
from benchmarks.summaries import latency_ms

_MAX_SEQ_LEN = 256
_WARM_PART = 0.1
_INTERACTIVE_SHARE = 0.15
# Of bulk work: texts of a request, and requests of a backfill on their way.
_BULK = {"bulk_texts": 32, "concurrency": 4}
_CALIBRATION = {"bulk_texts": 16, "concurrency": 6}
_CALIBRATION_S = 10.0
_LONG_S = 300.0  # of the trace whose mean tokens a second scale the others
_OTHER_SEED = 1000  # of calibrations
# Of the closed loops of a calibration: requests, and texts of each.
_LOOPS = ((60, 1), (12, 32))
_SIDES = ("as tuned", "as calibrated", "at its own speed")
_FIGURES = ("p50", "p90", "p99", "tokens_per_s")


@dataclass(frozen=True)
class Calibration:
    """What a server told of itself in service.

    ``fleet``: costs fitted to its steps, and how many times as long as that fit each of them took. So they hold what
    front and client take from the engine's cores meanwhile. ``waits_s``: what the engine takes from them, that is how
    much longer a single query takes beside its steps than the steps, in their order, and the ``idle_front`` say.
    ``tokens_per_s``: of all that it answered, at its limit.
    """

    idle_front: HttpTime
    waits_s: float
    fleet: SimulatedDevices
    tokens_per_s: float

    @property
    def front(self) -> HttpTime:
        """Of a server at work."""
        return replace(self.idle_front, request_s=self.idle_front.request_s + self.waits_s)


class Side:
    """The real server, and texts for it that it has not met."""

    def __init__(self, port: int, model: str, tokenizer: Tokenizer, steps: Path) -> None:
        self.port = port
        self._model = model
        self._tokenizer = tokenizer
        self._num_drawn = 0
        self._steps, self._steps_read = steps, 0

    def bodies(self, requests: Sequence[TraceRequest]) -> list[str]:
        """A body for each request, with texts of its lengths."""
        lengths = [min(length, _MAX_SEQ_LEN) for request in requests for length in request.tokens]
        self._num_drawn += 1
        texts = iter(random_texts(self._tokenizer, lengths, seed=self._num_drawn))
        return [embeddings_body([next(texts) for _ in request.tokens]) for request in requests]

    def front(self, seed: int) -> HttpTime:
        """Run the closed loops: what of a request's time is not the engine's."""
        beside_s = []
        for count, num_texts in _LOOPS:
            lengths = (QUERIES if num_texts == 1 else PASSAGES).draw(np.random.default_rng(seed), count * num_texts)
            requests = [TraceRequest("bulk", tuple(lengths[i * num_texts : (i + 1) * num_texts])) for i in range(count)]
            began_s = self._engine_s()
            outcome, _ = closed_loop(self.port, 1, self.bodies(requests))
            beside_s.append(float(np.mean(outcome.latencies_s)) - (self._engine_s() - began_s) / count)
        (_, few), (_, many) = _LOOPS
        text_s = max(0.0, (beside_s[1] - beside_s[0]) / (many - few))
        return HttpTime(max(0.0, beside_s[0] - few * text_s), text_s)

    def calibrate(self, table: CostTable, seed: int) -> Calibration:
        """Run a backfill that is none of those predicted. Its steps while the server was full count."""
        front = self.front(seed)
        mix = TrafficMix(_CALIBRATION_S, interactive_share=_INTERACTIVE_SHARE, seed=_OTHER_SEED + seed, **_CALIBRATION)
        trace = WORKLOADS["backfill"](SimulatedDevices(table), mix)
        self.fresh_steps()
        answered = self.send(trace)
        samples = self.fresh_steps()
        in_service = fit(samples, table.model().limits)
        ratios = [sample.seconds / in_service.seconds(*sample[:3]) for sample in samples]
        costs = CostTable("in service", "steps of a server at work", False, table.num_streams, in_service.to_json())
        fleet = SimulatedDevices(costs, ratios=ratios)
        waits_s = _single_s(answered) - _single_s(_predicted(trace, table, fleet, front))
        np.random.default_rng(seed).shuffle(ratios)  # their order is of the steps of this backfill
        tokens_per_s = sum(
            _tokens_per_s([each for each in answered if each.lane == lane], _CALIBRATION_S) for lane in LANES
        )
        return Calibration(front, max(0.0, waits_s), replace(fleet, ratios=ratios), tokens_per_s)

    def send(self, trace: Trace) -> list[SimulatedAnswer]:
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

    def _engine_s(self) -> float:
        """Of all steps so far."""
        return metric(self.port, "bei_engine_seconds_sum", model=self._model) or 0.0

    def fresh_steps(self) -> list[Sample]:
        """Those that have run since the last call."""
        time.sleep(0.5)  # steps are written down after their answers
        samples, self._steps_read = read_steps(self._steps, self._steps_read)
        return samples


def main() -> None:
    """Predict, measure, and write ``results/simulated.json``."""
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        artifact = built(minilm_folder(), Path(scratch), _MAX_SEQ_LEN, "minilm")
        home, steps = Path(scratch) / "home", Path(scratch) / "steps.jsonl"
        with serving(
            artifact.path, "--bulk-max-wait=600", home=home, env={FILE: str(steps)}, program="benchmarks.recorded"
        ) as server:
            (file,) = (home / ".cache" / "bei" / "costs").glob("minilm-*.json")
            table = read_table(str(file))
            side = Side(server.port, "minilm", Tokenizer.from_file(str(artifact.path / TOKENIZER)), steps)
            side.calibrate(table, seed=0)  # warms the server up
            measurements = _measured(side, table, options)
    found = {}
    for name in _kinds(options):
        mine = [each for each in measurements if each.name == name]
        found[name] = _pooled([each.answered for each in mine], options.seconds)
        found[name]["repetitions"] = [{**each.about, **_pooled([each.answered], options.seconds)} for each in mine]
        _show(f"{name}, all repetitions", found[name])
    write("simulated", {"seconds": options.seconds, "costs": table.source, "traces": found})


@dataclass(frozen=True)
class Measurement:
    """What became of the requests of a trace called ``name``: measured, and by each side's prediction."""

    name: str
    answered: Mapping[str, Sequence[SimulatedAnswer]]
    about: Mapping[str, float]


def _measured(side: Side, table: CostTable, options: argparse.Namespace) -> list[Measurement]:
    """All traces, ``options.repetitions`` times. What others disturb is measured once more."""
    found: list[Measurement] = []
    names = [*_kinds(options)]
    while len(found) < options.repetitions * len(names):
        repetition, index = divmod(len(found), len(names))
        measure = partial(_measurement, side, table, options, names[index], seed=1 + len(found))

        def once(_: int, measure: Callable[[], Measurement] = measure) -> tuple[Measurement, float]:
            one, foreign = with_foreign_load(measure)
            return replace(one, about={**one.about, "foreign_load": foreign}), foreign

        (one,), _ = least_disturbed(1, once)
        found.append(one)
        _show(f"{one.name}, repetition {repetition + 1}", _pooled([one.answered], options.seconds))
    return found


def _measurement(side: Side, table: CostTable, options: argparse.Namespace, name: str, *, seed: int) -> Measurement:
    """Calibrate, predict, send, and predict with the steps that were seen, in their order."""
    calibration = side.calibrate(table, seed)
    front, tuned = calibration.front, SimulatedDevices(table)
    trace = _trace(_kinds(options)[name], tuned, calibration.tokens_per_s, options.seconds, seed)
    answered = {
        "as tuned": _predicted(trace, table, tuned, replace(calibration.idle_front, shared_cores=usable_cores())),
        "as calibrated": _predicted(trace, table, calibration.fleet, front),
    }
    side.fresh_steps()
    answered["measured"] = side.send(trace)
    costs, steps = calibration.fleet.table.model(), side.fresh_steps()
    ratios = [step.seconds / costs.seconds(*step[:3]) for step in steps]
    answered["at its own speed"] = _predicted(trace, table, replace(calibration.fleet, ratios=ratios), front)
    about = {
        "steps, times as long as in the calibration": round(_slowdown(steps, calibration.fleet), 3),
        "front, ms a request": round(1e3 * calibration.idle_front.request_s, 3),
        "front, ms it waits for the engine": round(1e3 * calibration.waits_s, 3),
        "front, us a text": round(1e6 * front.text_s, 1),
        "tokens a second at the limit": round(calibration.tokens_per_s),
        "steps of the calibration": len(calibration.fleet.ratios),
    }
    return Measurement(name, answered, about)


def _slowdown(samples: Sequence[Sample], fleet: SimulatedDevices) -> float:
    """How many times as long as ``fleet`` says steps took."""
    costs = fleet.table.model()
    expected_s = float(np.mean(fleet.ratios)) * sum(costs.seconds(*sample[:3]) for sample in samples)
    return sum(sample.seconds for sample in samples) / expected_s


def _kinds(options: argparse.Namespace) -> dict[str, float | None]:
    """The traces by name, and the share of the limit that comes; None: a backfill."""
    return {**{f"Poisson, {load:.0%} of the limit": load for load in options.loads}, "backfill": None}


def _trace(load: float | None, tuned: SimulatedDevices, tokens_per_s: float, seconds: float, seed: int) -> Trace:
    """Poisson arrivals of this share of ``tokens_per_s``, or a backfill."""
    mix = TrafficMix(seconds, load=1.0, interactive_share=_INTERACTIVE_SHARE, seed=seed, **_BULK)
    if load is None:
        return WORKLOADS["backfill"](tuned, mix)
    whole = WORKLOADS["poisson"](tuned, replace(mix, seconds=_LONG_S))
    offered = sum(min(length, _MAX_SEQ_LEN) for request in whole.arrivals for length in request.tokens) / _LONG_S
    return WORKLOADS["poisson"](tuned, replace(mix, load=load * tokens_per_s / offered))


def _predicted(trace: Trace, table: CostTable, fleet: SimulatedDevices, front: HttpTime) -> list[SimulatedAnswer]:
    """bei's scheduler on ``trace``, played. It begins with the tuned costs, and observes the fleet's."""
    run = SimulationRun(trace, fleet, POLICIES["bei"](table.model(), SchedulingRules()), front)
    run.play()
    return run.answered


def _answered(lane: Lane, request: TraceRequest, due_s: float, done_s: float) -> SimulatedAnswer:
    num_tokens = sum(min(length, _MAX_SEQ_LEN) for length in request.tokens)
    return SimulatedAnswer(lane, float(due_s), float(done_s), len(request.tokens), num_tokens)


def _pooled(runs: Sequence[Mapping[str, Sequence[SimulatedAnswer]]], seconds: float) -> dict[str, Any]:
    """By lane: figures of all ``runs``, measured and predicted, and the predicted by the measured.

    Ends the program where no request of a lane came after the warm-up.
    """
    found: dict[str, Any] = {}
    for lane in LANES:
        by_side = {kind: _figures([run[kind] for run in runs], lane, seconds) for kind in ("measured", *_SIDES)}
        if not by_side["measured"]["count"]:
            raise SystemExit(f"no {lane} request came after the warm-up: give more --seconds")
        measured = by_side["measured"]
        ratios = {kind: {name: round(by_side[kind][name] / measured[name], 3) for name in _FIGURES} for kind in _SIDES}
        found[lane] = {**by_side, "predicted / measured": ratios}
    return found


def _figures(runs: Sequence[Sequence[SimulatedAnswer]], lane: Lane, seconds: float) -> dict[str, float]:
    """Of requests that came after the warm-up; the rate of those that were answered after it, in time."""
    mine = [[each for each in answered if each.lane == lane] for answered in runs]
    warm_s = _WARM_PART * seconds
    latencies = [each.done_s - each.arrived_s for answered in mine for each in answered if each.arrived_s >= warm_s]
    rates = [_tokens_per_s(answered, seconds) for answered in mine]
    return {**latency_ms(latencies), "tokens_per_s": round(float(np.mean(rates)), 1)}


def _single_s(answered: Sequence[SimulatedAnswer]) -> float:
    """The median latency of a single query."""
    return float(np.median([each.done_s - each.arrived_s for each in answered if each.lane == "interactive"]))


def _tokens_per_s(answered: Sequence[SimulatedAnswer], seconds: float) -> float:
    """Of requests that were answered after the warm-up and within ``seconds``."""
    warm_s = _WARM_PART * seconds
    return sum(each.num_tokens for each in answered if warm_s <= each.done_s <= seconds) / (seconds - warm_s)


def _show(title: str, found: Mapping[str, Any]) -> None:
    print(title, flush=True)
    for lane in LANES:
        for figure in _FIGURES:
            row = found[lane]
            values = ", ".join(
                f"{kind} {row[kind][figure]:,.1f} ({row['predicted / measured'][kind][figure]:.2f})" for kind in _SIDES
            )
            print(f"  {lane:11} {figure:12} measured {row['measured'][figure]:,.1f}, {values}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", type=float, default=[0.7, 0.85], help="shares of what the server can do")
    parser.add_argument("--seconds", type=float, default=25.0, help="of a trace")
    parser.add_argument("--repetitions", type=int, default=3)
    return parser


if __name__ == "__main__":
    main()
