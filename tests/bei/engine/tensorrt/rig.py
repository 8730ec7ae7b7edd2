"""A TensorRT artifact on a simulated device. Its graph is a tiny model's, so that outputs can be checked.

``Rig`` holds device, library and stand-in; ``engine()`` loads. ``expected`` gives the graph's outputs in ONNX Runtime.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import onnxruntime

from bei.artifact.manifest import (
    TENSORRT_GRAPH,
    TENSORRT_PLAN,
    EngineRequirements,
    Manifest,
    OutputInfo,
    Plan,
    PlanProfile,
)
from bei.core import Float32Array, PackedBatch
from bei.engine.packing import graph_inputs
from bei.engine.recorded_steps import GpuOptions
from bei.engine.tensorrt.engine import TensorRTEngine
from bei_build.onnx_graph.attention import AttentionCore
from bei_build.spec.dtypes import DType
from bei_build.spec.model_spec import ModelSpec
from tests.bei.engine.tensorrt.device import Device
from tests.bei.engine.tensorrt.library import Library
from tests.bei.engine.tensorrt.plans import plan_bytes
from tests.bei_build.targets.tiny import HIDDEN, VOCABULARY, graph_of
from tests.support.artifacts import save_artifact
from tests.support.standin import stand_in
from tests.tensorrt_stubs.generation import stub_of

MODULES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
MAX_NUM_TOKENS, MAX_BATCH_SIZE, MAX_SEQ_LEN = 256, 16, 64
LATENCY = PlanProfile(name="latency", tokens=(1, 32, 72), sequences=(1, 1, 4), longest=(1, 32, 72))
THROUGHPUT = PlanProfile(name="throughput", tokens=(1, 256, 272), sequences=(1, 16, 16), longest=(1, 32, 72))
OUTPUTS = [OutputInfo(name="embedding", dimension=HIDDEN)]
GRAPHS_MB = 1000


class Graphs:
    """Written once: the tiny model's graph, or another's."""

    def __init__(self, folder: Path, spec: ModelSpec, outputs: list[OutputInfo]) -> None:
        self.path = graph_of(spec, folder, DType.FP32, AttentionCore.TRT_ATTENTION)
        self.outputs = outputs
        self.session = onnxruntime.InferenceSession(str(self.path), providers=["CPUExecutionProvider"])
        self.input_names = [value.name for value in self.session.get_inputs()]

    def expected(self, batch: PackedBatch) -> dict[str, Float32Array]:
        """Outputs of the graph in ONNX Runtime, without filler rows."""
        names = [output.name for output in self.outputs]
        answers = self.session.run(names, graph_inputs(batch, self.input_names))
        rows = {output.name: batch.num_tokens if output.per_token else batch.batch_size for output in self.outputs}
        return {name: answer[: rows[name]] for name, answer in zip(names, answers, strict=True)}


class Rig:
    """A plan of ``graphs`` in ``folder``, and a device to run it on. Keywords change the descriptions of manifest,
    plan or device."""

    def __init__(
        self,
        folder: Path,
        graphs: Graphs,
        *,
        target: str = "tensorrt",
        device: Device | None = None,
        profiles: Sequence[PlanProfile] = (LATENCY, THROUGHPUT),
        compiled_profiles: Sequence[PlanProfile] | None = None,
        capabilities: Sequence[str] = ("SM90",),
        compiler_version: str | None = None,
        hardware_compatible: bool = False,
        refit: bool = False,
        activation_bytes: int = 5000,
    ) -> None:
        self.graphs = graphs
        self.device = device or Device()
        stub = stub_of(MODULES[target])
        self.version = _version(target)
        self.library = Library(self.device, self.version)
        behaviours = self.library.behaviours(is_rtx=target == "tensorrt-rtx")
        self.trt: ModuleType = stand_in(stub, MODULES[target], behaviours)
        self.folder = folder / "artifact" / "engine"
        about = Plan(
            lowerings=["padded", "padded"],
            fallbacks=[],
            profiles=list(profiles),
            hardware_compatible=hardware_compatible,
            refit=refit,
        )
        self.manifest: Manifest = save_artifact(
            folder / "artifact",
            target=target,
            outputs=graphs.outputs,
            engine=EngineRequirements(
                compiler="tensorrt",
                compiler_version=compiler_version or self.version,
                device="NVIDIA H200",
                capabilities=list(capabilities),
                plan=about,
            ),
            max_num_tokens=MAX_NUM_TOKENS,
            max_batch_size=MAX_BATCH_SIZE,
            max_seq_len=MAX_SEQ_LEN,
        ).manifest
        compiled = list(profiles if compiled_profiles is None else compiled_profiles)
        self.plan = plan_bytes(
            graphs.path, compiled, self.version, has_weights=not refit, activation_bytes=activation_bytes
        )
        (self.folder / TENSORRT_PLAN).write_bytes(self.plan)
        if refit:
            for file in graphs.path.parent.iterdir():
                name = TENSORRT_GRAPH if file == graphs.path else file.name
                (self.folder / name).write_bytes(file.read_bytes())

    def load(self, num_streams: int = 2, cuda_graphs: int = 0) -> TensorRTEngine:
        """The engine, which the caller closes."""
        options = GpuOptions(num_streams, cuda_graphs)
        return TensorRTEngine(self.folder, self.manifest, options, trt=self.trt, cuda=self.device.module())

    @contextmanager
    def engine(self, num_streams: int = 2, cuda_graphs: int = 0, *, warm: bool = False) -> Iterator[TensorRTEngine]:
        """The engine; at the end nothing of it may be left on the device, and no rule broken."""
        engine = self.load(num_streams, cuda_graphs)
        try:
            if warm:
                engine.warmup()
            yield engine
        finally:
            engine.close()
        self.check_clean()

    def check_clean(self) -> None:
        """Check that nothing is left on the device, and no rule was broken."""
        gc.collect()
        assert self.device.violations == []
        assert self.library.contexts == []
        assert self.device.leaks() == []

    def describe(self, **changes: Any) -> None:
        """Change the manifest's description of the engine."""
        engine = msgspec.structs.replace(self.manifest.engine, **changes)
        self.manifest = msgspec.structs.replace(self.manifest, engine=engine)

    def check(self, engine: TensorRTEngine, batch: PackedBatch, outputs: frozenset[str] | None = None) -> None:
        """Check that the engine's outputs are the graph's."""
        answers = engine.run(batch, outputs)
        expected = self.graphs.expected(batch)
        assert set(answers) == (set(expected) if outputs is None else outputs)
        for name, rows in answers.items():
            assert rows.dtype == np.float32
            assert rows.flags.owndata
            np.testing.assert_allclose(rows, expected[name], rtol=0, atol=2e-5)


@cache
def _version(target: str) -> str:
    version: str = stand_in(stub_of(MODULES[target]), MODULES[target], {}).__version__
    return version


def batch_of(lengths: Sequence[int], seed: int = 0) -> PackedBatch:
    """Random token ids, sequences of ``lengths``."""
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, sum(lengths)).astype(np.int32)
    return PackedBatch(ids, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
