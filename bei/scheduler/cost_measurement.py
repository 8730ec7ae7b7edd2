"""Measures an engine on this machine: what its steps cost, and how many streams it should have. Kept by ``cost_cache``.

``costs_for`` and ``engine_for`` are what a server calls at its start; ``bei tune`` measures anew. The form of the model
is in ``bei.scheduler.cost_model``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from bei.artifact.cost_cache import CostCache
from bei.artifact.manifest import ENGINE_DIR, Artifact
from bei.config.settings import ServeConfig
from bei.core import Engine, EngineInfo, Limits, PackedBatch
from bei.errors import ConfigError
from bei.scheduler.cost_model import CostModel, Sample, fit
from bei.utils.cpu_count import usable_cores

log = logging.getLogger(__name__)

MEASURE_BUDGET_S = 25.0

# Part of every key: measurements of another method are not taken over.
_METHOD = 2

# The distributions whose version decides how fast an engine is. A plan runs with the version that made it, no other.
_LIBRARIES = {"cpu": "openvino", "cuda": "torch", "cuda-twin": "torch", "trtllm": "tensorrt_llm"}

# The grid: lengths and totals as texts have them. Powers of two alone would flatter the engine: matrix kernels like
# aligned sizes, which traffic rarely has (docs/decisions.md, "What a step costs").
_LENGTHS = (7, 12, 20, 32, 45, 64, 84, 110, 160, 250, 350, 512, 900, 1700, 3500, 7000, 14000, 28000)
_TOTALS = (1, 30, 60, 120, 250, 500, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000)
_COARSE = 4
# Steps around sizes at which a tile may end, each and one of 8 tokens more: how much longer that takes tells how large
# tiles are. The lengths and totals above end close below such sizes, where steps are at their best.
_TILE_ENDS = (128, 192, 256, 272, 288, 320, 384, 512, 640, 1024, 2048)
_TILE_LENGTH = 32
# Shapes measured whatever the budget, else there would be nothing to fit.
_MIN_SHAPES = 6
# Each shape runs once to compile its kernels, then once a pass. Passes end when they find little that is faster: this
# share of the shapes, by more than this much.
_MAX_PASSES = 8
_MIN_PASSES = 3
_IMPROVED_SHAPES = 0.25
_IMPROVEMENT = 0.02
# The first pass, which also compiles, may take this share of the budget; the others repeat what it reached.
_FIRST_PASS = 0.5

# More streams answer a single text later, and their threads share cores with the tokenizer's: they must be worth it.
_WORTHWHILE = 1.1
_STREAM_ROUNDS = 5
_STREAM_LENGTHS = (12, 24, 40, 64, 96, 160, 256)

Progress = Callable[[int, int], None]
Clock = Callable[[], float]
MakeEngine = Callable[[int | None], Engine]


def measure(
    engine: Engine,
    budget_s: float = MEASURE_BUDGET_S,
    on_progress: Progress | None = None,
    *,
    vocab_size: int = 1,
    clock: Clock = time.perf_counter,
) -> CostModel:
    """Fit a model to the times of ``measured_steps``. Raises EngineError."""
    return fit(measured_steps(engine, budget_s, on_progress, vocab_size=vocab_size, clock=clock), engine.info.limits)


def measured_steps(
    engine: Engine,
    budget_s: float = MEASURE_BUDGET_S,
    on_progress: Progress | None = None,
    *,
    vocab_size: int = 1,
    clock: Clock = time.perf_counter,
) -> list[Sample]:
    """Run ``steps_to_measure(engine.info.limits)``.

    Every shape is run once to compile its kernels, then several times, in turn with all others, so that a disturbance
    of a second spoils no shape; its shortest time counts. All streams run the same shape at once. Shapes that would
    not fit into ``budget_s`` are left out, the largest ones therefore. ``on_progress(done, total)`` counts runs.
    Raises EngineError.
    """
    shapes = steps_to_measure(engine.info.limits)
    batches = [_batch(lengths, vocab_size) for lengths in shapes]
    report = on_progress or _ignore
    total, done = len(shapes) * (1 + _MIN_PASSES), 0
    started = clock()
    best: dict[int, float] = {}  # by shape
    seconds_per_size = 0.0
    with _Streams(engine, clock) as streams:
        for index, batch in enumerate(batches):
            expected = 2 * seconds_per_size * _size(shapes[index])
            if len(best) >= _MIN_SHAPES and clock() - started + expected > _FIRST_PASS * budget_s:
                continue
            streams.run(batch)
            best[index] = streams.run(batch)
            seconds_per_size = best[index] / _size(shapes[index])
            done += 2
            report(done, total)
        for index_of_pass in range(1, _MAX_PASSES):
            num_improved = 0
            for index, previous in best.items():
                if clock() - started + previous > budget_s:
                    continue
                best[index] = min(previous, streams.run(batches[index]))
                num_improved += best[index] < (1 - _IMPROVEMENT) * previous
                done = min(done + 1, total)
                report(done, total)
            if index_of_pass + 1 >= _MIN_PASSES and num_improved < _IMPROVED_SHAPES * len(best):
                break
    report(total, total)
    return [
        Sample(sum(lengths), len(lengths), max(lengths), seconds)
        for lengths, seconds in ((shapes[index], seconds) for index, seconds in best.items())
    ]


def steps_to_measure(limits: Limits) -> list[list[int]]:
    """Lengths of the sequences of each batch to measure, in order: every fourth of the grid, the largest among them,
    those that tell the size of a tile, then the others. So what a slow engine has time for covers all sizes."""
    shapes = grid(limits)
    coarse = shapes[::-1][::_COARSE][::-1]
    ordered = [*coarse, *_around_tile_ends(limits), *shapes]
    return [list(shape) for shape in dict.fromkeys(map(tuple, ordered))]


def _size(lengths: Seq[int]) -> int:
    """About what a batch costs: its slots and its tokens."""
    return len(lengths) * max(lengths) + sum(lengths)


def _ignore(done: int, total: int) -> None:
    """Progress for nobody."""


def grid(limits: Limits) -> list[list[int]]:
    """Lengths of the sequences of each batch to measure, the cheapest first; all within ``limits``.

    Half of the batches hold equal sequences, half a long one among shorter ones: only those tell the cost of a token
    from the cost of a slot.
    """
    lengths = sorted({*(length for length in _LENGTHS if length <= limits.max_seq_len), limits.max_seq_len})
    totals = sorted({*(total for total in _TOTALS if total <= limits.max_num_tokens), limits.max_num_tokens})
    found: dict[tuple[int, ...], None] = {}
    for column, longest in enumerate(lengths):
        for row, total in enumerate(totals):
            if (row + column) % 2 and total not in (totals[0], totals[-1]):
                continue  # a chequered grid tells as much in half the time
            for pattern in ((longest,), _ragged(longest)):
                batch = _filled(pattern, total, limits)
                found.setdefault(tuple(batch))
    return sorted(map(list, found), key=lambda batch: (_size(batch), batch))


def _around_tile_ends(limits: Limits) -> Iterator[list[int]]:
    """Pairs of batches that differ by 8 tokens, in as many sequences."""
    for end in _TILE_ENDS:
        count = -(-(end + 8) // min(_TILE_LENGTH, limits.max_seq_len))
        if end + 8 <= limits.max_num_tokens and count <= min(limits.max_batch_size, end):
            for total in (end, end + 8):
                yield [total // count + (place < total % count) for place in range(count)]


def _ragged(longest: int) -> tuple[int, ...]:
    """One of the longest and some much shorter, again and again: 45 % of the slots are filled."""
    return tuple(max(1, round(longest * share)) for share in (1.0, 0.5, 0.25, 0.25, 0.25))


def _filled(pattern: Seq[int], total: int, limits: Limits) -> list[int]:
    """``pattern`` repeated until ``total`` tokens or the most sequences are reached, at least one sequence."""
    batch, tokens = [pattern[0]], pattern[0]
    while len(batch) < limits.max_batch_size:
        length = pattern[len(batch) % len(pattern)]
        if tokens + length > min(max(total, pattern[0]), limits.max_num_tokens):
            break
        batch.append(length)
        tokens += length
    return batch


def _batch(lengths: Seq[int], vocab_size: int) -> PackedBatch:
    """Sequences of these lengths. Their tokens vary: experts are chosen by token."""
    cu_seqlens = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    ids = np.random.default_rng(0).integers(0, vocab_size, int(cu_seqlens[-1]))
    return PackedBatch(ids.astype(np.int32), cu_seqlens)


class _Streams:
    """Runs a batch on every stream of an engine at the same time. A context manager: ends its threads."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self._count = engine.info.num_streams
        self._pool = ThreadPoolExecutor(self._count, "bei-tuning") if self._count > 1 else None

    def __enter__(self) -> _Streams:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def run(self, batch: PackedBatch) -> float:
        """Seconds of one step, mean over the streams."""
        if self._pool is None:
            return self._timed(batch)
        return sum(self._pool.map(self._timed, [batch] * self._count)) / self._count

    def _timed(self, batch: PackedBatch) -> float:
        started = self._clock()
        self._engine.run(batch)
        return self._clock() - started


