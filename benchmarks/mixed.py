"""Single texts beside bulk work on one server: the cost of each to the other.

    python -m benchmarks.mixed [--shape minilm|bert-base] [--before CHECKOUT] [--repetitions N] [--cases ...]

Cases: ``requests-256``: requests of 256 passages at concurrency 4. ``request-2048``: one request of 2,048 texts of 256
tokens at a time. ``two-models``: the first, on one of two models, single texts on the other or on the same one.
``batch``: requests of 128 passages in a file of ``/v1/batches``, which runs longer than the measurement. ``grpc``: the
first, and single texts over HTTP and over gRPC (ModelInfer), in lanes alone. ``images``: requests of 32 JPEG files of
640 x 480 at concurrency 4 and short single texts, of CLIP ViT-B/32's shape, whatever ``--shape`` says. Each measures
single texts alone (they come at ``--rate`` a second whatever the server does, and latency counts from when they were
due), bulk work alone, and both at once, in lanes and all in one lane, until the bulk work is done. ``/ready`` and
``/health`` are asked five times a second meanwhile. Texts are prose that the servers have not met. Measurements are
short and repetitions many: a shared machine changes its speed by a third, for tens of seconds. ``--repetitions 0``
shows the warm-up alone.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from bei.artifact.manifest import Artifact
from bei.core import UInt8Array
from bei.tokenizer.encoder import TextEncoder
from benchmarks.grpc_beside_http import INFER, infer_message
from benchmarks.harness.arguments import parsed
from benchmarks.harness.batches import running_batch
from benchmarks.harness.engines import encoder_of
from benchmarks.harness.load import LANE, Load, Stream, drive, embeddings_body, evenly, poisson
from benchmarks.harness.models import built, checkpoint_folder, minilm_folder
from benchmarks.harness.record import write
from benchmarks.harness.rounds import by_total_times, least_disturbed, with_foreign_load
from benchmarks.harness.servers import Fleet, UnseenTexts, free_port, kinds, metric
from benchmarks.harness.summaries import latency_ms
from benchmarks.harness.texts import LONG, PASSAGES, SHORT, Words, groups, read_prose
from benchmarks.images import as_jpeg, checkpoint_of_towers, pictures

_MAX_TOKENS = 256
_PROBES = ("/ready", "/health")
_PROBES_PER_S = 5.0
_LONGEST_S = 900.0  # of one measurement
_CAPTIONS = Words(12, 0.35, 30)  # less than CLIP's 77 tokens
_PIXELS = 640, 480
_NUM_PICTURES = 32
_CLIP = "clip-vit-b32"


@dataclass(frozen=True)
class Case:
    """Bulk work of one measurement: texts of a request, or images where ``length`` is None, their length, requests at
    once and in all; the usual repetitions; and the length of single texts."""

    inputs: int
    length: Words | None
    concurrency: int
    num_requests: int
    repetitions: int
    two_models: bool = False
    as_batch: bool = False
    over_grpc: bool = False
    singles: Words = SHORT


CASES = {
    "requests-256": Case(256, PASSAGES, 4, num_requests=4, repetitions=16),
    "request-2048": Case(2048, LONG, 1, num_requests=1, repetitions=5),
    "two-models": Case(256, PASSAGES, 4, num_requests=4, repetitions=12, two_models=True),
    "batch": Case(128, PASSAGES, 4, num_requests=32, repetitions=8, as_batch=True),
    "grpc": Case(256, PASSAGES, 4, num_requests=4, repetitions=7, over_grpc=True),
    "images": Case(32, None, 4, num_requests=8, repetitions=5, singles=_CAPTIONS),
}


@dataclass(frozen=True)
class Side:
    """A measurement of ``server``: single texts in ``lane``, bulk work, or both; ``alone``: the name of that of the
    single texts without bulk work. ``over_grpc``: single texts go over one channel."""

    name: str
    server: str
    lane: str = "interactive"
    alone: str = ""
    single: bool = True
    bulk: bool = True
    on_busy_model: bool = True
    over_grpc: bool = False


@dataclass(frozen=True)
class Measured:
    """``texts_per_s``: of the bulk work."""

    load: Load
    foreign: float
    step_cap_s: float | None
    texts_per_s: float | None


Repetition = dict[str, Measured]


def sides_of(case: Case, servers: Iterable[str]) -> list[Side]:
    """All measurements of a repetition: bulk work alone, single texts alone, both at once."""
    alone, both = [], []
    for server in servers:
        name = f"{server}, alone"
        alone.append(Side(name, server, single=False))
        if case.two_models:
            busy = f"{name}, the busy model"
            alone += [Side(name, server, bulk=False, on_busy_model=False), Side(busy, server, bulk=False)]
            both.append(Side(f"{server}, singles on the other model", server, alone=name, on_busy_model=False))
            both.append(Side(f"{server}, singles on the busy model", server, alone=busy))
        elif case.over_grpc:
            over = f"{name}, over gRPC"
            alone += [Side(name, server, bulk=False), Side(over, server, bulk=False, over_grpc=True)]
            both.append(Side(f"{server}, lanes", server, alone=name))
            both.append(Side(f"{server}, lanes, over gRPC", server, alone=over, over_grpc=True))
        else:
            alone.append(Side(name, server, bulk=False))
            both += [Side(f"{server}, lanes", server, alone=name), Side(f"{server}, one lane", server, "bulk", name)]
    return alone + both


def main() -> None:
    options = parsed(
        __doc__,
        shape=("minilm", "bert-base"),
        cases=list(CASES),
        repetitions=int,
        rate=15.0,
        seconds=6.0,
        bulk_requests=0,
        before=Path,
        # Single texts in the lane of bulk work wait for all of it, and must not be refused meanwhile.
        serve="--bulk-max-wait 600",
        serve_before="",
    )
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        prose = read_prose()
        busy_model = cache(partial(_busy_model, scratch=scratch))
        for name in options.cases:
            shape = options.shape if CASES[name].length is not None else _CLIP
            checkpoint, busy = busy_model(shape)
            models = {busy.path: checkpoint}
            if CASES[name].two_models:
                other = built(minilm_folder(), scratch, "minilm-2", max_seq_len=_MAX_TOKENS).path
                models[other] = minilm_folder()
            served = kinds(models, options, scratch)
            if CASES[name].as_batch:
                served = {
                    server: replace(kind, flags=(*kind.flags, "--batch-dir", str(scratch / f"batches-{server}")))
                    for server, kind in served.items()
                }
            ports = {server: free_port() for server in served}
            if CASES[name].over_grpc:
                served = {
                    server: replace(kind, flags=(*kind.flags, f"--grpc-port={ports[server]}"))
                    for server, kind in served.items()
                }
            with Fleet(served, scratch / "home") as fleet:
                run = Run(name, shape, options, fleet, UnseenTexts(prose, fleet), encoder_of(busy), ports)
                found = {**run.summary(*run.measure()), "servers": fleet.described()}
            write(f"mixed-{shape}-{name}", {"single texts a second": options.rate, **found})
            prose.new_lap()  # the next case has servers of its own


@cache
def _pictures() -> list[UInt8Array]:
    return [*pictures(range(_NUM_PICTURES), *_PIXELS)]


def _image(place: int) -> bytes:
    """A file that no other place has: to draw it anew would take longer than the server takes to embed it."""
    turns, index = divmod(place, _NUM_PICTURES)
    return as_jpeg(np.roll(_pictures()[index], turns, axis=1))


def _busy_model(shape: str, scratch: Path) -> tuple[Path, Artifact]:
    """The checkpoint and the artifact of the model that has the bulk work."""
    if shape == _CLIP:
        checkpoint = checkpoint_of_towers(shape, scratch)
        return checkpoint, built(checkpoint, scratch, shape)
    checkpoint = checkpoint_folder(shape, scratch)
    return checkpoint, built(checkpoint, scratch, shape, max_seq_len=_MAX_TOKENS)


class Run:
    """All measurements of one case."""

    def __init__(
        self,
        name: str,
        shape: str,
        options: argparse.Namespace,
        fleet: Fleet,
        texts: UnseenTexts,
        encoder: TextEncoder,
        grpc_ports: Mapping[str, int],
    ) -> None:
        self.name, self.case = name, CASES[name]
        self.sides = sides_of(self.case, fleet.kinds)
        self._options = options
        self._fleet = fleet
        self._texts = texts
        self._busy = shape
        self._encoder = encoder
        self._grpc_ports = grpc_ports
        self._other = "minilm-2" if self.case.two_models else shape
        self._num_measured = 0
        self._places = count()  # of images

    def measure(self) -> tuple[list[Repetition], int]:
        """Every side once to warm up, then in turn; and how many repetitions were left out."""
        repetitions = self.case.repetitions if self._options.repetitions is None else self._options.repetitions
        warm_up, _ = self._repetition()
        return least_disturbed(repetitions, lambda _: self._repetition(), self.name) if repetitions else ([warm_up], 0)

    def _repetition(self) -> tuple[Repetition, float]:
        found: Repetition = {}
        for side in self.sides:
            one = self._once(side)  # bulk work alone and single texts alone of a server are one entry
            found[side.name] = one if side.name not in found else _together(found[side.name], one)
        return found, max(one.foreign for one in found.values())

    def _once(self, side: Side) -> Measured:
        case, options = self.case, self._options
        self._num_measured += 1
        # A batch runs longer than a measurement beside it.
        is_timed = not side.bulk or case.as_batch
        arrivals_s = poisson(options.rate, options.seconds if is_timed else _LONGEST_S, seed=self._num_measured)
        num_bulk = (options.bulk_requests or case.num_requests) * case.inputs if side.bulk else 0
        singles, passages = self._inputs(len(arrivals_s) if side.single else 0, num_bulk)
        streams = [self._singles(side, singles, arrivals_s)] if side.single else []
        bulk = [embeddings_body(group, self._busy) for group in groups(passages, case.inputs)]
        if bulk and not case.as_batch:
            streams.append(Stream("bulk", bulk, concurrency=case.concurrency, headers={LANE: "bulk"}))
        if bulk and (side.single or case.as_batch):
            probes_s = evenly(_PROBES_PER_S, _LONGEST_S)
            streams += [Stream(path, [""], path, "GET", arrivals_s=probes_s) for path in _PROBES]
        port, lead = self._fleet[side.server].port, None if is_timed else "bulk"
        with running_batch(port, bulk) if bulk and case.as_batch else nullcontext():
            before = self._num_tokens_run(port)
            seconds = options.seconds if is_timed else None
            load, foreign = with_foreign_load(lambda: drive(port, streams, seconds=seconds, lead=lead, patience_s=600))
            num_tokens = self._num_tokens_run(port) - before
        if side.single:
            self._texts.give_back(singles[load["single"].num_started :], case.singles)
        both = side.single and side.bulk
        cap_s = metric(port, "bei_step_cap_seconds", model=self._busy) if both else None
        rate = None
        if bulk and case.as_batch:
            single = singles[: load["single"].num_started] if side.single else []
            num_tokens -= self._num_tokens(single)
            rate = len(passages) * num_tokens / self._num_tokens(passages) / load.elapsed_s
        elif bulk:
            rate = len(passages) / load["bulk"].must_be_ok().elapsed_s
        return Measured(load, foreign, cap_s, rate)

    def _inputs(self, num_singles: int, num_bulk: int) -> tuple[list[str], list[Any]]:
        """Single texts, and inputs of bulk work, that no server has met."""
        singles, bulk = (num_singles, self.case.singles), self.case.length
        if bulk is not None:
            texts, passages = self._texts.take(singles, (num_bulk, bulk))
            return texts, passages
        files = [_image(place) for place in islice(self._places, num_bulk)]
        return self._texts.take(singles)[0], [{"image": b64encode(file).decode()} for file in files]

    def _singles(self, side: Side, texts: Sequence[str], arrivals_s: Sequence[float]) -> Stream:
        model, headers = self._busy if side.on_busy_model else self._other, {LANE: side.lane}
        if side.over_grpc:
            port = self._grpc_ports[side.server]
            calls = [infer_message(model, [text]) for text in texts]
            return Stream("single", calls, INFER, arrivals_s=arrivals_s, headers=headers, grpc_port=port)
        bodies = [embeddings_body(text, model) for text in texts]
        return Stream("single", bodies, arrivals_s=arrivals_s, headers=headers, max_connections=2048)

    def _num_tokens_run(self, port: int) -> float:
        """By the busy model since the server began. Which texts of a batch are run first, long or short ones, is the
        server's choice, so that their number in a time says nothing."""
        return metric(port, "bei_tokens_total", model=self._busy) or 0.0

    def _num_tokens(self, texts: Sequence[str]) -> int:
        return sum(encoding.num_tokens for encoding in self._encoder.encode(texts)) if texts else 0

    def summary(self, repetitions: list[Repetition], num_left_out: int) -> dict[str, Any]:
        """Figures of a case: each kind beside the other against itself alone, on the same server."""
        single_s, p99_ms, rates, probes_s = (defaultdict[str, list[float]](list) for _ in range(4))
        statuses: dict[str, Counter[str]] = defaultdict(Counter)
        for name, one in ((name, one) for found in repetitions for name, one in found.items()):
            if one.texts_per_s is not None:
                rates[name].append(one.texts_per_s)
            for stream, outcome in one.load.streams.items():
                if stream == "single":
                    latencies = outcome.must_be_ok().latencies_s
                    single_s[name] += latencies.tolist()
                    p99_ms[name].append(float(latency_ms(latencies)["p99"]))
                elif stream in _PROBES:
                    probes_s[f"{name}, {stream}"] += (outcome.done_s - outcome.due_s).tolist()
                    statuses[f"{name}, {stream}"].update(outcome.statuses)
        latencies_ms = {name: latency_ms(values) for name, values in single_s.items()}
        probes_ms = {name: {**latency_ms(values), "statuses": statuses[name]} for name, values in probes_s.items()}
        both = [side for side in self.sides if side.single and side.bulk]
        return {
            "ratios": {side.name: _ratios(side, repetitions, latencies_ms, rates) for side in both},
            "single texts, ms": latencies_ms,
            "single texts, P99 of each repetition, ms": p99_ms,
            "bulk, texts/s": {
                name: {"median": statistics.median(values), "values": values} for name, values in rates.items()
            },
            "probes, ms": probes_ms,
            "foreign_load": {name: [found[name].foreign for found in repetitions] for name in repetitions[0]},
            "repetitions left out": num_left_out,
            "client, share of a core": {
                name: [round(found[name].load.client_share, 3) for found in repetitions] for name in repetitions[0]
            },
        }


