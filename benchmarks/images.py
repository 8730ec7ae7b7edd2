"""Vectors of images: ``bei.Model`` beside sentence-transformers and transformers, from JPEG files to vectors.

    python -m benchmarks.images [--shape clip-vit-b32|siglip-base] [--images 32] [--width 640] [--height 480]
        [--repetitions 5] [--kept FOLDER]

``--kept``: a folder in which the checkpoint and the artifacts stay for further runs (``--repetitions 0``: only these).

Needs the package ``sentence-transformers``. CLIP ViT-B/32's or SigLIP base's shape (patches of 16 pixels, images of
224), both towers, with random weights. In each repetition every side decodes and computes the same JPEG files once, in
one process: by one call of ``Model.embed``, without a cache; by sentence-transformers' ``encode``; and by transformers'
image processor and ``get_image_features``. The libraries get batches of 32 of images that Pillow opens. Without BF16 in
the CPU nothing is measured in BF16.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import json

from bei import Model
from bei.core import Float32Array, UInt8Array
from benchmarks.harness.arguments import parsed
from benchmarks.harness.engines import precisions
from benchmarks.harness.models import built, minilm_folder
from benchmarks.harness.record import write
from benchmarks.harness.rounds import alternate, ratio, seconds
from benchmarks.harness.servers import ROOT, revision

_BATCH = 32
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_SHAPES = ("clip-vit-b32", "siglip-base")
_PROCESSORS = {
    "clip-vit-b32": {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 224},
        "crop_size": {"height": 224, "width": 224},
    },
    "siglip-base": {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": 224, "width": 224},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}
_TOKENIZER = {"model_input_names": ["input_ids"], "pad_token": "[PAD]", "tokenizer_class": "PreTrainedTokenizerFast"}


def main() -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads would spin beside bei's
    options = parsed(__doc__, shape=_SHAPES, images=32, width=640, height=480, repetitions=5, kept="")
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(options.kept or scratch)
        checkpoint = checkpoint_of_towers(options.shape, folder)
        measured = precisions(*_DTYPES)
        artifacts = {precision: _artifact(checkpoint, folder, options.shape, precision) for precision in measured}
        if not options.repetitions:
            return
        files = [as_jpeg(picture) for picture in pictures(range(options.images), options.width, options.height)]
        sides: dict[str, Callable[[Sequence[bytes]], Float32Array]] = {}
        for precision in measured:
            label, dtype = precision.upper(), _DTYPES[precision]
            sides[f"bei, {label}"] = stack.enter_context(Model(artifacts[precision], tune="off")).embed
            sides[f"sentence-transformers, {label}"] = _sentence_transformers(checkpoint, dtype)
            sides[f"transformers, {label}"] = _transformers(checkpoint, dtype)
        _check_same(sides, files[:2])
        rates = alternate({name: partial(_rate, run, files) for name, run in sides.items()}, options.repetitions)
    ratios = {
        f"bei / {other}": {
            label: ratio(rates, f"bei, {label}", f"{other}, {label}") for label in map(str.upper, measured)
        }
        for other in ("sentence-transformers", "transformers")
    }
    results = {
        "images a second": rates,
        **ratios,
        "shape": options.shape,
        "images": options.images,
        "pixels": [options.width, options.height],
        "sentence-transformers": version("sentence-transformers"),
        "transformers": version("transformers"),
        "commit": revision(ROOT),
    }
    name = "images" if options.shape == _SHAPES[0] else f"images-{options.shape}"
    is_usual = (options.width, options.height) == (640, 480)
    write(name if is_usual else f"{name}-{options.width}x{options.height}", results)


def checkpoint_of_towers(shape: str, folder: Path) -> Path:
    """Both towers with random weights, MiniLM's tokenizer, and the image processor's settings."""
    import torch
    import transformers

    out = folder / f"checkpoint-{shape}"
    if out.is_dir():
        return out
    torch.manual_seed(0)
    out.mkdir(parents=True)
    model_class: Any = transformers.CLIPModel if shape == _SHAPES[0] else transformers.SiglipModel
    model = model_class(model_class.config_class())  # the defaults are those of the shape
    model.save_pretrained(out)
    shutil.copy(minilm_folder() / "tokenizer.json", out)
    (out / "tokenizer_config.json").write_bytes(json.encode(_TOKENIZER))
    (out / "preprocessor_config.json").write_bytes(json.encode(_PROCESSORS[shape]))
    return out


def _artifact(checkpoint: Path, folder: Path, name: str, precision: str) -> Path:
    out = folder / f"{name}-{precision}"
    if not out.is_dir():
        built(checkpoint, folder, name, precision)
    return out


def pictures(seeds: Iterable[int], width: int, height: int) -> Iterator[UInt8Array]:
    """Waves with some noise, [height, width, 3], another picture for each seed."""
    rows, columns = np.mgrid[0:height, 0:width]
    for seed in seeds:
        rng = np.random.default_rng(seed)
        levels = rng.normal(0, 6, (height, width, 3))
        for channel in range(3):
            y, x, wave = rng.uniform(0, height), rng.uniform(0, width), rng.uniform(20, 120)
            levels[:, :, channel] += 127 + 100 * np.sin(np.hypot(rows - y, columns - x) / wave)
        yield levels.clip(0, 255).astype(np.uint8)


def as_jpeg(picture: UInt8Array) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=90)
    return file.getvalue()


def _sentence_transformers(checkpoint: Path, dtype: str) -> Callable[[Sequence[bytes]], Float32Array]:
    from PIL import Image

    library = import_module("sentence_transformers").SentenceTransformer
    model = library(str(checkpoint), device="cpu", local_files_only=True, model_kwargs={"dtype": dtype})

    def embed(files: Sequence[bytes]) -> Float32Array:
        images = [Image.open(io.BytesIO(file)) for file in files]
        found: Float32Array = model.encode(images, batch_size=_BATCH, normalize_embeddings=True)
        return found

    return embed


def _transformers(checkpoint: Path, dtype: str) -> Callable[[Sequence[bytes]], Float32Array]:
    import torch
    from PIL import Image
    from transformers import AutoImageProcessor, AutoModel

    model: Any = AutoModel.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    processors: Any = AutoImageProcessor
    processor = processors.from_pretrained(checkpoint, backend="pil")

    def embed(files: Sequence[bytes]) -> Float32Array:
        parts = []
        with torch.inference_mode():
            for first in range(0, len(files), _BATCH):
                images = [Image.open(io.BytesIO(file)) for file in files[first : first + _BATCH]]
                pixels = processor(images=images, return_tensors="pt")["pixel_values"].to(model.dtype)
                vectors = model.get_image_features(pixel_values=pixels).pooler_output.float()
                parts.append(torch.nn.functional.normalize(vectors, dim=-1).numpy())
        return np.concatenate(parts)

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
