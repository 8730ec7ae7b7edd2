"""Single texts beside bulk work on one server: what each costs the other.

    python -m benchmarks.mixed [--shape minilm|bert-base] [--before CHECKOUT] [--repetitions N] [--cases ...]

Cases: ``requests-256``: requests of 256 passages at concurrency 4. ``request-2048``: one request of 2,048 texts of 256
tokens at a time. ``two-models``: the first, on one of two models, single texts on the other or on the same one. Each
measures single texts alone (they come at ``--rate`` a second whatever the server does, and latency counts from when
they were due), bulk work alone, and both at once, in lanes and all in one lane, until the bulk work is done. ``/ready``
and ``/health`` are asked five times a second meanwhile. Texts are prose that the servers have not met. Measurements are
short and repetitions many: a shared machine changes its speed by a third, for tens of seconds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import by_total_times, least_disturbed, with_foreign_load, write
from benchmarks.fleet import BEFORE, NOW, FirstTime, Fleet, kinds
from benchmarks.load import LANE, Load, Stream, drive, embeddings_body, evenly, poisson
from benchmarks.mixed_plot import plot
from benchmarks.models import built, checkpoint_folder, minilm_folder
from benchmarks.prose import LONG, PASSAGES, SHORT, Words, read_prose
from benchmarks.server import metric
from benchmarks.summaries import latency_ms

SHAPES = ("minilm", "bert-base")
_MAX_TOKENS = 256
_PROBES_PER_S = 5.0
_LONGEST_S = 900.0  # of one measurement


@dataclass(frozen=True)
class Case:
    """Bulk work of one measurement, how many requests, which model serves which kind, and the usual repetitions."""

    name: str
    texts: int
    length: Words
    concurrency: int
    num_requests: int
    repetitions: int
    two_models: bool = False


CASES = {
    case.name: case
    for case in (
        Case("requests-256", 256, PASSAGES, 4, num_requests=4, repetitions=16),
        Case("request-2048", 2048, LONG, 1, num_requests=1, repetitions=5),
        Case("two-models", 256, PASSAGES, 4, num_requests=4, repetitions=12, two_models=True),
    )
}


@dataclass(frozen=True)
class Side:
    """A way to send both kinds at once. ``lane``: that of single texts, None for a server without lanes."""

    name: str
    server: str
    lane: str | None
    same_model: bool = True


@dataclass
class Samples:
    """What was measured of one case. Latencies of all repetitions, in seconds."""

    single_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    single_p99_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    bulk_rate: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    probes_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    probe_statuses: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))
    foreign_load: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    client_share: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    step_cap_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    num_left_out: int = 0  # repetitions

    def add(self, other: Samples) -> None:
        """Take those of another repetition in."""
        for mine, theirs in (
            (self.single_s, other.single_s),
            (self.single_p99_ms, other.single_p99_ms),
            (self.bulk_rate, other.bulk_rate),
            (self.probes_s, other.probes_s),
            (self.foreign_load, other.foreign_load),
            (self.client_share, other.client_share),
            (self.step_cap_s, other.step_cap_s),
        ):
            for name, values in theirs.items():
                mine[name] += values
        for name, statuses in other.probe_statuses.items():
            for status, count in statuses.items():
                self.probe_statuses[name][status] += count


def main() -> None:
    """Measure and write ``results/mixed-<shape>-<case>.json`` and its plot, case by case."""
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = checkpoint_folder(options.shape, Path(scratch))
        busy = built(folder, Path(scratch), _MAX_TOKENS, options.shape).path
        prose = read_prose()
        for case in (CASES[name] for name in options.cases):
            models = {busy: folder}
            if case.two_models:
                models[built(minilm_folder(), Path(scratch), _MAX_TOKENS, "minilm-2").path] = minilm_folder()
            servers = kinds(models, options.serve, options.before, options.serve_before, Path(scratch))
            with Fleet(servers, Path(scratch) / "home") as fleet:
                run = Run(case, options, fleet, FirstTime(prose, fleet))
                samples = run.measure()
                found = {**summary(case, samples, run.sides), "servers": fleet.described()}
            write(f"mixed-{options.shape}-{case.name}", {"single texts a second": options.rate, **found})
            plot(options.shape, case.name, samples)
            prose.new_lap()  # the next case has servers of its own


class Run:
    """All measurements of one case."""

    def __init__(self, case: Case, options: argparse.Namespace, fleet: Fleet, texts: FirstTime) -> None:
        self.case = case
        self.sides = _sides(case, options.before is not None)
        self._options = options
        self._fleet = fleet
        self._texts = texts
        self._busy = options.shape
        self._other = "minilm-2" if case.two_models else options.shape
        self._samples = Samples()
        self._num_measured = 0
        self._num_requests = options.bulk_requests or case.num_requests

    def measure(self) -> Samples:
        """Every way once to warm up, then in turn. Repetitions that others disturb are made again."""
        repetitions = self.case.repetitions if self._options.repetitions is None else self._options.repetitions
        warm_up, _ = self._repetition()
        if not repetitions:
            return warm_up
        everything = Samples()
        kept, everything.num_left_out = least_disturbed(repetitions, lambda _: self._repetition(), self.case.name)
        for found in kept:
            everything.add(found)
        return everything

    def _repetition(self) -> tuple[Samples, float]:
        """What was measured, and the largest foreign load."""
        self._samples = Samples()
        for server in dict.fromkeys(side.server for side in self.sides):
            self._once(f"{server}, alone", server, single_lane="interactive", single=False)
        for server, same_model in dict.fromkeys((side.server, side.same_model) for side in self.sides):
            name = alone_name(self.case, server, same_model)
            self._once(name, server, single_lane="interactive", same_model=same_model, bulk=False)
        for side in self.sides:
            self._once(side.name, side.server, single_lane=side.lane, same_model=side.same_model)
        return self._samples, max(max(loads) for loads in self._samples.foreign_load.values())

    def _once(
        self,
        name: str,
        server: str,
        *,
        single_lane: str | None,
        same_model: bool = False,
        single: bool = True,
        bulk: bool = True,
    ) -> None:
        """One measurement: single texts, bulk work, or both."""
        case, options = self.case, self._options
        self._num_measured += 1
        seconds = None if bulk else options.seconds
        most_s = options.seconds if seconds else _LONGEST_S
        arrivals = poisson(options.rate, most_s, seed=self._num_measured) if single else []
        wanted = [(len(arrivals), SHORT), (self._num_requests * case.texts if bulk else 0, case.length)]
        singles, passages = self._texts.take(*wanted)
        model = self._busy if same_model or not case.two_models else self._other
        streams = []
        if single:
            bodies = [embeddings_body(text, model) for text in singles]
            headers = {} if single_lane is None else {LANE: single_lane}
            streams.append(Stream("single", bodies, arrivals_s=arrivals, headers=headers, max_connections=2048))
        if bulk:
            groups = [passages[start : start + case.texts] for start in range(0, len(passages), case.texts)]
            bodies = [embeddings_body(group, self._busy) for group in groups]
            headers = {LANE: "bulk"}
            streams.append(Stream("bulk", bodies, concurrency=case.concurrency, headers=headers))
        if single and bulk:
            streams += [_probe(path) for path in ("/ready", "/health")]
        port = self._fleet[server].port
        lead = "bulk" if bulk else None
        load, foreign = with_foreign_load(lambda: drive(port, streams, seconds=seconds, lead=lead, patience_s=600))
        if single:
            self._texts.give_back(singles[load["single"].num_started :], SHORT)
        self._record(name, load, foreign)
        if single and bulk and (step_cap_s := metric(port, "bei_step_cap_seconds", model=self._busy)) is not None:
            self._samples.step_cap_s[name].append(step_cap_s)

    def _record(self, name: str, load: Load, foreign: float) -> None:
        samples = self._samples
        for stream, outcome in load.streams.items():
            if stream == "bulk":
                num_texts = self.case.texts * len(outcome.must_be_ok().status)
                samples.bulk_rate[name].append(num_texts / outcome.elapsed_s)
            elif stream == "single":
                latencies = outcome.must_be_ok().latencies_s
                samples.single_s[name] += latencies.tolist()
                samples.single_p99_ms[name].append(float(latency_ms(latencies)["p99"]))
            else:
                samples.probes_s[f"{name}, {stream}"] += (outcome.done_s - outcome.due_s).tolist()
                for status, count in outcome.statuses.items():
                    samples.probe_statuses[f"{name}, {stream}"][status] += count
        samples.foreign_load[name].append(foreign)
        samples.client_share[name].append(round(load.client_share, 3))


def alone_name(case: Case, server: str, same_model: bool) -> str:
    """What single texts alone are called: of two models they may be on either."""
    return f"{server}, alone, the busy model" if case.two_models and same_model else f"{server}, alone"


def summary(case: Case, samples: Samples, sides: list[Side]) -> dict[str, Any]:
    """Figures of a case: each kind beside the other against itself alone, on the same server."""
    ratios = {}
    for side in sides:
        alone = alone_name(case, side.server, side.same_model)
        p99, unloaded = (float(latency_ms(samples.single_s[name])["p99"]) for name in (side.name, alone))
        with_single, alone_rates = samples.bulk_rate[side.name], samples.bulk_rate[f"{side.server}, alone"]
        pairs = zip(with_single, alone_rates, strict=True)
        ratios[side.name] = {
            "single texts, P99 / P99 alone": round(p99 / unloaded, 2),
            "single texts, P99 above twice that alone, ms": round(p99 - 2 * unloaded, 1),
            "bulk, of its rate alone (median within repetitions)": round(statistics.median(a / b for a, b in pairs), 3),
            "bulk, of its rate alone (total times)": round(by_total_times(with_single, alone_rates), 3),
        }
        if caps := samples.step_cap_s[side.name]:
            ratios[side.name]["a capped step, ms (median of repetitions)"] = round(1e3 * statistics.median(caps), 1)
    return {
        "ratios": ratios,
        "single texts, ms": {name: latency_ms(values) for name, values in samples.single_s.items()},
        "single texts, P99 of each repetition, ms": dict(samples.single_p99_ms),
        "bulk, texts/s": {
            name: {"median": statistics.median(values), "values": values} for name, values in samples.bulk_rate.items()
        },
        "probes, ms": {
            name: {**latency_ms(values), "statuses": dict(samples.probe_statuses[name])}
            for name, values in samples.probes_s.items()
        },
        "foreign_load": dict(samples.foreign_load),
        "repetitions left out": samples.num_left_out,
        "client, share of a core": dict(samples.client_share),
    }


def _sides(case: Case, has_before: bool) -> list[Side]:
    if case.two_models:
        sides = [
            Side("now, singles on the other model", NOW, "interactive", same_model=False),
            Side("now, singles on the busy model", NOW, "interactive"),
        ]
        return sides + [Side("before, singles on the other model", BEFORE, None, same_model=False)] * has_before
    sides = [Side("now, lanes", NOW, "interactive"), Side("now, one lane", NOW, "bulk")]
    return sides + [Side("before", BEFORE, None)] * has_before


def _probe(path: str) -> Stream:
    return Stream(path, [""], path, "GET", arrivals_s=evenly(_PROBES_PER_S, _LONGEST_S))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="minilm")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--repetitions", type=int, help="of each case (default: by case)")
    parser.add_argument("--rate", type=float, default=15.0, help="single texts a second")
    parser.add_argument("--seconds", type=float, default=6.0, help="single texts alone are measured so long")
    parser.add_argument("--bulk-requests", type=int, default=0, help="of one measurement (default: by case)")
    parser.add_argument("--before", type=Path, help="another checkout, whose server is measured in the same run")
    # Single texts in the lane of bulk work wait for all of it, and must not be refused meanwhile.
    parser.add_argument("--serve", default="--bulk-max-wait 600", help="flags of bei serve, as in a shell")
    parser.add_argument("--serve-before", default="", help="those of the other checkout's")
    return parser


if __name__ == "__main__":
    main()
