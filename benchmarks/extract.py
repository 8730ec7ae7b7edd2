"""A GLiNER-large shape beside its own library, in one process on the same cores: texts a second, 32 a call and alone.

    python -m benchmarks.extract [--layers 24] [--width 1024] [--repetitions 3] [--kept FOLDER]

``--kept``: a folder in which the checkpoint and the artifact stay for further runs (``--repetitions 0``: only these).

Needs the package ``gliner``. Weights are random, in the shape of microsoft/deberta-v3-large with gliner_large-v2.1's
head, but for the vocabulary, which is small. Words have 1.25 tokens, and texts a log-normal number of them with a mean
of 40; there are six labels. Both sides find nothing: the threshold is above all scores, as it is above most scores of
a trained model. The library computes in FP32, as it loads a model, and in BF16 after ``model.bfloat16()``.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bei import Model
from bei.artifact.manifest import Artifact
from bei.artifact.store import load
from benchmarks.harness.arguments import parsed
from benchmarks.harness.models import built
from benchmarks.harness.record import write
from benchmarks.harness.rounds import alternate, ratio, seconds
from benchmarks.harness.servers import ROOT, revision
from tests.support.gliner_models import save_gliner

LABELS = ["person", "organization", "place", "date", "product", "event"]
_WORDS = ["the", "cat", "the", "cat", "the", "cat", "a", "b"]  # the last two have two tokens
_THRESHOLD = 0.9
_BULK, _ALONE = 32, 6  # texts of a measurement: in one call, in calls of one


def main() -> None:
    options = parsed(__doc__, layers=24, width=1024, repetitions=3, kept="")
    library = import_module("gliner").GLiNER

    with tempfile.TemporaryDirectory() as scratch:
        folder, artifact = _made(Path(options.kept or scratch), _shape(options.layers, options.width))
        if not options.repetitions:
            return
        theirs = {
            "FP32": library.from_pretrained(str(folder), local_files_only=True),
            "BF16": library.from_pretrained(str(folder), local_files_only=True).bfloat16(),
        }
        with Model(artifact.path, tune="off") as ours:
            texts = _Texts()
            sides: dict[str, Callable[[], float]] = {}
            for size in (_BULK, 1):
                sides[_name("bei", size)] = partial(texts.rate, size, partial(_ours, ours))
                for precision, model in theirs.items():
                    sides[_name(f"gliner, {precision}", size)] = partial(texts.rate, size, partial(_theirs, model))
            rates = alternate(sides, options.repetitions, texts.draw)
            precision = artifact.manifest.precision
    found = {
        f"calls of {size}": {
            f"beside gliner in {other}": ratio(rates, _name("bei", size), _name(f"gliner, {other}", size))
            for other in theirs
        }
        for size in (_BULK, 1)
    }
    made = {"layers": options.layers, "width": options.width, "bei computes in": precision}
    versions = {"gliner": version("gliner"), "torch threads": torch.get_num_threads()}
    write("extract", {"ratios": found, "texts/s": rates, "shape": made, **versions, "commit": revision(ROOT)})


def _made(root: Path, shape: dict[str, Any]) -> tuple[Path, Artifact]:
    """The checkpoint, and the artifact, of ``shape``."""
    folder, made = root / "checkpoint", root / "checkpoint-auto"
    if made.is_dir():
        return folder, load(made)
    save_gliner(folder, **shape)
    return folder, built(folder, root, verify=False, reference="auto", allow_below_threshold=False)


def _shape(layers: int, width: int) -> dict[str, Any]:
    encoder = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "intermediate_size": 4 * width,
        "position_buckets": 256,
    }
    return {"width": 512, "spread": 0.02, "encoder": encoder, "max_width": 12, "max_len": 384}


class _Texts:
    """The texts of one repetition: each side gets the same."""

    def __init__(self) -> None:
        self._random = random.Random(39)
        self._texts: list[str] = []

    def draw(self) -> None:
        counts = (min(384, max(3, round(self._random.lognormvariate(3.5, 0.6)))) for _ in range(_BULK))
        self._texts = [" ".join(self._random.choices(_WORDS, k=count)) for count in counts]

    def rate(self, size: int, extract: Callable[[Sequence[str]], object]) -> float:
        """Texts a second in calls of ``size``."""
        texts = self._texts if size == _BULK else self._texts[:_ALONE]
        took_s = seconds(lambda: [extract(texts[first : first + size]) for first in range(0, len(texts), size)])
        return len(texts) / took_s


def _ours(model: Model, texts: Sequence[str]) -> None:
    model.extract(list(texts), LABELS, threshold=_THRESHOLD)


def _theirs(model: Any, texts: Sequence[str]) -> None:
    with torch.inference_mode():
        model.inference(list(texts), LABELS, threshold=_THRESHOLD, batch_size=_BULK)


def _name(side: str, size: int) -> str:
    return f"{side}, {'alone' if size == 1 else f'calls of {size}'}"


if __name__ == "__main__":
    main()
