"""Throughput of closed loops against the engine alone, on prose the servers have not met; HTTP's part of one request.

    python -m benchmarks.closed_loop [--before CHECKOUT] [--repetitions 11] [--scale 0.5] [--cold] [--bulk]

Single texts (about 29 tokens) at concurrency 1, 16, 64 and 256, and requests of 32 passages at concurrency 4. In each
repetition the engine alone runs the texts of concurrency 64 and of the requests of 32, tokenized and cut into batches
beforehand, from all texts at once and, for the requests, from the 128 in flight, and single texts one after the other.
All servers get the same texts. ``--cold`` restarts the servers before every repetition, so that they meet every word
anew. ``--bulk`` leaves the single texts out, for more repetitions of requests in a time, and writes
``closed-loop-bulk.json``.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bei.artifact.manifest import Artifact
from bei.core import Engine
from bei.scheduler.cost_measurement import measure as measure_costs
from benchmarks.harness.arguments import parsed
from benchmarks.harness.engines import batches_in_flight, encoder_of, latency_ms, loaded, sorted_batches, texts_per_s
from benchmarks.harness.load import texts_per_s as served_texts_per_s
from benchmarks.harness.models import built, minilm_folder
from benchmarks.harness.record import write
from benchmarks.harness.rounds import alternate, ratio
from benchmarks.harness.servers import NOW, Fleet, UnseenTexts, kinds
from benchmarks.harness.texts import PASSAGES, SHORT, read_prose

# Single texts by concurrency: enough for a second or so of MiniLM on two cores.
SINGLES = {1: 384, 16: 1024, 64: 1536, 256: 2048}
_BULK_TEXTS, _BULK_SIZE, _BULK_CONCURRENCY = 2048, 32, 4
_AS_SINGLE = 64  # the engine alone runs the texts of this concurrency
_BULK = f"requests of {_BULK_SIZE}"
ENGINE_ONE, ENGINE_SINGLE, ENGINE_BULK = (
    f"engine alone, {kind}" for kind in ("one text at a time", "single texts", _BULK)
)
ENGINE_IN_FLIGHT = f"engine alone on the same texts in flight, {_BULK}"


def main() -> None:
    options = parsed(__doc__, repetitions=11, scale=1.0, cold=False, before=Path, bulk=False, serve="", serve_before="")
    with tempfile.TemporaryDirectory() as scratch:
        artifact = built(minilm_folder(), Path(scratch))
        servers = kinds({artifact.path: minilm_folder()}, options, Path(scratch))
        with loaded(artifact) as engine, Fleet(servers, Path(scratch) / "home") as fleet:
            texts = UnseenTexts(read_prose(), fleet)
            rounds = Rounds(artifact, engine, fleet, texts, options.scale, is_cold=options.cold)
            sides = rounds.sides()
            if options.bulk:
                sides = {name: side for name, side in sides.items() if name.endswith(_BULK)}
            rates = alternate(sides, options.repetitions, rounds.prepare)
            described = {"servers": fleet.described(), "texts": texts.described(), "cold": options.cold}
    write("closed-loop-bulk" if options.bulk else "closed-loop", {**summary(rates, list(servers)), **described})


class Rounds:
    """The texts of one repetition at a time, and the measurements on them."""

    def __init__(
        self, artifact: Artifact, engine: Engine, fleet: Fleet, texts: UnseenTexts, scale: float, *, is_cold: bool
    ) -> None:
        self._encoder = encoder_of(artifact)
        self._engine = engine
        self._costs = measure_costs(engine, vocab_size=artifact.manifest.spec.vocab_size)
        self._fleet = fleet
        self._texts = texts
        self._is_cold = is_cold
        self._counts = {concurrency: max(concurrency, round(n * scale)) for concurrency, n in SINGLES.items()}
        self._num_bulk = max(1, round(_BULK_TEXTS * scale / _BULK_SIZE)) * _BULK_SIZE
        self._singles: dict[int, list[str]] = {}
        self._bulk: list[str] = []
        self._alone: dict[str, Callable[[], float]] = {}

    def prepare(self) -> None:
        """Texts for the next repetition, as batches for the engine too."""
        if self._is_cold:
            self._fleet.restart()
        wanted = [(count, SHORT) for count in self._counts.values()]
        *singles, self._bulk = self._texts.take(*wanted, (self._num_bulk, PASSAGES))
        self._singles = dict(zip(self._counts, singles, strict=True))
        engine, limits, encode = self._engine, self._engine.info.limits, self._encoder.encode
        bulk, alone = encode(self._bulk), self._singles[_AS_SINGLE]
        batches = {
            ENGINE_SINGLE: sorted_batches(encode(alone), limits, self._costs),
            ENGINE_BULK: sorted_batches(bulk, limits, self._costs),
            ENGINE_IN_FLIGHT: batches_in_flight(bulk, limits, self._costs, _BULK_SIZE, _BULK_CONCURRENCY),
        }
        self._alone = {
            name: partial(texts_per_s, engine, cut, len(alone if name == ENGINE_SINGLE else bulk))
            for name, cut in batches.items()
        }
        one = encode(self._singles[1])
        self._alone[ENGINE_ONE] = lambda: 1000 / latency_ms(engine, one)

    def sides(self) -> dict[str, Callable[[], float]]:
        """Every measurement, in the order in which a repetition makes them."""
        names = list(self._fleet.kinds)
        return {
            **{single(name, at): partial(self._single, name, at) for at in SINGLES for name in names},
            **{name: partial(self._engine_alone, name) for name in (ENGINE_ONE, ENGINE_SINGLE, ENGINE_BULK)},
            **{bulk_of(name): partial(self._served_bulk, name) for name in names},
            ENGINE_IN_FLIGHT: partial(self._engine_alone, ENGINE_IN_FLIGHT),
        }

    def _single(self, server: str, concurrency: int) -> float:
        return served_texts_per_s(self._fleet[server].port, concurrency, self._singles[concurrency])

    def _served_bulk(self, server: str) -> float:
        return served_texts_per_s(self._fleet[server].port, _BULK_CONCURRENCY, self._bulk, _BULK_SIZE)

    def _engine_alone(self, name: str) -> float:
        return self._alone[name]()


def single(server: str, concurrency: int) -> str:
    return f"{server}, single texts at {concurrency}"


def bulk_of(server: str) -> str:
    return f"{server}, {_BULK}"


def summary(rates: Mapping[str, Mapping[str, Any]], servers: Sequence[str]) -> dict[str, Any]:
    """Shares of the engine alone, steps from one concurrency to the next, and now against before."""
    results: dict[str, Any] = {}
    singles = SINGLES if ENGINE_SINGLE in rates else {}
    for server in servers:
        of_engine = {single(server, c): ratio(rates, single(server, c), ENGINE_SINGLE) for c in singles}
        for engine in (ENGINE_BULK, ENGINE_IN_FLIGHT):
            of_engine[f"{bulk_of(server)} / {engine}"] = ratio(rates, bulk_of(server), engine)
        results[server] = {
            "of the engine alone": of_engine,
            "single texts, at a concurrency / at the one below": {
                f"{more} / {fewer}": ratio(rates, single(server, more), single(server, fewer))
                for fewer, more in itertools.pairwise(singles)
            },
        }
        if singles:
            one_ms = [1000 / rates[name]["median"] for name in (single(server, 1), ENGINE_ONE)]
            results[server]["HTTP adds to one text, ms"] = round(one_ms[0] - one_ms[1], 3)
    for other in servers[1:]:
        pairs = [(single(NOW, c), single(other, c)) for c in singles] + [(bulk_of(NOW), bulk_of(other))]
        results[f"{NOW} / {other}"] = {over: ratio(rates, over, under) for over, under in pairs}
    return {**results, "texts/s": rates}


if __name__ == "__main__":
    main()
