"""A GLiNER-large or GLiNER2 shape beside its own library, in one process on the same cores: texts a second, 32 a call
and alone.

    python -m benchmarks.extract [--layers 24] [--width 1024] [--repetitions 3] [--kept FOLDER] [--library gliner2]

``--kept``: a folder in which the checkpoint and the artifact stay for further runs (``--repetitions 0``: only these).

Needs the package ``gliner``, or ``gliner2``; this one is asked for the labels and a structure of three fields, of which
the model counts two instances. Weights are random, in the shape of microsoft/deberta-v3-large with gliner_large-v2.1's
head, or GLiNER2's, but for the vocabulary, which is small. Words have 1.25 tokens, and texts a log-normal number of
them with a mean of 40; there are six labels. Both sides find nothing: the threshold is above all scores, as it is above
most scores of a trained model. The library computes in FP32, as it loads a model, and in BF16 after
``model.bfloat16()``.
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
from tests.support.gliner2_models import save_gliner2
from tests.support.gliner_models import save_gliner

LABELS = ["person", "organization", "place", "date", "product", "event"]
_STRUCTURES = {"meeting": ["host", "place", "date"]}
_CLASSES = {"gliner": "GLiNER", "gliner2": "GLiNER2"}
_WORDS = ["the", "cat", "the", "cat", "the", "cat", "a", "b"]  # the last two have two tokens
_THRESHOLD = 0.9
_BULK, _ALONE = 32, 6  # texts of a measurement: in one call, in calls of one


def main() -> None:
    options = parsed(__doc__, layers=24, width=1024, repetitions=3, kept="", library=("gliner", "gliner2"))
    name = options.library
    library = getattr(import_module(name), _CLASSES[name])
    ask_ours, ask_theirs = (_ours, _theirs) if name == "gliner" else (_our_schema, _their_schema)

    with tempfile.TemporaryDirectory() as scratch:
        folder, artifact = _made(Path(options.kept or scratch), name, options.layers, options.width)
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
                sides[_name("bei", size)] = partial(texts.rate, size, partial(ask_ours, ours))
                for precision, model in theirs.items():
                    sides[_name(f"{name}, {precision}", size)] = partial(texts.rate, size, partial(ask_theirs, model))
            rates = alternate(sides, options.repetitions, texts.draw)
            precision = artifact.manifest.precision
    found = {
        f"calls of {size}": {
            f"beside {name} in {other}": ratio(rates, _name("bei", size), _name(f"{name}, {other}", size))
            for other in theirs
        }
        for size in (_BULK, 1)
    }
    made = {"layers": options.layers, "width": options.width, "bei computes in": precision}
    versions = {name: version(name), "torch threads": torch.get_num_threads()}
    write(
        "extract" if name == "gliner" else f"extract_{name}",
        {"ratios": found, "texts/s": rates, "shape": made, **versions, "commit": revision(ROOT)},
    )


def _made(root: Path, library: str, layers: int, width: int) -> tuple[Path, Artifact]:
    """The checkpoint, and the artifact, of a shape."""
    folder, made = root / "checkpoint", root / "checkpoint-auto"
    if made.is_dir():
        return folder, load(made)
    encoder = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "intermediate_size": 4 * width,
        "position_buckets": 256,
    }
    if library == "gliner":
        save_gliner(folder, width=512, spread=0.02, encoder=encoder, max_width=12, max_len=384)
    else:
        save_gliner2(folder, spread=0.02, counts={2: 1000.0}, encoder=encoder, max_width=8, max_len=384)
    return folder, built(folder, root, verify=False, reference="auto", allow_below_threshold=False)


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


def _our_schema(model: Model, texts: Sequence[str]) -> None:
    model.extract_schema(texts, labels=LABELS, structures=_STRUCTURES, threshold=_THRESHOLD, multi_label=True)


def _their_schema(model: Any, texts: Sequence[str]) -> None:
    fields = {name: {"fields": [{"name": one} for one in given]} for name, given in _STRUCTURES.items()}
    schema = import_module("gliner2").Schema.from_dict({"entities": LABELS, "structures": fields})
    model.batch_extract(list(texts), schema, _BULK, _THRESHOLD, include_confidence=True, include_spans=True)


def _name(side: str, size: int) -> str:
    return f"{side}, {'alone' if size == 1 else f'calls of {size}'}"


if __name__ == "__main__":
    main()
