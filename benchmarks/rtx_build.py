"""Building for GPUs on a machine without one: seconds, peak memory and size of TensorRT-RTX's plans.

    python -m benchmarks.rtx_build [--shape minilm bert-base 0.5b] [--capabilities 89 89,120]

Builds each shape for each set of GPUs with ``bei build --target tensorrt-rtx``, in a process of its own whose memory is
read 50 times a second. Nothing is run on a GPU: how fast the plans are, and whether they are right, is not said here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bei.artifact.manifest import Artifact
from bei.artifact.store import load
from benchmarks.common import RESULTS, write
from benchmarks.large import Shape, sampling_memory, save_checkpoint
from benchmarks.models import checkpoint_folder
from benchmarks.server import ROOT, environment, revision, tied

# Qwen2-0.5B's sizes, random weights, without the biases of its queries, keys and values.
_DECODER = Shape(hidden=896, layers=24, heads=14, kv_heads=2, head_dim=64, inner=4864, vocab=151_936)
_SHAPES = ("minilm", "bert-base", "0.5b")
_LONGEST = 512


def main() -> None:
    """Measure and write ``results/rtx-build.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=_SHAPES, default=_SHAPES)
    parser.add_argument("--capabilities", nargs="+", default=["89", "89,120"])
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--scratch", type=Path, help="folder with room for 5 GB")
    options = parser.parse_args()
    for shape in options.shape:
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            checkpoint = _checkpoint(shape, Path(scratch))
            for capabilities in options.capabilities:
                found = measured(checkpoint, Path(scratch) / "artifact", capabilities, options.precision)
                _keep(f"{shape}, {options.precision}, for {capabilities}", found)


def _checkpoint(shape: str, scratch: Path) -> Path:
    return save_checkpoint(_DECODER, scratch / shape) if shape == "0.5b" else checkpoint_folder(shape, scratch)


def measured(checkpoint: Path, out: Path, capabilities: str, precision: str) -> dict[str, Any]:
    """``bei build`` of ``checkpoint`` in a process; a phase ends where it prints that it has."""
    command = [sys.executable, "-m", "bei", "build", str(checkpoint), f"--out={out}", f"--max-seq-len={_LONGEST}"]
    command += ["--target=tensorrt-rtx", f"--compute-capability={capabilities}", f"--precision={precision}"]
    command += ["--verify-budget=20"]  # for the reference's answers, whose seconds are not what is asked here
    started = time.monotonic()
    process = subprocess.Popen(
        tied(command), stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment(ROOT, None, {})
    )
    with sampling_memory(process.pid) as memory:
        assert process.stderr is not None
        for line in process.stderr:
            print(line.rstrip(), flush=True)
            name = line.strip().split("  ")[0]
            if line.startswith("  ") and not name.startswith("note:"):
                memory.end_phase(name)
        code = process.wait()
    if code:
        raise SystemExit(f"bei build ended with {code}")
    compiling = next(phase for name, phase in memory.phases.items() if name.startswith("Compile"))
    return {
        "revision": revision(ROOT),
        "seconds": round(time.monotonic() - started, 1),
        "seconds of compiling": compiling["seconds"],
        "peak of compiling": compiling["peak"],
        "phases": memory.phases,
        **_facts(load(out)),
    }


def _facts(artifact: Artifact) -> dict[str, Any]:
    manifest = artifact.manifest
    engine, plan = manifest.engine, manifest.engine.plan
    assert plan is not None
    return {
        "plan_mb": round(sum(file.stat().st_size for file in artifact.engine_dir.iterdir()) / 1e6, 1),
        "million parameters": round(manifest.spec.num_parameters / 1e6, 1),
        "compiler": f"{engine.compiler} {engine.compiler_version}",
        "device": engine.device,
        "capabilities": engine.capabilities,
        "lowerings": Counter(plan.lowerings),
        "fallbacks": plan.fallbacks,
        "profiles": {profile.name: [profile.tokens, profile.sequences, profile.longest] for profile in plan.profiles},
        "certificate": artifact.certificate.verdict,
    }


def _keep(name: str, found: dict[str, Any]) -> None:
    """Write ``found`` beside what other runs have left in the results."""
    file = RESULTS / "rtx-build.json"
    results = json.loads(file.read_bytes())["results"] if file.is_file() else {}
    write("rtx-build", {**results, name: found})


if __name__ == "__main__":
    main()
