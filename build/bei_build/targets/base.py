"""Compilers: a model's spec and weights in, engine files out. One module a target, chosen by ``compiler_for``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from bei.artifact.manifest import EngineRequirements
from bei.core import Limits
from bei_build.onnx_graph.writer import Observed
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.quantization import Quantization
from bei_build.weights.model_weights import ModelWeights

if TYPE_CHECKING:
    pass

# Shows what a compiler is at, beside the step's title: "tactics 120 of 400".
Say: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class Numerics:
    """In which numbers an engine computes: a precision that its target has, and how linear layers are quantized.

    ``observed``: outputs by name beside the model's own, of linear layers, for calibration.
    """

    precision: str
    quantization: Quantization | None = None
    observed: Mapping[str, Observed] = field(default_factory=dict)


class Compiler(Protocol):
    """What a target does. ``compile`` writes into an existing empty folder."""

    precisions: tuple[str, ...]
    calibrated: tuple[str, ...]  # those of them that need a quantization
    shows_layers: bool  # whether engines can have the inputs of linear layers as outputs, for calibration
    longest_by_default: int  # tokens of a sequence, unless the user asks for more: what they cost is theirs to decide

    @property
    def matrix_bits(self) -> int:
        """Of matrices in a calibrated precision: 8, or what this machine computes with exactly."""

    def resolve_precision(self, precision: str) -> str:
        """The precision that ``auto`` means on this machine, or ``precision`` itself. Raises ConfigError."""

    def default_limits(self, max_seq_len: int) -> Limits:
        """Limits that suit the target, for sequences of up to ``max_seq_len`` tokens."""

    def check_able(self) -> None:
        """Raise CompileError or MissingDependencyError, saying why, if this machine cannot build for the target."""

    def cannot_run(self) -> str | None:
        """Why engines of this build cannot run on this machine: "this machine has no NVIDIA GPU". None where they can.

        A build for another machine's device is verified there.
        """

    def machine(self) -> list[str]:
        """What an engine depends on of the machine that builds it, and of the compiler: its name in a cache."""

    def compile(
        self, spec: ModelSpec, weights: ModelWeights, numerics: Numerics, limits: Limits, folder: Path, say: Say
    ) -> EngineRequirements:
        """Compile ``spec`` into ``folder``; returns what the engine needs of a machine. Raises CompileError."""
