"""The engine without a server: batches as the server's policy would cut them, and how fast they run."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial

import numpy as np

from bei.artifact.manifest import TOKENIZER, Artifact
from bei.core import Encoding, Engine, Limits, PackedBatch
from bei.engine.load import load_engine
from bei.engine.openvino import cpu_capabilities
from bei.port import Lane
from bei.scheduler.cost_measurement import measure as measure_costs
from bei.scheduler.next_batch import LaneView, QueueKey, StepCosts, next_batch, step_bounds
from bei.tokenizer.encoder import TextEncoder
from benchmarks.harness.rounds import seconds


def precisions(*names: str) -> list[str]:
    """Those of ``names`` in which this CPU computes: bf16 may be missing."""
    return [name for name in names if name != "bf16" or "BF16" in cpu_capabilities()]


@contextmanager
def loaded(artifact: Artifact, options: Mapping[str, int] | None = None) -> Iterator[Engine]:
    with closing(load_engine(artifact.engine_dir, artifact.manifest, options)) as engine:
        engine.warmup()
        yield engine


def encoder_of(artifact: Artifact) -> TextEncoder:
    return TextEncoder(artifact.path / TOKENIZER, artifact.manifest.max_seq_len)


def texts_per_s(engine: Engine, batches: Sequence[PackedBatch], num_texts: int) -> float:
    """With every stream of the engine busy."""
    with ThreadPoolExecutor(engine.info.num_streams) as streams:
        return num_texts / seconds(lambda: list(streams.map(engine.run, batches)))


def tokens_per_s(engine: Engine, batches: Sequence[PackedBatch]) -> float:
    elapsed = seconds(lambda: [engine.run(batch) for batch in batches])
    return sum(batch.num_tokens for batch in batches) / elapsed


def latency_ms(engine: Engine, encodings: Sequence[Encoding]) -> float:
    """The median of single texts, one after the other."""
    batches = [PackedBatch.from_encodings([encoding]) for encoding in encodings]
    return statistics.median(seconds(partial(engine.run, batch)) for batch in batches) * 1e3


def random_encodings(lengths: list[int], vocab_size: int) -> list[Encoding]:
    """Distinct sequences of the given lengths; which tokens they hold does not change the work."""
    rng = np.random.default_rng(0)
    return [Encoding(rng.integers(0, vocab_size, length).astype(np.int32)) for length in lengths]


def sorted_batches(encodings: list[Encoding], limits: Limits, costs: StepCosts) -> list[PackedBatch]:
    """All of ``encodings`` in the batches that the server's policy would cut from a full queue."""
    order = sorted(range(len(encodings)), key=lambda i: (encodings[i].num_tokens, i))
    keys = [QueueKey(encodings[i].num_tokens, i) for i in order]
    batches = []
    while keys:
        taken = _cut(keys, len(keys) - 1, limits, costs)
        batches.append(PackedBatch.from_encodings([encodings[key.arrival] for key in taken]))
    return batches


def mixed_batches(engine: Engine, artifact: Artifact, lengths: list[int]) -> list[PackedBatch]:
    """The batches of a full queue of sequences of these lengths, as ``sorted_batches`` cuts them for ``engine``."""
    encodings = random_encodings(lengths, artifact.manifest.spec.vocab_size)
    return sorted_batches(encodings, engine.info.limits, measure_costs(engine))


def batches_in_flight(
    encodings: list[Encoding], limits: Limits, costs: StepCosts, request_size: int, concurrency: int
) -> list[PackedBatch]:
    """The batches that the server's policy cuts when it knows only the requests in flight. Each request that ends is
    followed by another, which comes when the next batch has been cut. The longest sequence of a request counts as its
    oldest, as in the server."""
    requests = [encodings[start : start + request_size] for start in range(0, len(encodings), request_size)]
    remaining = [len(request) for request in requests]
    waiting = iter(enumerate(requests))
    arrived: list[tuple[int, Encoding]] = []  # the request of each, and itself
    keys: list[QueueKey] = []

    def follow() -> None:
        for number, request in itertools.islice(waiting, 1):
            order = sorted(request, key=lambda encoding: encoding.num_tokens, reverse=True)
            keys.extend(QueueKey(encoding.num_tokens, len(arrived) + i) for i, encoding in enumerate(order))
            arrived.extend((number, encoding) for encoding in order)
        keys.sort()

    def taken() -> list[tuple[int, Encoding]]:
        oldest = min(range(len(keys)), key=lambda position: keys[position].arrival)
        return [arrived[key.arrival] for key in _cut(keys, oldest, limits, costs)]

    for _ in range(concurrency):
        follow()
    batches, unfinished = [], deque[list[tuple[int, Encoding]]]()
    while keys or unfinished:
        if keys:
            unfinished.append(taken())
            batches.append(PackedBatch.from_encodings([encoding for _, encoding in unfinished[-1]]))
        if not keys or len(unfinished) > 1:
            for number, _ in unfinished.popleft():
                remaining[number] -= 1
                if not remaining[number]:
                    follow()
    return batches


def _cut(keys: list[QueueKey], oldest: int, limits: Limits, costs: StepCosts) -> list[QueueKey]:
    """Take out of ``keys`` (sorted) what the server's policy would run first, were all of it bulk work."""
    lanes: dict[Lane, LaneView] = {"interactive": LaneView([], 0), "bulk": LaneView(keys, oldest)}
    bounds = step_bounds(lanes, "bulk", costs, 0.0, interactive_expected=False)
    taken: list[QueueKey] = []
    for part in next_batch(lanes, limits, costs, bounds)["bulk"]:
        taken += keys[part]
        del keys[part]
    return taken
