"""``bei serve`` in front of an engine of target cuda, beside that engine alone with the same texts.

On a CPU (a dry run) the target is ``cuda-twin``, and what steps cost is assumed: measuring it takes 25 seconds.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu.built import random_artifact
from benchmarks.gpu.peers import random_texts, require
from benchmarks.gpu.record import Found
from benchmarks.gpu.shapes import Shape

if TYPE_CHECKING:
    from bei.artifact.manifest import Artifact

_NEEDED = ("fastapi", "httptools", "msgspec", "orjson", "prometheus_client", "psutil", "tokenizers", "uvicorn")
_KINDS = {"requests of 16 texts": (16, 16), "single texts": (1, 128)}  # texts a request, requests at a time
_FRONT_ENDS = (1, 4)
_RUNS = 3


def over_http(shape: Shape, device: torch.device, lengths: list[int]) -> Found:
    """Texts a second of one process and of four front ends, and their shares of the engine's.

    ``ms``: of all texts, in requests of 16, by four front ends.
    """
    require(*_NEEDED)
    from benchmarks.harness.load import texts_per_s
    from benchmarks.harness.servers import serving

    rates: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        made = random_artifact(shape, device, Path(folder))
        texts = random_texts(lengths, made.num_words)
        measures = device.type == "cuda"
        alone = _alone(made.artifact, texts, measures=measures)
        for count in _FRONT_ENDS:
            flags = "--http-workers", str(count), "--tune", "auto" if measures else "off"
            try:
                with serving(made.artifact.path, *flags, home=Path(folder)) as server:
                    for kind, (size, concurrency) in _KINDS.items():
                        found = [texts_per_s(server.port, concurrency, texts, size) for _ in range(1 + _RUNS)]
                        rates[f"{kind}, {count} front end{'s' * (count > 1)}"] = statistics.median(found[1:])
            except SystemExit as error:  # as programs end: here the measurements behind this one go on
                raise RuntimeError(str(error)) from error
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
    from bei.scheduler.cost_measurement import measure
    from bei.scheduler.cost_model import CostModel
    from benchmarks.harness.engines import encoder_of, loaded, sorted_batches, texts_per_s

    with loaded(artifact) as engine:
        limits, vocab_size = engine.info.limits, artifact.manifest.spec.vocab_size
        costs = measure(engine, vocab_size=vocab_size) if measures else CostModel.assumed(limits)
        batches = sorted_batches(encoder_of(artifact).encode(texts), limits, costs)
        return statistics.median([texts_per_s(engine, batches, len(texts)) for _ in range(1 + _RUNS)][1:])
