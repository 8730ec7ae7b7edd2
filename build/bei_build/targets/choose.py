"""Choice of a build's compiler, and of the target that ``auto`` means on this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bei.errors import BeiError, BrokenDependencyError, ConfigError

if TYPE_CHECKING:
    from bei_build.config import BuildConfig
from bei_build.config import TARGETS
from bei_build.targets.base import Compiler

# Targets for "auto", best first; the last one needs no device.
_BEST_FIRST = ("tensorrt", "cuda", "cpu")


def compiler_for(config: BuildConfig) -> Compiler:
    """The compiler of ``config.target``, with its own settings."""
    if config.target == "cpu":
        from bei_build.targets.openvino import OpenVINOCompiler

        return OpenVINOCompiler()
    if config.target in ("tensorrt", "tensorrt-rtx"):
        from bei_build.targets.tensorrt.compiler import TensorRTCompiler

        return TensorRTCompiler(config)
    if config.target in ("cuda", "cuda-twin"):
        from bei_build.targets.cuda import CudaCompiler

        return CudaCompiler(config.target, config.precision, config.compute_capability)
    if config.target == "trtllm":
        from bei_build.targets.trtllm import TRTLLMCompiler

        return TRTLLMCompiler()
    raise ConfigError(f"Target {config.target!r} is not known. Targets: {', '.join(TARGETS)}.")


def with_target(config: BuildConfig) -> BuildConfig:
    """``config`` with the target that "auto" means on this machine: the first that can be built here.

    TensorRT if it and a GPU are present, else PyTorch's packages if its CUDA and a GPU are, else the CPU. Raises
    BrokenDependencyError where a library of one is installed and cannot be loaded.
    """
    if config.target != "auto":
        return config
    for target in _BEST_FIRST[:-1]:
        candidate = replace(config, target=target)
        try:
            compiler_for(candidate).check_able()
        except BrokenDependencyError:  # the user has installed it, so it must not be skipped silently
            raise
        except BeiError:
            continue
        return candidate
    return replace(config, target=_BEST_FIRST[-1])
