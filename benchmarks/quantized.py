"""INT8 against BF16 on this CPU, and what quantization costs in quality, in one run.

    python -m benchmarks.quantized [--models minilm gte-small bge-small-fp16 bert-base] [--repetitions 7] [--method mse]

Each model is built in both precisions and runs the mixed-length workload of ``benchmarks.engine`` in turn. Beside the
rates stand the certificates, the layers left high, and where an engine's time goes by operator: OpenVINO's own counters
over many runs of one batch, each operator with the type it computed in. With SciFact there
(``python -m tests.real.fetch scifact``), nDCG@10 of embedders in FP32 and both. Real models:
``python -m tests.real.fetch NAME``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from bei.artifact.manifest import OPENVINO_MODEL, Artifact
from bei.core import Encoding, PackedBatch
from bei.engine.load import load_engine
from bei.engine.packing import graph_inputs
from bei.scheduler.cost_measurement import measure as measure_costs
from bei_build.config import BuildConfig
from bei_build.pipeline import build
from bei_build.progress import Progress
from benchmarks import scifact
from benchmarks.common import alternate, mixed_lengths, random_encodings, ratio, seconds, sorted_batches, write
from benchmarks.models import checkpoint_folder
from tests.real.models import cache_dir

_SHAPES = ("minilm", "bert-base")
_MAX_SEQ_LEN = 512
_PROFILED = 60  # runs; the counters are averages since the request was made, compilation included


def main() -> None:
    """Measure and write ``results/quantized.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["minilm", "gte-small", "bge-small-fp16", "bert-base"])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--method", default="auto")
    options = parser.parse_args()
    results = {}
    for name in options.models:
        with tempfile.TemporaryDirectory() as scratch:
            results[name] = measure(name, options.method, options.repetitions, Path(scratch))
            print(name, {key: it for key, it in results[name].items() if key != "operators"}, flush=True)
    write("quantized", results)


def measure(name: str, method: str, repetitions: int, scratch: Path) -> dict[str, Any]:
    """One model."""
    folder = checkpoint_folder(name, scratch) if name in _SHAPES else cache_dir() / name
    artifacts = {precision: _built(folder, precision, method, scratch) for precision in ("bf16", "int8")}
    lengths = mixed_lengths(64 if name == "bert-base" else 256, 447)
    sides, found = {}, {}
    for precision, artifact in artifacts.items():
        engine = load_engine(artifact.engine_dir, artifact.manifest)
        engine.warmup()
        encodings = random_encodings(lengths, artifact.manifest.spec.vocab_size)
        batches = sorted_batches(encodings, engine.info.limits, measure_costs(engine))
        sides[precision] = partial(_tokens_per_s, engine, batches)
        (agreement, *_) = artifact.certificate.outputs
        found[precision] = {
            "mean cosine": agreement.cosine_mean,
            "lowest cosine": agreement.cosine_min,
            "passed": artifact.certificate.passed,
            "operators, ms": _operators(artifact, encodings),
        }
    rates = alternate(sides, repetitions)
    return {
        "int8 / bf16": ratio(rates, "int8", "bf16"),
        **{f"{precision}, tokens a second": rates[precision] for precision in artifacts},
        **found,
        "scifact": _scifact(artifacts) if name != "bert-base" else "random weights",
    }


def _built(folder: Path, precision: str, method: str, scratch: Path) -> Artifact:
    settings = {"calibration_method": method} if precision == "int8" else {}
    config = BuildConfig(
        model=str(folder),
        out=str(scratch / precision),
        precision=precision,
        max_seq_len=_MAX_SEQ_LEN,
        allow_below_threshold=True,
        **settings,  # type: ignore[arg-type]
    )
    return build(config, load_engine, Progress(Console(stderr=True, highlight=False)))


def _tokens_per_s(engine: Any, batches: list[PackedBatch]) -> float:
    elapsed = seconds(lambda: [engine.run(batch) for batch in batches])
    return sum(batch.num_tokens for batch in batches) / elapsed


def _operators(artifact: Artifact, encodings: list[Encoding]) -> dict[str, float]:
    """Milliseconds of one batch of about a thousand tokens by operator and type, the largest first."""
    import openvino

    core = openvino.Core()
    is_bf16 = "BF16" in artifact.manifest.engine.capabilities
    properties = {"INFERENCE_PRECISION_HINT": "bf16" if is_bf16 else "f32", "PERF_COUNT": "YES", "NUM_STREAMS": "1"}
    properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "0"
    model = core.compile_model(core.read_model(artifact.engine_dir / OPENVINO_MODEL), "CPU", properties)
    batch = PackedBatch.from_encodings([one for one in encodings if 100 <= one.num_tokens <= 130][:9])
    request = model.create_infer_request()
    inputs = graph_inputs(batch, [port.get_any_name() for port in model.inputs])
    for _ in range(_PROFILED):
        request.infer(inputs)
    times: dict[str, float] = defaultdict(float)
    for one in request.get_profiling_info():
        times[f"{one.node_type}, {one.exec_type}"] += one.real_time.total_seconds() * 1e3
    return {name: round(ms, 3) for name, ms in sorted(times.items(), key=lambda it: -it[1]) if ms >= 0.05}


def _scifact(artifacts: dict[str, Artifact]) -> dict[str, float] | str:
    data = cache_dir() / "scifact"
    if not (data / "corpus.jsonl").is_file():
        return "not fetched"
    dataset = scifact.read(data)
    found = {}
    for precision, artifact in artifacts.items():
        engine = load_engine(artifact.engine_dir, artifact.manifest)
        try:
            documents = scifact.embed(engine, artifact, list(dataset.documents.values()))
            queries = scifact.embed(engine, artifact, [dataset.queries[query] for query in dataset.relevance])
        finally:
            engine.close()
        ranked = scifact.rank(queries, documents)
        found[precision] = round(scifact.ndcg(ranked, list(dataset.documents), list(dataset.relevance.values())), 4)
    return found


if __name__ == "__main__":
    main()
