"""HTTP against the engine alone, on the same texts and the same cores.

    python -m benchmarks.http [--repetitions 7] [--engine-streams 1]

Requests of 32 texts at concurrency 4, single texts at concurrency 64, each against the engine alone on the same texts;
and what HTTP adds to one text of one client. The engine alone runs batches cut beforehand by the server's policy, once
from all texts at once (which no server can know) and, for the first, once from the 128 that are in flight.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from bei.artifact.manifest import TOKENIZER, Artifact
from bei.core import Engine
from bei.engine.load import load_engine
from bei.scheduler.cost_measurement import measure as measure_costs
from bei.tokenizer.encoder import TextEncoder
from benchmarks.common import (
    alternate,
    batches_in_flight,
    mixed_lengths,
    random_texts,
    ratio,
    sorted_batches,
    write,
)
from benchmarks.engine_alone import engine_latency_ms, engine_rate
from benchmarks.load import closed_loop, embeddings_body
from benchmarks.models import built, minilm_folder
from benchmarks.server import serving

_BULK_TEXTS = 2048  # mixed lengths, in requests of 32
_SINGLE_TEXTS = 2048  # about 29 tokens
_LATENCY_TEXTS = 200


def main() -> None:
    """Measure and write ``results/http-<streams>-streams.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--engine-streams", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        artifact = built(minilm_folder(), Path(scratch))
        streams = options.engine_streams
        engine = load_engine(artifact.engine_dir, artifact.manifest, {"num_streams": streams})
        engine.warmup()
        with serving(artifact.path, "--engine-streams", str(streams)) as (port, _):
            measure(artifact, engine, port, options.repetitions, streams)


def measure(artifact: Artifact, engine: Engine, port: int, repetitions: int, streams: int) -> None:
    """Run all sides in turn."""
    limit = artifact.manifest.max_seq_len
    encoder = TextEncoder(artifact.path / TOKENIZER, limit)
    tokenizer = Tokenizer.from_file(str(artifact.path / TOKENIZER))
    bulk = random_texts(tokenizer, mixed_lengths(_BULK_TEXTS, limit, seed=1), seed=1)
    single = random_texts(tokenizer, [29] * _SINGLE_TEXTS, seed=2)
    alone = random_texts(tokenizer, [29] * _LATENCY_TEXTS, seed=3)
    bulk_bodies = [embeddings_body(bulk[start : start + 32]) for start in range(0, len(bulk), 32)]
    limits = engine.info.limits
    bulk_encodings = encoder.encode(bulk)
    costs = measure_costs(engine)
    bulk_batches = sorted_batches(bulk_encodings, limits, costs)
    bulk_in_flight = batches_in_flight(bulk_encodings, limits, costs, request_size=32, concurrency=4)
    single_batches = sorted_batches(encoder.encode(single), limits, costs)
    single_bodies = [embeddings_body(text) for text in single]
    rates: dict[str, Callable[[], float]] = {
        "engine alone, bulk, all texts known": partial(engine_rate, engine, bulk_batches, len(bulk)),
        "engine alone, bulk, same texts in flight": partial(engine_rate, engine, bulk_in_flight, len(bulk)),
        "HTTP, bulk": partial(_http_rate, port, 4, bulk_bodies, len(bulk)),
        "engine alone, single": partial(engine_rate, engine, single_batches, len(single)),
        "HTTP, single": partial(_http_rate, port, 64, single_bodies, len(single)),
    }
    latencies: dict[str, Callable[[], float]] = {
        "engine call": partial(engine_latency_ms, engine, encoder, alone),
        "HTTP": partial(_http_latency_ms, port, [embeddings_body(text) for text in alone]),
    }
    texts_per_s = alternate(rates, repetitions)
    ms = alternate(latencies, repetitions)
    write(
        f"http-{streams}-streams",
        {
            "bulk, HTTP / engine, all texts known": ratio(
                texts_per_s, "HTTP, bulk", "engine alone, bulk, all texts known"
            ),
            "bulk, HTTP / engine, same texts in flight": ratio(
                texts_per_s, "HTTP, bulk", "engine alone, bulk, same texts in flight"
            ),
            "single, HTTP / engine": ratio(texts_per_s, "HTTP, single", "engine alone, single"),
            "HTTP adds, ms": round(ms["HTTP"]["median"] - ms["engine call"]["median"], 3),
            "texts/s": texts_per_s,
            "ms, one text of one client": ms,
        },
    )


def _http_rate(port: int, concurrency: int, bodies: list[str], num_texts: int) -> float:
    return num_texts / closed_loop(port, concurrency, bodies)[0].elapsed_s


def _http_latency_ms(port: int, bodies: list[str]) -> float:
    return float(np.median(closed_loop(port, 1, bodies)[0].latencies_s)) * 1e3


if __name__ == "__main__":
    main()
