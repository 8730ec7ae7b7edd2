"""Vectors of images: ``bei.Model`` beside sentence-transformers, from JPEG files to vectors, in one process.

    python -m benchmarks.images [--images 32] [--width 640] [--height 480] [--repetitions 5] [--kept FOLDER]

``--kept``: a folder in which the checkpoint and the artifacts stay for further runs (``--repetitions 0``: only these).

Needs the package ``sentence-transformers``. CLIP ViT-B/32's shape, both towers, with random weights. In each repetition
every side decodes and computes the same JPEG files once: by one call of ``Model.embed``, without a cache, and by
``encode`` in batches of 32 of images that Pillow opens, with transformers' own CLIP module.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import json

from bei import Model
from bei.core import Float32Array
from benchmarks.harness.arguments import parsed
from benchmarks.harness.models import built, minilm_folder
from benchmarks.harness.record import write
from benchmarks.harness.rounds import alternate, ratio, seconds
from benchmarks.harness.servers import ROOT, revision

_BATCH = 32
_PRECISIONS = {"FP32": "float32", "BF16": "bfloat16"}
_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 224},
    "crop_size": {"height": 224, "width": 224},
}
_TOKENIZER = {"model_input_names": ["input_ids"], "pad_token": "[PAD]", "tokenizer_class": "PreTrainedTokenizerFast"}


def main() -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads would spin beside bei's
    options = parsed(__doc__, images=32, width=640, height=480, repetitions=5, kept="")
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(options.kept or scratch)
        checkpoint = _checkpoint(folder)
        artifacts = {precision: _artifact(checkpoint, folder, precision) for precision in _PRECISIONS}
        if not options.repetitions:
            return
        files = [*_drawn(options.images, options.width, options.height)]
        sides: dict[str, Callable[[Sequence[bytes]], Float32Array]] = {}
        for precision, dtype in _PRECISIONS.items():
            sides[f"bei, {precision}"] = stack.enter_context(Model(artifacts[precision], tune="off")).embed
            sides[f"sentence-transformers, {precision}"] = _theirs(checkpoint, dtype)
        _check_same(sides, files[:2])
        rates = alternate({name: partial(_rate, run, files) for name, run in sides.items()}, options.repetitions)
    pairs = {precision: (f"bei, {precision}", f"sentence-transformers, {precision}") for precision in _PRECISIONS}
    results = {
        "images a second": rates,
        "bei / sentence-transformers": {precision: ratio(rates, *pair) for precision, pair in pairs.items()},
        "images": options.images,
        "pixels": [options.width, options.height],
        "sentence-transformers": version("sentence-transformers"),
        "commit": revision(ROOT),
    }
    is_usual = (options.width, options.height) == (640, 480)
    write("images" if is_usual else f"images-{options.width}x{options.height}", results)


def _checkpoint(folder: Path) -> Path:
    """Both towers with random weights, MiniLM's tokenizer, and the image processor's settings."""
    import torch
    import transformers

    out = folder / "checkpoint"
    if out.is_dir():
        return out
    torch.manual_seed(0)
    out.mkdir(parents=True)
    model: Any = transformers.CLIPModel(transformers.CLIPConfig())
    model.save_pretrained(out)
    shutil.copy(minilm_folder() / "tokenizer.json", out)
    (out / "tokenizer_config.json").write_bytes(json.encode(_TOKENIZER))
    (out / "preprocessor_config.json").write_bytes(json.encode(_PROCESSOR))
    return out


def _artifact(checkpoint: Path, folder: Path, precision: str) -> Path:
    name = f"clip-{precision.lower()}"
    out = folder / f"{name}-{precision.lower()}"
    if not out.is_dir():
        built(checkpoint, folder, name, precision.lower())
    return out


def _drawn(count: int, width: int, height: int) -> Iterator[bytes]:
    """JPEG files of waves with some noise."""
    from PIL import Image

    rows, columns = np.mgrid[0:height, 0:width]
    for seed in range(count):
        rng = np.random.default_rng(seed)
        levels = rng.normal(0, 6, (height, width, 3))
        for channel in range(3):
            y, x, wave = rng.uniform(0, height), rng.uniform(0, width), rng.uniform(20, 120)
            levels[:, :, channel] += 127 + 100 * np.sin(np.hypot(rows - y, columns - x) / wave)
        file = io.BytesIO()
        Image.fromarray(levels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
        yield file.getvalue()


def _theirs(checkpoint: Path, dtype: str) -> Callable[[Sequence[bytes]], Float32Array]:
    from PIL import Image

    library = import_module("sentence_transformers").SentenceTransformer
    model = library(str(checkpoint), device="cpu", local_files_only=True, model_kwargs={"dtype": dtype})

    def embed(files: Sequence[bytes]) -> Float32Array:
        images = [Image.open(io.BytesIO(file)) for file in files]
        found: Float32Array = model.encode(images, batch_size=_BATCH, normalize_embeddings=True)
        return found

    return embed


def _check_same(sides: dict[str, Callable[[Sequence[bytes]], Float32Array]], files: Sequence[bytes]) -> None:
    """Every side computes the same vectors, or the figures would not be of the same work."""
    first, *others = (np.asarray(run(files), np.float32) for run in sides.values())
    for vectors in others:
        cosines = (first * vectors).sum(axis=1)
        assert cosines.min() > 0.995, f"the sides compute other vectors: cosines {cosines}"


def _rate(run: Callable[[Sequence[bytes]], Float32Array], files: Sequence[bytes]) -> float:
    return len(files) / seconds(lambda: run(files))


if __name__ == "__main__":
    main()
