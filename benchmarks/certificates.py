"""Certificates of real models in FP8 and INT8, and nDCG@10 on SciFact before and after.

    python -m benchmarks.certificates [--models minilm smollm2-135m] [--precisions int8] [--minutes 4] [--table]

INT8 is built for the CPU and verified as every build is. FP8 is built for TensorRT-RTX (compute capability 8.9), whose
engine cannot run here: ONNX Runtime emulates it by the scales in the artifact, and answers what the artifact keeps for
``bei verify``. The device of such a certificate is ONNX Runtime; it leaves out what a GPU adds: 16-bit arithmetic
between the layers, and other kernels.

SciFact: all queries over the 5,183 documents, 256 tokens, the model's query prompt in front of queries: unquantized (in
what the CPU does best), in INT8, and by the emulation of FP8. Real models and the data: ``python -m tests.real.fetch
gte-small bge-small-fp16 ms-marco-reranker smollm2-135m scifact``.

What was measured is in ``results/certificates.json`` and is not measured again (``--again``); artifacts, and vectors of
what is not finished, stay in ``--work``. ``--minutes``: nothing is begun after so many.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from bei.artifact.certificate.record import Certificate
from bei.artifact.manifest import Artifact
from bei.artifact.store import load
from bei.core import Engine, Float32Array, Limits
from bei.engine.load import load_engine
from bei.errors import ArtifactError
from bei.verification.stored_answers import complete_certificate
from bei_build.checkpoint.heads import HeadChoice
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.config import BuildConfig
from bei_build.pipeline import build
from bei_build.progress import Progress
from bei_build.quantization.calibrate import read_quantization
from bei_build.quantization.emulation import emulated_engine
from benchmarks import scifact
from benchmarks.common import RESULTS, write
from benchmarks.models import minilm_folder
from tests.real.models import cache_dir

NAME = "certificates"
PRECISIONS = ("int8", "fp8")
UNQUANTIZED = "auto"
_MAX_SEQ_LEN = 256
_TEXTS_AT_A_TIME = 256  # of SciFact, kept together
# Of a batch of the emulation: what ONNX Runtime computes a thousand tokens of stays in the processor's caches.
_EMULATED = Limits(max_num_tokens=1024, max_batch_size=64, max_seq_len=_MAX_SEQ_LEN)


@dataclass(frozen=True)
class Model:
    """``settings`` of its builds, and of those in a ``quantized`` precision. ``retrieves``: it embeds queries and
    documents."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    quantized: Mapping[str, Any] = field(default_factory=dict)
    retrieves: bool = True


MODELS: Mapping[str, Model] = {
    "minilm": Model(),
    "gte-small": Model(),
    "bge-small-fp16": Model(),
    "ms-marco-reranker": Model(retrieves=False),
    # A language model that was not made for embedding (its last token's state), so it is not asked to rank.
    "smollm2-135m": Model(
        {"task": "embed", "pooling": "last"},
        {"calibration_method": "mse", "max_highprec_layers": 110, "verify_retrieval": False},
        retrieves=False,
    ),
}


class OutOfTimeError(Exception):
    """``--minutes`` are over; what is finished is kept."""


class Clock:
    """Begins when it is made."""

    def __init__(self, minutes: float | None) -> None:
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    def check(self) -> None:
        """Raise OutOfTimeError once the time is over."""
        if self._end is not None and time.monotonic() > self._end:
            raise OutOfTimeError


