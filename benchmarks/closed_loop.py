"""Throughput of closed loops against the engine alone, on prose the servers have not met.

    python -m benchmarks.closed_loop [--before CHECKOUT] [--repetitions 11] [--cold] [--bulk]

Single texts (about 29 tokens) at concurrency 1, 16, 64 and 256, and requests of 32 passages at concurrency 4. In each
repetition the engine alone runs the texts of concurrency 64 and of the requests of 32, tokenized and cut into batches
beforehand, from all texts at once and, for the requests, from the 128 in flight; the other single texts are as many
words long. All servers get the same texts. ``--cold`` restarts the servers before every repetition, so that they meet
every word anew; otherwise words that are frequent are known after a while, as on any server. ``--bulk`` leaves the
single texts out, for more repetitions of requests in a time, and writes ``closed-loop-bulk.json``.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bei.artifact.manifest import TOKENIZER, Artifact
from bei.core import Engine, PackedBatch
from bei.engine.load import load_engine
from bei.scheduler.cost_measurement import measure as measure_costs
from bei.tokenizer.encoder import TextEncoder
from benchmarks.common import alternate, batches_in_flight, ratio, sorted_batches, write
from benchmarks.engine_alone import engine_rate
from benchmarks.fleet import NOW, FirstTime, Fleet, kinds
from benchmarks.load import closed_loop, embeddings_body
from benchmarks.models import built, minilm_folder
from benchmarks.plots import BLUE, GREY, RED, bars, panels, save
from benchmarks.prose import PASSAGES, SHORT, read_prose

# Single texts by concurrency: enough for a second or so of MiniLM on two cores.
SINGLES = {1: 384, 16: 1024, 64: 1536, 256: 2048}
_BULK_TEXTS, _BULK_SIZE, _BULK_CONCURRENCY = 2048, 32, 4
_AS_SINGLE = 64  # the engine alone runs the texts of this concurrency
_BULK = f"requests of {_BULK_SIZE}"
ENGINE_SINGLE, ENGINE_BULK = "engine alone, single texts", f"engine alone, {_BULK}"
ENGINE_IN_FLIGHT = f"engine alone on the same texts in flight, {_BULK}"


def main() -> None:
    """Measure and write ``results/closed-loop.json`` and its plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the usual number of texts")
    parser.add_argument("--cold", action="store_true", help="restart the servers before every repetition")
    parser.add_argument("--before", type=Path, help="another checkout, whose server is measured in the same run")
    parser.add_argument("--bulk", action="store_true", help="requests of 32 only")
    parser.add_argument("--serve", default="", help="flags of bei serve, as in a shell")
    parser.add_argument("--serve-before", default="", help="those of the other checkout's")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        artifact = built(minilm_folder(), Path(scratch))
        engine = load_engine(artifact.engine_dir, artifact.manifest)
        engine.warmup()
        models = {artifact.path: minilm_folder()}
        servers = kinds(models, options.serve, options.before, options.serve_before, Path(scratch))
        with Fleet(servers, Path(scratch) / "home") as fleet:
            rounds = Rounds(artifact, engine, fleet, options.scale, cold=options.cold)
            sides = rounds.sides(list(servers))
            if options.bulk:
                sides = {name: side for name, side in sides.items() if name.endswith(_BULK)}
            texts_per_s = alternate(sides, options.repetitions, rounds.prepare)
            results = summary(texts_per_s, rounds.client_shares, list(servers))
            described = {"servers": fleet.described(), "texts": rounds.texts.described(), "cold": options.cold}
    write("closed-loop-bulk" if options.bulk else "closed-loop", {**results, **described})
    if not options.bulk:
        plot(texts_per_s, list(servers))


class Rounds:
    """The texts of one repetition at a time, and what is measured on them."""

    def __init__(self, artifact: Artifact, engine: Engine, fleet: Fleet, scale: float, *, cold: bool) -> None:
        self._encoder = TextEncoder(artifact.path / TOKENIZER, artifact.manifest.max_seq_len)
        self._engine = engine
        self._costs = measure_costs(engine, vocab_size=artifact.manifest.spec.vocab_size)
        self._fleet = fleet
        self._cold = cold
        self._counts = {concurrency: max(concurrency, round(n * scale)) for concurrency, n in SINGLES.items()}
        self._num_bulk = max(1, round(_BULK_TEXTS * scale / _BULK_SIZE)) * _BULK_SIZE
        self.texts = FirstTime(read_prose(), fleet)
        self._bodies: dict[int, list[str]] = {}
        self._bulk_bodies: list[str] = []
        self._batches: dict[str, list[PackedBatch]] = {}
        self.client_shares: dict[str, list[float]] = defaultdict(list)

    def prepare(self) -> None:
        """Texts for the next repetition: requests for the servers, batches for the engine."""
        if self._cold:
            self._fleet.restart()
        *singles, bulk = self.texts.take(
            *((count, SHORT) for count in self._counts.values()), (self._num_bulk, PASSAGES)
        )
        by_concurrency = dict(zip(self._counts, singles, strict=True))
        self._bodies = {key: [embeddings_body(text) for text in texts] for key, texts in by_concurrency.items()}
        groups = [bulk[start : start + _BULK_SIZE] for start in range(0, len(bulk), _BULK_SIZE)]
        self._bulk_bodies = [embeddings_body(group) for group in groups]
        limits, costs = self._engine.info.limits, self._costs
        encoded = self._encoder.encode(bulk)
        self._batches = {
            ENGINE_SINGLE: sorted_batches(self._encoder.encode(by_concurrency[_AS_SINGLE]), limits, costs),
            ENGINE_BULK: sorted_batches(encoded, limits, costs),
            ENGINE_IN_FLIGHT: batches_in_flight(encoded, limits, costs, _BULK_SIZE, _BULK_CONCURRENCY),
        }

    def sides(self, servers: list[str]) -> dict[str, Callable[[], float]]:
        """Every measurement, in the order in which a repetition makes them."""
        measures: dict[str, Callable[[], float]] = {}
        for concurrency in SINGLES:
            for server in servers:
                measures[single(server, concurrency)] = partial(self._single, server, concurrency)
        measures[ENGINE_SINGLE] = partial(self._alone, ENGINE_SINGLE)
        measures[ENGINE_BULK] = partial(self._alone, ENGINE_BULK)
        for server in servers:
            measures[bulk_of(server)] = partial(self._bulk, server)
        measures[ENGINE_IN_FLIGHT] = partial(self._alone, ENGINE_IN_FLIGHT)
        return measures

    def _single(self, server: str, concurrency: int) -> float:
        return self._rate(single(server, concurrency), server, concurrency, self._bodies[concurrency], 1)

    def _bulk(self, server: str) -> float:
        return self._rate(bulk_of(server), server, _BULK_CONCURRENCY, self._bulk_bodies, _BULK_SIZE)

    def _rate(self, name: str, server: str, concurrency: int, bodies: list[str], texts_a_body: int) -> float:
        outcome, load = closed_loop(self._fleet[server].port, concurrency, bodies)
        self.client_shares[name].append(round(load.client_share, 3))
        return len(bodies) * texts_a_body / outcome.elapsed_s

    def _alone(self, name: str) -> float:
        num_texts = self._counts[_AS_SINGLE] if name == ENGINE_SINGLE else self._num_bulk
        return engine_rate(self._engine, self._batches[name], num_texts)


