"""A real GPU with a real library: a plan is built, loaded, run and compared, and both profiles are timed.

``pytest -m gpu tests/bei/engine/tensorrt/test_gpu.py --log-cli-level=INFO`` shows the times. Not run yet.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from bei.artifact.manifest import TENSORRT_PLAN, EngineRequirements, OutputInfo, Plan, PlanProfile
from bei.engine.nvidia import LIBRARIES, Gpu, current_gpu, load_cuda, load_library
from bei.engine.packing import graph_inputs
from bei.engine.recorded_steps import GpuOptions
from bei.engine.tensorrt.cuda import Cuda
from bei.engine.tensorrt.engine import TensorRTEngine
from bei.errors import BeiError
from bei_build.onnx_graph.attention import AttentionCore
from bei_build.spec.dtypes import DType
from bei_build.targets.tensorrt.plan import PlanSettings, write_plan
from tests.bei.engine.tensorrt.rig import batch_of
from tests.bei_build.targets.tiny import HIDDEN, graph_of, tiny_spec
from tests.support.artifacts import save_artifact

log = logging.getLogger(__name__)
pytestmark = pytest.mark.gpu

LATENCY = PlanProfile(name="latency", tokens=(1, 64, 544), sequences=(1, 1, 8), longest=(1, 64, 72))
THROUGHPUT = PlanProfile(name="throughput", tokens=(1, 4096, 4352), sequences=(1, 64, 136), longest=(1, 64, 72))
_RUNS = 200


def found(target: str) -> tuple[Any, Gpu]:
    """The library and the GPU; skips the test where one is missing."""
    try:
        gpu = current_gpu(load_cuda("This test", target))
        trt = load_library(target, "This test")
    except BeiError as error:
        pytest.skip(str(error))
    if target == "tensorrt-rtx" and gpu.architecture not in trt.ComputeCapability.__members__:
        pytest.skip(f"TensorRT-RTX {trt.__version__} does not run on {gpu.name} ({gpu.architecture})")
    return trt, gpu


def build(target: str, trt: Any, gpu: Gpu, graph: Path, plan: Path) -> None:
    """Write the file ``plan`` with both profiles, as bei_build does, for the GPU of this machine."""
    capabilities = (gpu.capability,) if target == "tensorrt-rtx" else ()
    settings = PlanSettings(profiles=(LATENCY, THROUGHPUT), capabilities=capabilities)
    assert write_plan(trt, graph, ["padded", "padded"], settings, plan, lambda _: None) == []


class Loaded:
    """An engine and the graph that its plan was built of."""

    def __init__(self, engine: TensorRTEngine, graph: Path) -> None:
        self.engine = engine
        self.session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
        self.names = [value.name for value in self.session.get_inputs()]

    def check(self, lengths: list[int], seed: int) -> None:
        """The engine answers as ONNX Runtime does, to half precision."""
        batch = batch_of(lengths, seed)
        expected = self.session.run(["embedding"], graph_inputs(batch, self.names))[0][: batch.batch_size]
        answers = self.engine.run(batch)["embedding"]
        norms = np.linalg.norm(answers, axis=1) * np.linalg.norm(expected, axis=1)
        assert ((answers * expected).sum(axis=1) / norms).min() > 0.999


@pytest.fixture(params=[*LIBRARIES])
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Loaded]:
    trt, gpu = found(request.param)
    graph = graph_of(tiny_spec(), tmp_path / "graph", DType.FP16, AttentionCore.TRT_ATTENTION)
    about = Plan(lowerings=["padded", "padded"], fallbacks=[], profiles=[LATENCY, THROUGHPUT])
    engine = EngineRequirements(
        compiler=request.param,
        compiler_version=trt.__version__,
        device=gpu.name,
        capabilities=[gpu.architecture],
        plan=about,
    )
    artifact = save_artifact(
        tmp_path / "artifact",
        target=request.param,
        precision="fp16",
        outputs=[OutputInfo(name="embedding", dimension=HIDDEN)],
        engine=engine,
        max_num_tokens=4096,
        max_batch_size=128,
        max_seq_len=64,
    )
    build(request.param, trt, gpu, graph, artifact.engine_dir / TENSORRT_PLAN)
    loaded = Loaded(TensorRTEngine(artifact.engine_dir, artifact.manifest, GpuOptions()), graph)
    loaded.engine.warmup()
    yield loaded
    loaded.engine.close()


def test_a_plan_answers_as_its_graph_does(loaded: Loaded) -> None:
    for seed, lengths in enumerate(([3], [5, 6, 7], [64], [64] * 60, [1] * 128, [30] * 100)):
        loaded.check(lengths, seed)


def test_small_batches_are_launched_as_they_were_recorded(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    if loaded.engine.info.target != "tensorrt":
        pytest.skip("TensorRT-RTX records by itself, and does not say what it launches")
    launched: list[None] = []
    launch = Cuda.launch

    def counted(self: Cuda, executable: Any, stream: Any) -> None:
        launched.append(None)
        launch(self, executable, stream)

    monkeypatch.setattr(Cuda, "launch", counted)
    loaded.check([12], 1)
    assert len(launched) == 1


def test_two_batches_in_flight_answer_as_one(loaded: Loaded) -> None:
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(loaded.check, [7 + seed % 40] * (1 + seed), seed) for seed in range(60)]:
            done.result()


def test_steps_of_both_profiles_are_timed(loaded: Loaded) -> None:
    per_text = []
    for title, lengths in (("one text", [12]), ("eight texts", [12] * 8), ("full step", [32] * 128)):
        batch = batch_of(lengths)
        loaded.engine.run(batch)
        started = time.perf_counter()
        for _ in range(_RUNS):
            loaded.engine.run(batch)
        microseconds = (time.perf_counter() - started) / _RUNS * 1e6
        info = loaded.engine.info
        log.info("%s, %s, %s: %.0f us a step", info.target, info.device, title, microseconds)
        per_text.append(microseconds / len(lengths))
    assert per_text == sorted(per_text, reverse=True)  # more texts a step, less time a text
