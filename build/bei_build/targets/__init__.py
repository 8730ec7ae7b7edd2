"""Compilers: packed ONNX graph in, engine files out. One module a target, chosen by ``compiler_for``."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from bei.artifact import EngineRequirements
from bei.core import Limits
from bei.errors import ConfigError
from bei_build.model_weights import ModelWeights
from bei_build.spec import ModelSpec


class Compiler(Protocol):
    """What a target does. ``compile`` writes into an existing empty folder."""

    precisions: tuple[str, ...]
    longest_by_default: int  # tokens of a sequence, unless the user asks for more: what they cost is theirs to decide

    def resolve_precision(self, precision: str) -> str:
        """The precision that ``auto`` means on this machine, or ``precision`` itself. Raises ConfigError."""

    def default_limits(self, max_seq_len: int) -> Limits:
        """Limits that suit the target, for sequences of up to ``max_seq_len`` tokens."""

    def check_able(self) -> None:
        """Raise CompileError or MissingDependencyError, saying why, if this machine cannot build for the target."""

    def compile(
        self, spec: ModelSpec, weights: ModelWeights, precision: str, limits: Limits, folder: Path
    ) -> EngineRequirements:
        """Compile ``spec`` into ``folder``; returns what the engine needs of a machine. Raises CompileError."""


TARGETS = ("cpu", "tensorrt")


def compiler_for(target: str) -> Compiler:
    """The compiler of ``target``; ConfigError names the known ones."""
    if target == "cpu":
        from bei_build.targets.openvino import OpenVINOCompiler

        return OpenVINOCompiler()
    if target == "tensorrt":
        from bei_build.targets.tensorrt import TensorRTCompiler

        return TensorRTCompiler()
    raise ConfigError(f"Target {target!r} is not known. Targets: {', '.join(TARGETS)}.")
