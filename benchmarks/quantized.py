"""INT8 against BF16 on this CPU in one run, and its certificate.

    python -m benchmarks.quantized [--models minilm gte-small bge-small-fp16 bert-base] [--repetitions 7] [--method mse]

Each model is built in both precisions, verified, and runs the mixed-length workload of ``benchmarks.engine`` in turn.
Real models: ``python -m tests.real.fetch NAME``. Quality on SciFact: ``benchmarks.certificates``.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import parsed
from benchmarks.harness.engines import loaded, mixed_batches, tokens_per_s
from benchmarks.harness.models import built, checkpoint_folder
from benchmarks.harness.record import write
from benchmarks.harness.rounds import alternate, ratio
from benchmarks.harness.texts import mixed_lengths

_SETTINGS: dict[str, Any] = {"max_seq_len": 512, "reference": "auto", "allow_below_threshold": True}


def main() -> None:
    models = ["minilm", "gte-small", "bge-small-fp16", "bert-base"]
    options = parsed(__doc__, models=models, repetitions=7, method="auto")
    results = {}
    for name in options.models:
        with tempfile.TemporaryDirectory() as scratch:
            results[name] = measured(name, options.method, options.repetitions, Path(scratch))
    write("quantized", results)


def measured(name: str, method: str, repetitions: int, scratch: Path) -> dict[str, Any]:
    folder = checkpoint_folder(name, scratch)
    lengths = mixed_lengths(64 if name == "bert-base" else 256, 447)
    sides, certificates = {}, {}
    with ExitStack() as stack:
        for precision, settings in (("bf16", {}), ("int8", {"calibration_method": method})):
            artifact = built(folder, scratch, name, precision, **_SETTINGS, **settings)
            engine = stack.enter_context(loaded(artifact))
            sides[precision] = partial(tokens_per_s, engine, mixed_batches(engine, artifact, lengths))
            (agreement, *_) = artifact.certificate.outputs
            certificates[precision] = {
                "mean cosine": agreement.cosine_mean,
                "lowest cosine": agreement.cosine_min,
                "passed": artifact.certificate.passed,
            }
        rates = alternate(sides, repetitions)
    found = {f"{precision}, tokens a second": rate for precision, rate in rates.items()}
    return {"int8 / bf16": ratio(rates, "int8", "bf16"), **found, **certificates}


if __name__ == "__main__":
    main()