@dataclass(frozen=True)
class StreamChoice:
    """The chosen number of streams of an engine, and its tokens per second with each number that was tried."""

    num_streams: int
    tokens_per_s: Mapping[int, float]


def choose_streams(
    make_engine: MakeEngine, candidates: Seq[int], *, vocab_size: int = 1, clock: Clock = time.perf_counter
) -> StreamChoice:
    """Try engines of ``candidates`` streams, ascending, one after the other, on steps of mixed lengths.

    Every stream is kept busy; the fastest of five rounds counts. More streams are chosen only if they give 10 % more
    tokens per second than fewer. Raises EngineError.
    """
    rates: dict[int, float] = {}
    for count in candidates:
        engine = make_engine(count)
        try:
            rates[count] = _busy_rate(engine, vocab_size, clock)
        finally:
            engine.close()
    chosen = min(rates)
    for count in sorted(rates):
        if rates[count] >= _WORTHWHILE * rates[chosen]:
            chosen = count
    return StreamChoice(chosen, rates)


def _busy_rate(engine: Engine, vocab_size: int, clock: Clock) -> float:
    """Tokens per second with every stream busy."""
    limits = engine.info.limits
    total = min(limits.max_num_tokens, 1024)
    lengths = [length for length in _STREAM_LENGTHS if length <= limits.max_seq_len] or [limits.max_seq_len]
    batches = [_batch(_filled((length,), total, limits), vocab_size) for length in lengths] * 2
    tokens = sum(batch.num_tokens for batch in batches)
    rates = []
    for _ in range(_STREAM_ROUNDS + 1):  # the first one compiles
        waiting = iter(batches)
        lock = threading.Lock()

        def serve(waiting: Iterator[PackedBatch] = waiting, lock: threading.Lock = lock) -> None:
            while True:
                with lock:
                    batch = next(waiting, None)
                if batch is None:
                    return
                engine.run(batch)

        started = clock()
        with ThreadPoolExecutor(engine.info.num_streams, "bei-tuning") as pool:
            for future in [pool.submit(serve) for _ in range(engine.info.num_streams)]:
                future.result()
        rates.append(tokens / (clock() - started))
    return max(rates[1:])