def _together(first: Measured, second: Measured) -> Measured:
    loads = first.load, second.load
    streams = {**loads[0].streams, **loads[1].streams}
    elapsed_s, cpu_s = (sum(getattr(load, name) for load in loads) for name in ("elapsed_s", "cpu_s"))
    load = Load(streams, loads[0].started_s, elapsed_s, cpu_s)
    rate = first.texts_per_s if second.texts_per_s is None else second.texts_per_s
    return Measured(load, max(first.foreign, second.foreign), None, rate)


def _ratios(
    side: Side,
    repetitions: list[Repetition],
    latencies_ms: Mapping[str, Mapping[str, float]],
    rates: Mapping[str, list[float]],
) -> dict[str, float]:
    p99, unloaded = latencies_ms[side.name]["p99"], latencies_ms[side.alone]["p99"]
    beside, alone = rates[side.name], rates[f"{side.server}, alone"]
    caps_s = [cap for found in repetitions if (cap := found[side.name].step_cap_s) is not None]
    within = statistics.median(a / b for a, b in zip(beside, alone, strict=True))
    found = {
        "single texts, P99 / P99 alone": round(p99 / unloaded, 2),
        "single texts, P99 above twice that alone, ms": round(p99 - 2 * unloaded, 1),
        "bulk, of its rate alone (median within repetitions)": round(within, 3),
        "bulk, of its rate alone (total times)": round(by_total_times(beside, alone), 3),
    }
    caps = {"a capped step, ms (median of repetitions)": round(1e3 * statistics.median(caps_s), 1)} if caps_s else {}
    return found | caps


if __name__ == "__main__":
    main()
