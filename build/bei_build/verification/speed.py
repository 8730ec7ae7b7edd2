"""Speed of a quantized engine on the machine that builds it, against the precision that it replaces there."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import numpy as np

from bei.artifact.manifest import ENGINE_DIR, Manifest
from bei.core import Encoding, Engine, PackedBatch
from bei_build import memory
from bei_build.job import Job
from bei_build.progress import Progress
from bei_build.targets.base import Numerics

_NUM_TOKENS = 1024
_LENGTH = 64
_WARM_UP = 2
_ROUNDS = 7


def compare_speed(job: Job, manifest: Manifest, progress: Progress) -> None:
    """Note where the job's engine is slower here than one in the precision that ``auto`` chooses.

    Both run a batch of texts of 64 tokens in turn. Nothing of it is kept. Skipped where the memory for a second engine
    is missing. Raises the errors of compilers and engines.
    """
    compiler, spec = job.compiler, job.checkpoint.spec
    usual = compiler.resolve_precision("auto")
    available = memory.available_bytes()
    if usual == job.precision or (available is not None and 12 * spec.num_parameters > available):
        return
    with progress.step(f"Compare speed with {usual}") as step, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=job.root)))
        needs = compiler.compile(spec, job.weights, Numerics(usual), job.limits, folder, step.say)
        described = msgspec.structs.replace(job.describe(needs), precision=usual)
        places = ((job.root / ENGINE_DIR, manifest), (folder, described))
        engines = [stack.enter_context(closing(job.open_engine(place, it))) for place, it in places]
        ratio = _ratio(engines, _batch(job))
        step.details.append(f"{ratio:.2f} times as fast")
    if ratio < 1:
        progress.note(
            f"{job.precision} is slower than {usual} on this machine: {ratio:.2f} times as fast in batches of "
            f"{_NUM_TOKENS:,} tokens. Build with --precision {usual}, unless a smaller artifact is wanted."
        )


def _batch(job: Job) -> PackedBatch:
    limits, vocab_size = job.limits, job.checkpoint.spec.embeddings.vocab_size
    length = min(_LENGTH, limits.max_seq_len)
    count = max(1, min(_NUM_TOKENS, limits.max_num_tokens) // length)
    random = np.random.default_rng(0)
    ids = random.integers(0, vocab_size, (min(count, limits.max_batch_size), length)).astype(np.int32)
    return PackedBatch.from_encodings([Encoding(row) for row in ids])


def _ratio(engines: Sequence[Engine], batch: PackedBatch) -> float:
    """How many times as fast the first engine is as the second: medians of runs in turn."""
    times: list[list[float]] = [[] for _ in engines]
    for number in range(_WARM_UP + _ROUNDS):
        for engine, found in zip(engines, times, strict=True):
            started = time.perf_counter()
            engine.run(batch)
            if number >= _WARM_UP:
                found.append(time.perf_counter() - started)
    mine, usual = map(statistics.median, times)
    return usual / mine