def stream_candidates(num_threads: int) -> list[int]:
    """Numbers of streams worth trying with so many threads: powers of two, a thread each at least, eight at most."""
    return [count for count in (1, 2, 4, 8) if count <= max(1, num_threads)]


def engine_for(artifact: Artifact, config: ServeConfig, make_engine: MakeEngine) -> Engine:
    """The engine with as many streams as ``config`` asks for; 0: as many as are fastest, measured once and kept.

    ``make_engine(num_streams)`` loads it; None: as many as the target recommends. Only engines for CPUs are tried with
    several streams. Raises EngineError, and ConfigError where measuring is forbidden and nothing is known.
    """
    if config.engine_streams != 0:
        return make_engine(config.engine_streams)
    engine = make_engine(None)
    candidates = stream_candidates(_num_threads(config))
    if engine.info.target != "cpu" or len(candidates) == 1:
        return engine
    cache, key = CostCache(Path(config.cache_dir)), _key(artifact, engine.info, config) | {"streams": candidates}
    found = None if config.tune == "force" else cache.read(_streams_name(artifact), key)
    if found == 1:
        return engine
    engine.close()
    if found in candidates:
        return make_engine(found)
    if config.tune == "off":
        raise ConfigError(
            "engine_streams 0 means that streams are chosen by measuring, which tune off forbids: "
            "give a number of streams, or let it measure."
        )
    return make_engine(measure_streams(artifact, engine.info, config, make_engine).num_streams)


def measure_streams(artifact: Artifact, info: EngineInfo, config: ServeConfig, make_engine: MakeEngine) -> StreamChoice:
    """Choose the number of streams by measuring, and keep it for ``engine_for``. Raises EngineError."""
    name, candidates = artifact.manifest.name, stream_candidates(_num_threads(config))
    log.info("%s: trying engines of %s streams", name, ", ".join(map(str, candidates)))
    choice = choose_streams(make_engine, candidates, vocab_size=artifact.manifest.spec.vocab_size)
    key = _key(artifact, info, config) | {"streams": candidates}
    CostCache(Path(config.cache_dir)).write(_streams_name(artifact), key, choice.num_streams)
    rates = ", ".join(f"{count}: {rate:,.0f} tokens/s" for count, rate in choice.tokens_per_s.items())
    log.info("%s: streams chosen: %d (%s)", name, choice.num_streams, rates)
    return choice


