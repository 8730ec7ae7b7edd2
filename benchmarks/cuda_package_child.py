"""A process of ``benchmarks.cuda_package``, with the modules of the checkout that it measures: ``build FOLDER LAYERS``
or ``load FOLDER``. It answers a line of JSON, and waits for the end of its standard input."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from bei.artifact.manifest import EngineRequirements, OutputInfo
from bei.core import Limits, PackedBatch
from benchmarks.gpu.shapes import SHAPES, Sizes

_LIMITS = Limits(max_num_tokens=1024, max_batch_size=32, max_seq_len=1024)
_HIDDEN = 2048
_KEPT: list[object] = []  # an engine that nobody has would unload its package


def main() -> None:
    what, folder, *layers = sys.argv[1:]
    found = build(Path(folder), *map(int, layers)) if what == "build" else load(Path(folder))
    print(json.dumps(found), flush=True)
    sys.stdin.read()


def build(folder: Path, layers: int) -> dict[str, Any]:
    """Compile a Llama's shape with random weights into ``folder``."""
    from bei_build.config import BuildConfig
    from bei_build.targets.base import Numerics
    from bei_build.targets.choose import compiler_for

    sizes = Sizes(layers, hidden=_HIDDEN, heads=32, inner=8192, vocab=32_000, kv_heads=8)
    spec = replace(SHAPES["mistral-7b"], sizes=sizes).spec
    shapes: Mapping[str, tuple[int, ...]] = dict(spec.weights())
    rng = np.random.default_rng(0)

    def read(name: str) -> npt.NDArray[np.float32]:
        values = rng.standard_normal(shapes[name], np.float32)
        values *= 0.02
        return values

    compiler = compiler_for(BuildConfig(model="random", target="cuda-twin"))
    weights: Any = SimpleNamespace(read=read)
    needs = compiler.compile(spec, weights, Numerics("bf16"), _LIMITS, folder, lambda _: None)
    (folder / "needs.json").write_bytes(msgspec.json.encode(needs))
    return {"parameters, millions": round(spec.num_parameters / 1e6)}


def load(folder: Path) -> dict[str, Any]:
    """Load what ``build`` wrote, and answer a text."""
    from bei.engine.cuda.engine import CudaEngine, CudaOptions

    manifest: Any = SimpleNamespace(
        name="random",
        target="cuda-twin",
        precision="bf16",
        engine=msgspec.json.decode((folder / "needs.json").read_bytes(), type=EngineRequirements),
        limits=_LIMITS,
        outputs=[OutputInfo(name="embedding", dimension=_HIDDEN)],
    )
    started = time.monotonic()
    engine = CudaEngine(folder, manifest, CudaOptions(num_streams=1))
    loaded = time.monotonic()
    engine.run(PackedBatch(np.arange(8, dtype=np.int32), np.array([0, 8], np.int32)))
    _KEPT.append(engine)
    found = {"seconds": round(loaded - started, 2), "seconds of a text": round(time.monotonic() - loaded, 2)}
    return {**found, **_memory(), "in the temporary folder, MB": _unpacked_mb()}


def _unpacked_mb() -> float:
    """What PyTorch keeps of packages in the temporary folder, for all processes that have loaded them."""
    paths = (path for folder in Path(tempfile.gettempdir()).glob("aotinductor_*") for path in folder.rglob("*"))
    return round(sum(path.stat().st_size for path in paths if path.is_file()) / 1e6, 1)


def _memory() -> dict[str, float]:
    """Of this process in MB: what no other process can share, and its share of all (Pss)."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    in_kb = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB", rollup, re.MULTILINE)}
    return {
        f"{name}, MB": round(in_kb[field] * 1.024e-3) for name, field in (("anonymous", "Anonymous"), ("Pss", "Pss"))
    }


if __name__ == "__main__":
    main()
