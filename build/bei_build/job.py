"""What one build makes, and bei's own FP32 engine of the same model, which calibrates and may be the reference."""

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
from bei_build.onnx_graph.writer import Observed
from bei_build.targets.base import Compiler, Numerics, Say
from bei_build.targets.choose import compiler_for
from bei_build.weights.model_weights import ModelWeights

# Opens a compiled engine; the runtime's loader is handed in, so that what is verified is what will be served.
OpenEngine = Callable[[Path, Manifest], Engine]

# The manifest of an artifact whose engine needs this.
Describe = Callable[[EngineRequirements], Manifest]


@dataclass(frozen=True)
class Job:
    """``root`` is the artifact under construction; ``precision`` is never "auto"."""

    config: BuildConfig
    compiler: Compiler
    precision: str
    checkpoint: Checkpoint
    weights: ModelWeights
    limits: Limits
    root: Path
    describe: Describe
    open_engine: OpenEngine

    def compile(self, numerics: Numerics, say: Say) -> EngineRequirements:
        """Write the engine folder of the artifact, and say what the engine needs. Raises CompileError."""
        folder = self.root / ENGINE_DIR
        folder.mkdir()
        return self.compiler.compile(self.checkpoint.spec, self.weights, numerics, self.limits, folder, say)


@contextmanager
def opened_fp32(job: Job, purpose: str, observed: Mapping[str, Observed]) -> Iterator[tuple[Engine, str]]:
    """bei's own FP32 engine of the job's model and its compiler's name, with outputs ``observed`` beside the model's.

    Raises VerificationError where there is not memory enough, and what compilers and engines raise.
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
    """Of bei's own FP32 engine. Where the target's engines cannot run, not in FP32 or, if they are to show layers,
    without what calibration looks at, the CPU's can."""
    is_able = "fp32" in compiler.precisions and compiler.cannot_run() is None
    is_able = is_able and (compiler.shows_layers or not shows_layers)
    return compiler if is_able else compiler_for(BuildConfig(model=config.model))