def costs_for(
    artifact: Artifact, engine: Engine, config: ServeConfig, on_progress: Progress | None = None
) -> CostModel:
    """The cost model of ``engine``: from the cache, else measured and kept (``config.tune`` auto).

    ``force`` measures in any case; ``off`` assumes, and leaves the rest to ``CostModel.observe``. Raises EngineError.
    """
    limits, name = engine.info.limits, artifact.manifest.name
    if config.tune == "off":
        return CostModel.assumed(limits)
    cache, key = CostCache(Path(config.cache_dir)), _key(artifact, engine.info, config)
    if config.tune == "auto" and (found := _cached_model(cache, name, key, limits, "measuring anew")) is not None:
        log.info("%s: costs of steps read from %s", name, cache.path(name, key))
        return found
    log.info(
        "%s: measuring the costs of steps, once, about %.0f s at most (--tune off: not at all)", name, MEASURE_BUDGET_S
    )
    started = time.monotonic()
    model = measure(engine, on_progress=on_progress or _logged(name), vocab_size=artifact.manifest.spec.vocab_size)
    path = cache.write(name, key, model.to_json())
    log.info(
        "%s: costs of steps measured in %.1f s%s", name, time.monotonic() - started, f", kept in {path}" if path else ""
    )
    return model


def costs_while_serving(artifact: Artifact, engine: Engine, config: ServeConfig, former: CostModel) -> CostModel:
    """The costs of an engine that takes the place of another one: from the cache, else what is known of the former.

    Nothing is measured: that would take the device from requests, and find a device that is busy with them.
    """
    limits, name = engine.info.limits, artifact.manifest.name
    if config.tune == "auto":
        cache, key = CostCache(Path(config.cache_dir)), _key(artifact, engine.info, config)
        if (found := _cached_model(cache, name, key, limits, "the costs of the former engine are used")) is not None:
            log.info("%s: costs of steps read from %s", name, cache.path(name, key))
            return found
    return former.continued(limits)


def cache_path(artifact: Artifact, engine: Engine, config: ServeConfig) -> Path:
    """The file in which ``costs_for`` keeps its model."""
    return CostCache(Path(config.cache_dir)).path(artifact.manifest.name, _key(artifact, engine.info, config))


def _cached_model(
    cache: CostCache, name: str, key: Mapping[str, Any], limits: Limits, otherwise: str
) -> CostModel | None:
    """The model in the cache. ``otherwise``: what the caller does without one, for the log."""
    data = cache.read(name, key)
    if data is None:
        return None
    try:
        model = CostModel.from_json(data)
        if model.limits != limits or not model.is_measured:
            raise ValueError("it was measured with other limits, or not at all")
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        log.warning("%s holds no cost model (%s): %s", cache.path(name, key), error, otherwise)
        return None
    return model


def _logged(name: str) -> Progress:
    """Progress for the log, in quarters."""
    reached = 0

    def report(done: int, total: int) -> None:
        nonlocal reached
        quarter = 4 * done // total
        if reached < quarter < 4:
            log.info("%s: costs of steps %d %% measured", name, 25 * quarter)
        reached = max(reached, quarter)

    return report


def _streams_name(artifact: Artifact) -> str:
    return f"{artifact.manifest.name}-streams"


def _num_threads(config: ServeConfig) -> int:
    return config.engine_threads or usable_cores()


def _key(artifact: Artifact, info: EngineInfo, config: ServeConfig) -> dict[str, Any]:
    """All that a measurement depends on, plain data."""
    library = _LIBRARIES.get(info.target)
    chosen = {name: value for name, value in config.engine_options.items() if name != "num_threads"}
    return {
        "method": _METHOD,
        "artifact": artifact.manifest.digest,
        "device": info.device,
        "cores": usable_cores(),
        "threads": _num_threads(config),
        "streams": info.num_streams,
        "library": f"{library} {_version(library)}" if library else info.target,
        **({"options": chosen} if chosen else {}),
        **({} if artifact.folder == ENGINE_DIR else {"engine": artifact.folder}),
    }


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"