def main() -> None:
    """Measure what is missing, write ``results/certificates.json`` and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--no-scifact", dest="scifact", action="store_false", help="certificates only")
    parser.add_argument("--minutes", type=float, help="begin nothing after so many")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "bei-certificates")
    parser.add_argument("--again", action="store_true", help="measure what is in the JSON too")
    parser.add_argument("--table", action="store_true", help="print the tables of the JSON and stop")
    options = parser.parse_args()
    results = _kept()
    if not options.table:
        _measure(results, options)
    print(tables(results))


def _measure(results: dict[str, Any], options: argparse.Namespace) -> None:
    clock = Clock(options.minutes)
    options.work.mkdir(parents=True, exist_ok=True)
    if options.again:
        for name in options.models:
            results.pop(name, None)
            _forget(options.work, name)
    try:
        for name in options.models:
            work = Work(name, options.work, clock)
            for precision in options.precisions:
                if precision not in results.setdefault(name, {}):
                    results[name][precision] = summary(work.certificate(precision))
                    write(NAME, results)
        for name in [name for name in options.models if options.scifact and MODELS[name].retrieves]:
            ranked = results[name].setdefault("scifact", {})
            for precision in (UNQUANTIZED, *options.precisions):
                if precision not in ranked:
                    ranked[precision] = Work(name, options.work, clock).scifact(precision)
                    write(NAME, results)
    except OutOfTimeError:
        print("The time is over: the same command goes on.")


def _forget(work: Path, name: str) -> None:
    """Remove what was kept under ``name`` and whatever begins with it: artifacts, and vectors beside them."""
    for path in [work / name, *work.glob(f"{name}-*")]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _kept() -> dict[str, Any]:
    path = RESULTS / f"{NAME}.json"
    kept: dict[str, Any] = json.loads(path.read_text())["results"] if path.is_file() else {}
    return kept


class Work:
    """The artifacts of one model, and the vectors that they give."""

    def __init__(self, name: str, folder: Path, clock: Clock) -> None:
        self._name = name
        self._checkpoint = minilm_folder() if name == "minilm" else cache_dir() / name
        self._folder = folder
        self._clock = clock

    def certificate(self, precision: str) -> Certificate:
        """Of a build in ``precision``, of the emulation where the build's is pending."""
        artifact = self._artifact(precision)
        if artifact.certificate.kind != "pending":
            return artifact.certificate
        with self._engine(artifact) as engine:
            return complete_certificate(artifact, engine)[0].certificate

    def scifact(self, precision: str) -> float:
        """nDCG@10."""
        data = cache_dir() / "scifact"
        if not (data / "corpus.jsonl").is_file():
            raise SystemExit(f"{data} has no corpus.jsonl: python -m tests.real.fetch scifact")
        dataset, artifact = scifact.read(data), self._artifact(precision)
        prompt = artifact.manifest.prompts.get("query", "")
        queries = [prompt + dataset.queries[query] for query in dataset.relevance]
        with self._engine(artifact) as engine:
            vectors = self._vectors(engine, artifact, [*queries, *dataset.documents.values()])
        ranked = scifact.rank(vectors[: len(queries)], vectors[len(queries) :])
        return round(scifact.ndcg(ranked, list(dataset.documents), list(dataset.relevance.values())), 4)

    def _vectors(self, engine: Engine, artifact: Artifact, texts: Sequence[str]) -> Float32Array:
        """Unit vectors of ``texts``; those of an interrupted run are taken."""
        parts = []
        for start in range(0, len(texts), _TEXTS_AT_A_TIME):
            kept = artifact.path.with_name(f"{artifact.path.name}-{start}.npy")
            if not kept.is_file():
                self._clock.check()
                partial = kept.with_suffix(".partial.npy")
                np.save(partial, scifact.embed(engine, artifact, texts[start : start + _TEXTS_AT_A_TIME]))
                partial.rename(kept)
            parts.append(np.load(kept))
        return np.concatenate(parts)

    def _artifact(self, precision: str) -> Artifact:
        out = self._folder / f"{self._name}-{precision}"
        if out.is_dir():
            try:
                return load(out)
            except ArtifactError as error:  # of an older schema, say: what it gave is no longer this code's
                print(f"{out.name} is built again: {error}", flush=True)
                _forget(self._folder, out.name)
        self._clock.check()
        settings: dict[str, Any] = {**MODELS[self._name].settings}
        if precision == "fp8":
            settings |= {"target": "tensorrt-rtx", "compute_capability": ("89",)}
        if precision == UNQUANTIZED:
            settings["verify"] = False
        else:
            settings |= {**MODELS[self._name].quantized, "allow_below_threshold": True}
        config = BuildConfig(
            model=str(self._checkpoint),
            out=str(out),
            name=self._name,
            precision=precision,
            max_seq_len=_MAX_SEQ_LEN,
            **settings,
        )
        return build(config, load_engine, Progress(Console(stderr=True, highlight=False)))

    @contextmanager
    def _engine(self, artifact: Artifact) -> Iterator[Engine]:
        if artifact.manifest.target == "cpu":
            with closing(load_engine(artifact.engine_dir, artifact.manifest)) as engine:
                yield engine
            return
        settings = MODELS[self._name].settings
        choice = HeadChoice(settings.get("task", "auto"), settings.get("pooling"))
        checkpoint = read_checkpoint(locate(str(self._checkpoint)), choice, _MAX_SEQ_LEN)
        quantization = read_quantization(artifact.path)
        with (
            checkpoint.weights() as weights,
            emulated_engine(checkpoint.spec, weights.read, quantization, _EMULATED, self._folder) as emulation,
        ):
            yield emulation


