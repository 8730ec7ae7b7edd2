"""Inputs and output folder of one build, and bei's own FP32 engine of the same model, for calibration and reference."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bei.artifact.manifest import ENGINE_DIR, EngineRequirements, Manifest, OutputInfo
from bei.core import Engine, Limits
from bei_build import memory
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.config import BuildConfig
from bei_build.onnx_graph.writer import ObservedTensor
from bei_build.targets.base import Compiler, Numerics, Say
from bei_build.targets.choose import compiler_for
from bei_build.weights.model_weights import ModelWeights

# Opens a compiled engine; it is the runtime's loader, so that the verified engine is the served one.
OpenEngine = Callable[[Path, Manifest], Engine]

# Makes the artifact's manifest from its engine's requirements.
Describe = Callable[[EngineRequirements], Manifest]


@dataclass(frozen=True)
class Job:
    """One build. ``root`` is the artifact under construction; ``precision`` is never "auto"."""

    config: BuildConfig
    compiler: Compiler
    precision: str
    checkpoint: Checkpoint
    weights: ModelWeights
    limits: Limits
    root: Path
    describe: Describe
    open_engine: OpenEngine
    engine_dir: str = ENGINE_DIR

    def compile(self, numerics: Numerics, say: Say) -> EngineRequirements:
        """Write the engine folder of the artifact; returns the engine's requirements. Raises CompileError."""
        folder = self.root / self.engine_dir
        folder.mkdir()
        return self.compiler.compile(self.checkpoint.spec, self.weights, numerics, self.limits, folder, say)


@contextmanager
def open_fp32(job: Job, purpose: str, observed: Mapping[str, ObservedTensor]) -> Iterator[tuple[Engine, str]]:
    """bei's own FP32 engine of the job's model and its compiler's name, with additional outputs ``observed``.

    Raises VerificationError where memory does not suffice, and the errors of compilers and engines.
    """
    memory.require(4 * job.checkpoint.spec.num_parameters, purpose)
    compiler = fp32_compiler(job.config, job.compiler, shows_layers=bool(observed))
    with tempfile.TemporaryDirectory(dir=job.root) as folder:
        numerics = Numerics("fp32", observed=observed)
        needs = compiler.compile(job.checkpoint.spec, job.weights, numerics, job.limits, Path(folder), lambda _: None)
        described = job.describe(needs)
        inputs = [OutputInfo(name=name, dimension=it.width, per_token=True) for name, it in observed.items()]
        manifest = msgspec.structs.replace(
            described,
            target=job.config.target if compiler is job.compiler else "cpu",
            precision="fp32",
            outputs=[*described.outputs, *inputs],
        )
        with closing(job.open_engine(Path(folder), manifest)) as engine:
            yield engine, needs.compiler


def fp32_compiler(config: BuildConfig, compiler: Compiler, *, shows_layers: bool = False) -> Compiler:
    """The compiler of bei's own FP32 engine: the target's, or the CPU's where the target's engines cannot run, not in
    FP32 or, if ``shows_layers``, without the outputs for calibration."""
    is_able = "fp32" in compiler.precisions and compiler.cannot_run() is None
    is_able = is_able and (compiler.shows_layers or not shows_layers)
    return compiler if is_able else compiler_for(BuildConfig(model=config.model))
