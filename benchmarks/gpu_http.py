"""``bei serve`` in front of an engine of target cuda, beside that engine alone with the same texts.

On a CPU (a dry run) the target is ``cuda-twin``, and what steps cost is assumed: measuring it takes 25 seconds.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu_built import random_artifact
from benchmarks.gpu_peers import random_texts, require
from benchmarks.gpu_record import Found
from benchmarks.gpu_shapes import Shape

if TYPE_CHECKING:
    from bei.artifact.manifest import Artifact

_NEEDED = ("httptools", "msgspec", "orjson", "prometheus_client", "psutil", "starlette", "tokenizers", "uvicorn")
_KINDS = {"requests of 16 texts": (16, 16), "single texts": (1, 128)}  # texts a request, requests at a time
_FRONT_ENDS = (1, 4)
_RUNS = 3


def over_http(shape: Shape, device: torch.device, lengths: list[int]) -> Found:
    """Texts a second of one process and of four front ends, and what share of the engine's they are.

    ``ms``: of all texts, in requests of 16, by four front ends.
    """
    require(*_NEEDED)
    with tempfile.TemporaryDirectory() as folder:
        made = random_artifact(shape, device, Path(folder))
        texts = random_texts(lengths, made.num_words)
        measures = device.type == "cuda"
        alone = _alone(made.artifact, texts, measures=measures)
        rates = {
            f"{kind}, {count} front end{'s' * (count > 1)}": rate
            for count in _FRONT_ENDS
            for kind, rate in _served(made.artifact, texts, count, Path(folder), measures=measures).items()
        }
    best = rates[f"requests of 16 texts, {_FRONT_ENDS[-1]} front ends"]
    return {
        "ms": round(1000 * len(texts) / best, 3),
        "texts": len(texts),
        "engine alone, texts_per_s": round(alone, 1),
        "texts_per_s": {kind: round(rate, 1) for kind, rate in rates.items()},
        "share of the engine alone": {kind: round(rate / alone, 3) for kind, rate in rates.items()},
    }


def _alone(artifact: Artifact, texts: list[str], *, measures: bool) -> float:
    """Texts a second of the engine, all its streams busy with batches that the server's policy cuts from all texts."""
    from bei.artifact.manifest import TOKENIZER
    from bei.engine.load import load_engine
    from bei.scheduler.cost_measurement import measure
    from bei.scheduler.cost_model import CostModel
    from bei.tokenizer.encoder import TextEncoder
    from benchmarks.common import sorted_batches
    from benchmarks.engine_alone import engine_rate

    engine = load_engine(artifact.engine_dir, artifact.manifest)
    try:
        engine.warmup()
        encodings = TextEncoder(artifact.path / TOKENIZER, artifact.manifest.max_seq_len).encode(texts)
        limits, vocab_size = engine.info.limits, artifact.manifest.spec.vocab_size
        costs = measure(engine, vocab_size=vocab_size) if measures else CostModel.assumed(limits)
        batches = sorted_batches(encodings, limits, costs)
        engine_rate(engine, batches, len(texts))
        return statistics.median(engine_rate(engine, batches, len(texts)) for _ in range(_RUNS))
    finally:
        engine.close()


def _served(artifact: Artifact, texts: list[str], front_ends: int, home: Path, *, measures: bool) -> dict[str, float]:
    """Texts a second of closed loops, by their kind: medians of several, behind one that is not counted."""
    from benchmarks.load import closed_loop, embeddings_body
    from benchmarks.server import serving

    rates = {}
    try:
        flags = "--http-workers", str(front_ends), "--tune", "auto" if measures else "off"
        with serving(artifact.path, *flags, home=home) as server:
            for kind, (size, concurrency) in _KINDS.items():
                bodies = [embeddings_body(texts[start : start + size]) for start in range(0, len(texts), size)]
                loops = [closed_loop(server.port, concurrency, bodies)[0] for _ in range(1 + _RUNS)]
                rates[kind] = statistics.median(len(texts) / loop.elapsed_s for loop in loops[1:])
    except SystemExit as error:  # as programs end: here the measurements behind this one go on
        raise RuntimeError(str(error)) from error
    return rates