def summary(certificate: Certificate) -> dict[str, Any]:
    """Its figures, without histograms, texts and the canary; of its layers which are high and the five worst others."""
    found: dict[str, Any] = msgspec.to_builtins(certificate)
    for name in ("canary_text", "canary_output", "canary_row"):
        del found[name]
    for row in found["outputs"]:
        del row["histogram"], row["worst_texts"]
    if certificate.quantization is not None:
        ordered = certificate.quantization.by_sensitivity
        found["quantization"] |= {
            "layers": len(ordered),
            "left_high": {layer.layer: layer.sensitivity for layer in ordered if layer.is_high},
            "worst_others": {layer.layer: layer.sensitivity for layer in [it for it in ordered if not it.is_high][:5]},
        }
    return found


def tables(results: Mapping[str, Any]) -> str:
    """Two tables in Markdown."""
    certificates = [
        "| model | precision | verdict | mean, p1, lowest | Spearman or tau | top 10 | layers left high | nDCG@10, "
        "bundled set |",
        "|---|---|---|---|---|---|---|---|",
    ]
    certificates += [
        _row(name, it[precision]) for name, it in results.items() for precision in PRECISIONS if precision in it
    ]
    ranked = ["| SciFact, nDCG@10 | unquantized | INT8 | FP8, emulated |", "|---|---|---|---|"]
    for name, it in results.items():
        if found := it.get("scifact"):
            before = found.get(UNQUANTIZED)
            figures = [_against(found.get(precision), before) for precision in (UNQUANTIZED, *PRECISIONS)]
            ranked.append(f"| {name} | {' | '.join(figures)} |")
    return "\n".join([*certificates, "", *ranked])


def _row(name: str, certificate: Mapping[str, Any]) -> str:
    (row, *_), record = certificate["outputs"], certificate["quantization"]
    order = row["kendall_tau"] if row["spearman"] is None else row["spearman"]
    ranked = certificate["retrieval"]
    cells = [
        name,
        f"{record['format']}, {'emulated' if record['format'] == 'fp8' else 'CPU'}",
        "passed" if certificate["passed"] else "below threshold",
        ", ".join(f"{row[figure]:.5f}" for figure in ("cosine_mean", "cosine_p1", "cosine_min")),
        "-" if order is None else f"{order:.4f}",
        f"{row['ranking_overlap']:.1%}",
        f"{len(record['left_high'])} of {record['layers']}",
        _against(ranked["ndcg_engine"], ranked["ndcg_reference"]) if ranked and ranked["is_judged"] else "-",
    ]
    return f"| {' | '.join(cells)} |"


def _against(value: float | None, before: float | None) -> str:
    """``value`` and what it has lost of ``before``."""
    if value is None:
        return "-"
    return f"{value:.4f}" if before is None or value == before else f"{value:.4f} ({value / before - 1:+.2%})"


if __name__ == "__main__":
    main()
