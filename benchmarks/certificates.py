"""Certificates of real models in FP8 and INT8, and nDCG@10 on SciFact before and after.

    python -m benchmarks.certificates [--models minilm smollm2-135m] [--precisions int8] [--no-scifact]

INT8 is built for the CPU and verified as every build is. FP8 is built for TensorRT-RTX (compute capability 8.9), whose
engine cannot run here: ONNX Runtime emulates it by the scales in the artifact, and answers what the artifact keeps for
``bei verify``. The device of such a certificate is ONNX Runtime; it leaves out what a GPU adds: 16-bit arithmetic
between the layers, and other kernels.

SciFact: all queries over the 5,183 documents, 256 tokens, the model's query prompt in front of queries: unquantized (in
the CPU's best precision), in INT8, and by the emulation of FP8. Real models and the data: ``python -m tests.real.fetch
gte-small bge-small-fp16 ms-marco-reranker smollm2-135m scifact``.

Figures in ``results/certificates.json`` are not measured again: a run that was stopped goes on, and a model is measured
anew once its entry has been removed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from bei.artifact.certificate.record import Certificate
from bei.artifact.manifest import Artifact
from bei.core import Engine, Limits
from bei.verification.stored_answers import complete_certificate
from bei_build.checkpoint.heads import HeadChoice
from bei_build.checkpoint.locate import locate
from bei_build.checkpoint.read import read_checkpoint
from bei_build.quantization.calibrate import read_quantization
from bei_build.quantization.emulation import emulated_engine
from benchmarks import scifact
from benchmarks.harness.arguments import parsed
from benchmarks.harness.engines import loaded
from benchmarks.harness.models import built, checkpoint_folder
from benchmarks.harness.record import kept, write

NAME = "certificates"
PRECISIONS = ("int8", "fp8")
UNQUANTIZED = "auto"
_MAX_SEQ_LEN = 256
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


def main() -> None:
    """Measure what is missing, and write ``results/certificates.json``."""
    options = parsed(__doc__, models=list(MODELS), precisions=list(PRECISIONS), no_scifact=False)
    results = kept(NAME)
    for name in options.models:
        with tempfile.TemporaryDirectory() as scratch:
            work, found = Work(name, Path(scratch)), results.setdefault(name, {})
            for precision in options.precisions:
                if precision not in found:
                    found[precision] = summary(work.certificate(precision))
                    write(NAME, results)
            if MODELS[name].retrieves and not options.no_scifact:
                ranked = found.setdefault("scifact", {})
                for precision in (UNQUANTIZED, *options.precisions):
                    if precision not in ranked:
                        ranked[precision] = work.scifact(precision)
                        write(NAME, results)


class Work:
    """The artifacts of one model, and their vectors."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._model = name, MODELS[name]
        self._folder = folder
        self._checkpoint = checkpoint_folder(name, folder)
        self._artifact = cache(self._built)

    def certificate(self, precision: str) -> Certificate:
        """Of a build in ``precision``, of the emulation where the build's is pending."""
        artifact = self._artifact(precision)
        if artifact.certificate.kind != "pending":
            return artifact.certificate
        with self._engine(artifact) as engine:
            return complete_certificate(artifact, engine)[0].certificate

    def scifact(self, precision: str) -> float:
        """nDCG@10."""
        dataset, artifact = scifact.read(), self._artifact(precision)
        prompt = artifact.manifest.prompts.get("query", "")
        with self._engine(artifact) as engine:
            queries = scifact.embed(engine, artifact, [prompt + dataset.queries[query] for query in dataset.relevance])
            documents = scifact.embed(engine, artifact, list(dataset.documents.values()))
        return round(dataset.ndcg(queries, documents), 4)

    def _built(self, precision: str) -> Artifact:
        settings: dict[str, Any] = {**self._model.settings, "max_seq_len": _MAX_SEQ_LEN, "reference": "auto"}
        if precision == "fp8":
            settings |= {"target": "tensorrt-rtx", "compute_capability": ("89",)}
        if precision == UNQUANTIZED:
            settings["verify"] = False
        else:
            settings |= {**self._model.quantized, "allow_below_threshold": True}
        return built(self._checkpoint, self._folder, self._name, precision, **settings)

    @contextmanager
    def _engine(self, artifact: Artifact) -> Iterator[Engine]:
        if artifact.manifest.target == "cpu":
            with loaded(artifact) as engine:
                yield engine
            return
        choice = HeadChoice(self._model.settings.get("task", "auto"), self._model.settings.get("pooling"))
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


if __name__ == "__main__":
    main()
