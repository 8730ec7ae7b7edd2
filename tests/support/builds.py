"""Building and running in one call each, as ``bei build`` and the server do; without its output."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from rich.console import Console

from bei.artifact.manifest import Artifact, Manifest
from bei.artifact.store import load
from bei.core import Encoding, Engine, Float32Array, PackedBatch
from bei.engine.load import load_engine
from bei_build.config import BuildConfig
from bei_build.job import OpenEngine
from bei_build.pipeline import build
from bei_build.progress import Progress
from bei_build.reference import held_out
from bei_build.reference.held_out_images import HeldOutImage, held_out_images
from bei_build.tokenizer.token_comparison import Probes, make_probes
from bei_build.verification import images, questions

CALIBRATION_SIZE = 16  # texts, of int8


def open_engine(folder: Path, manifest: Manifest) -> Engine:
    """The runtime's loader, on one thread: these models are too small to share between cores."""
    return load_engine(folder, manifest, {"num_threads": 1})


def silent() -> Progress:
    """Progress that nobody sees."""
    return Progress(Console(file=io.StringIO()))


def build_artifact(
    checkpoint: Path,
    out: Path,
    open_engine: OpenEngine = open_engine,
    *,
    all_texts: bool = False,
    all_tokens: bool = False,
    **settings: Any,
) -> Artifact:
    """Build ``checkpoint`` into ``out`` (target cpu, FP32 unless told otherwise) and load it as a server would.

    Verified with every sixth held-out text and every seventh image, which are of all sizes and nearly all formats,
    unless with ``all_texts``, and tokens compared in every eighth text unless with ``all_texts`` or ``all_tokens``:
    most of a tiny model's build goes into those.
    INT8 is calibrated with few texts unless told otherwise. Retrieval is left out unless it is asked for (None: as a
    build decides): a tiny model's order is chance.
    """
    settings = {"precision": "fp32", **settings}
    if settings["precision"] == "int8":
        settings = {"calibration_size": CALIBRATION_SIZE, **settings}
    if settings.get("verify", True):
        settings.setdefault("verify_retrieval", False)
    config = BuildConfig(model=str(checkpoint), out=str(out), **settings)
    texts = held_out.held_out_texts()[:: 1 if all_texts else 6]
    probes = make_probes if all_texts or all_tokens else _few_probes
    with (
        mock.patch.object(held_out, "held_out_texts", return_value=texts),
        mock.patch.object(images, "held_out_images", held_out_images if all_texts else _few_images),
        mock.patch.object(questions, "make_probes", probes),
    ):
        build(config, open_engine, silent())
    return load(out)


def _few_images() -> tuple[HeldOutImage, ...]:
    return held_out_images()[::7]


def _few_probes(*asked: Any) -> Probes:
    probes = make_probes(*asked)
    return Probes(probes.texts[::8], probes.pairs[::8])


@contextmanager
def running(artifact: Artifact) -> Iterator[Engine]:
    """The engine of ``artifact``, closed at the end."""
    engine = open_engine(artifact.engine_dir, artifact.manifest)
    try:
        yield engine
    finally:
        engine.close()


def random_encodings(lengths: Sequence[int], vocab_size: int, *, pairs: bool = False, seed: int = 0) -> list[Encoding]:
    """Sequences of random ids; ``pairs``: the second half of each is of token type 1."""
    generator = np.random.default_rng(seed)
    encodings = []
    for length in lengths:
        types = (np.arange(length) >= length // 2).astype(np.int32) if pairs else None
        encodings.append(Encoding(generator.integers(0, vocab_size, length, np.int32), types))
    return encodings


def embed(engine: Engine, encodings: Sequence[Encoding]) -> Float32Array:
    """One packed batch through the engine."""
    return engine.run(PackedBatch.from_encodings(encodings))["embedding"]