def single(server: str, concurrency: int) -> str:
    """The name of a measurement."""
    return f"{server}, single texts at {concurrency}"


def bulk_of(server: str) -> str:
    """The name of a measurement."""
    return f"{server}, {_BULK}"


def summary(
    texts_per_s: Mapping[str, Mapping[str, Any]], client_shares: Mapping[str, list[float]], servers: list[str]
) -> dict[str, Any]:
    """Shares of the engine alone, steps from one concurrency to the next, and now against before."""
    results: dict[str, Any] = {}
    singles = SINGLES if ENGINE_SINGLE in texts_per_s else {}
    for server in servers:
        of_engine = {single(server, c): ratio(texts_per_s, single(server, c), ENGINE_SINGLE) for c in singles}
        for engine in (ENGINE_BULK, ENGINE_IN_FLIGHT):
            of_engine[f"{bulk_of(server)} / {engine}"] = ratio(texts_per_s, bulk_of(server), engine)
        results[server] = {
            "of the engine alone": of_engine,
            "single texts, at a concurrency / at the one below": {
                f"{more} / {fewer}": ratio(texts_per_s, single(server, more), single(server, fewer))
                for fewer, more in itertools.pairwise(singles)
            },
        }
    for other in servers[1:]:
        pairs = [(single(NOW, c), single(other, c)) for c in singles] + [(bulk_of(NOW), bulk_of(other))]
        results[f"{NOW} / {other}"] = {over: ratio(texts_per_s, over, under) for over, under in pairs}
    shares = {
        name: {"median": statistics.median(values[1:] or values), "values": values[1:]}  # the first: warm-up
        for name, values in client_shares.items()
    }
    return {**results, "texts/s": texts_per_s, "client, share of a core": shares}


def plot(texts_per_s: Mapping[str, Mapping[str, Any]], servers: list[str]) -> None:
    """Write ``results/closed-loop.png``: throughput against concurrency, and requests of 32."""
    figure, ((left, right),) = panels(1, 2, (10.5, 3.6), width_ratios=(3, 2))
    alone = texts_per_s[ENGINE_SINGLE]["median"]
    left.axhline(alone, color=GREY, linestyle="--")
    left.annotate("engine alone", (1, alone), xytext=(0, 4), textcoords="offset points", color=GREY, fontsize=8.5)
    colors = dict(zip(servers, (BLUE, RED), strict=False))
    for server in servers:
        sides = [texts_per_s[single(server, concurrency)] for concurrency in SINGLES]
        medians = [side["median"] for side in sides]
        spread = [[m - side["min"] for m, side in zip(medians, sides, strict=True)]]
        spread.append([side["max"] - m for m, side in zip(medians, sides, strict=True)])
        places = [concurrency * (1.0 if server == NOW else 1.07) for concurrency in SINGLES]
        left.errorbar(places, medians, spread, marker="o", color=colors[server], capsize=3, label=server)
        for place, (concurrency, median) in enumerate(zip(SINGLES, medians, strict=True)):
            if server == NOW:
                end = place == len(SINGLES) - 1
                left.annotate(
                    f"{median / alone:.0%}",
                    (concurrency, median),
                    xytext=(-6 if end else 6, -13),
                    textcoords="offset points",
                    ha="right" if end else "left",
                    fontsize=8.5,
                    color=colors[server],
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
                )
    left.set(xscale="log", title="single texts of 29 tokens, texts a second", xlabel="requests at once")
    left.set_xticks(list(SINGLES), [str(concurrency) for concurrency in SINGLES])
    left.minorticks_off()
    left.set_ylim(0)
    left.legend(loc="lower right")
    shown = {
        "engine, all texts known": (ENGINE_BULK, GREY),
        "engine, texts in flight": (ENGINE_IN_FLIGHT, GREY),
        **{server: (bulk_of(server), colors[server]) for server in servers},
    }
    values = [texts_per_s[name]["values"] for name, _ in shown.values()]
    bars(right, list(shown), values, [color for _, color in shown.values()])
    right.set(title="requests of 32 passages, texts a second")
    save(figure, "closed-loop")


if __name__ == "__main__":
    main()
