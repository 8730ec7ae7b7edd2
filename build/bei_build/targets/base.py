"""Compilers: a model's spec and weights in, engine files out. One module per target, selected by ``compiler_for``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from bei.artifact.manifest import EngineRequirements
from bei.core import Limits
from bei_build.onnx_graph.writer import ObservedTensor
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.quantization import Quantization
from bei_build.weights.model_weights import ModelWeights

if TYPE_CHECKING:
    pass

# Shows a compiler's progress beside the step's title: "tactics 120 of 400".
Say: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class Numerics:
    """Number formats of an engine: a precision of its target, and the quantization of linear layers.

    ``observed``: additional outputs by name, taken from linear layers, for calibration.
    """

    precision: str
    quantization: Quantization | None = None
    observed: Mapping[str, ObservedTensor] = field(default_factory=dict)


class Compiler(Protocol):
    """Interface of targets. ``compile`` writes into an existing empty folder."""

    precisions: tuple[str, ...]
    calibrated: tuple[str, ...]  # the precisions that need a quantization
    shows_layers: bool  # True if engines can output the inputs of linear layers, for calibration
    longest_by_default: int  # default for most tokens of a sequence; the user may accept the cost of more

    @property
    def matrix_bits(self) -> int:
        """Bits of matrices in a calibrated precision: 8, or fewer where this machine computes exactly only with
        those."""

    def resolve_precision(self, precision: str) -> str:
        """The precision that ``auto`` means on this machine, or ``precision`` itself. Raises ConfigError."""

    def default_limits(self, max_seq_len: int) -> Limits:
        """Limits that suit the target, for sequences of up to ``max_seq_len`` tokens."""

    def check_able(self) -> None:
        """Raise CompileError or MissingDependencyError, with the reason, if this machine cannot build for the
        target."""

    def cannot_run(self) -> str | None:
        """The reason why engines of this build cannot run on this machine: "this machine has no NVIDIA GPU". None where
        they can.

        A build for another machine's device is verified there.
        """

    def machine(self) -> list[str]:
        """Properties of the build machine and of the compiler on which an engine depends; part of a cache key."""

    def compile(
        self, spec: ModelSpec, weights: ModelWeights, numerics: Numerics, limits: Limits, folder: Path, say: Say
    ) -> EngineRequirements:
        """Compile ``spec`` into ``folder``; returns the engine's requirements for a machine. Raises CompileError."""
