"""What can be built and served here, asked of the functions that ``bei build`` and ``bei serve`` use."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bei.cli.doctor.guarded import Unknowns, reason_of
from bei.cli.doctor.report import Answer, Nvidia, Target
from bei.cli.doctor.system import lacking_for_builds
from bei.engine.nvidia import LIBRARIES, RTX_CAPABILITIES, current_gpu, load_cuda, load_library
from bei.engine.openvino import cpu_capabilities
from bei.engine.pytorch import LEAST, found_gpu, load_torch
from bei.errors import (
    ArtifactWrongDeviceError,
    BeiError,
    BrokenDependencyError,
    DeviceNotFoundError,
    LibraryVersionError,
    MissingDependencyError,
)

TARGETS = ("cpu", "tensorrt", "tensorrt-rtx", "cuda", "trtllm")
ENGINES = {
    "cpu": "bei.engine.openvino",
    "tensorrt": "bei.engine.tensorrt",
    "tensorrt-rtx": "bei.engine.tensorrt",
    "cuda": "bei.engine.cuda",
    "trtllm": "bei.engine.trtllm",
}
ELSEWHERE = ("89", "120")  # compute capabilities that tensorrt-rtx is asked about where this machine has none

_BUILDS_ON_ITS_GPU = ("tensorrt", "cuda")

# Not the extra: pip is content with a PyTorch without CUDA.
_TORCH_REMEDY = f"install a build of PyTorch with CUDA, {'.'.join(map(str, LEAST))} or newer"


class Compiler(Protocol):
    """What is asked of a compiler of the builder, ``bei_build.targets.base.Compiler``."""

    precisions: tuple[str, ...]

    def resolve_precision(self, precision: str) -> str: ...

    def check_able(self) -> None: ...

    def cannot_run(self) -> str | None: ...


@dataclass(frozen=True)
class Builder:
    """The builder, as the CLI hands it over.

    ``compiler_for``: of a target and compute capabilities; none are this machine's. ``probed``: of a target, whether
    each of ``(capability, precision, form, head size)`` has a fused kernel, as ``bei_build.targets.attention_probe``.
    """

    targets: tuple[str, ...]
    compiler_for: Callable[[str, tuple[str, ...]], Compiler]
    forms: tuple[str, ...]
    precisions: tuple[str, ...]
    probed: Callable[[str, Sequence[tuple[int | None, str, str, int]]], Iterator[Any]]


def target_facts(
    name: str, builder: Builder | BeiError, capabilities: tuple[str, ...], nvidia: Nvidia, unknowns: Unknowns
) -> Target:
    """``builder``: the error that says why there is none. ``capabilities``: what tensorrt-rtx builds for, or ()."""
    compiler, build_error = _compiler(name, builder, capabilities, nvidia, unknowns)
    serve_errors = list(_why_no_serving(name))
    is_built = compiler is not None and build_error is None
    cannot_run = (
        unknowns.ask(f"whether this machine runs what it builds for {name}", compiler.cannot_run)
        if (compiler is not None and is_built)
        else None
    )
    return Target(
        name=name,
        can_build=_answer([build_error] if build_error else []),
        can_serve=_answer(serve_errors),
        cannot_run=cannot_run or "",
        precisions=_precisions(compiler) if compiler is not None and is_built else [],
        auto=unknowns.ask(f"what precision auto is for {name}", compiler.resolve_precision, "auto")
        if compiler is not None and is_built
        else None,
        next_step=_next_step(name, build_error, serve_errors, nvidia),
    )


class NotInThisVersionError(BeiError):
    """Nothing that is installed would help."""


def _compiler(
    name: str, builder: Builder | BeiError, capabilities: tuple[str, ...], nvidia: Nvidia, unknowns: Unknowns
) -> tuple[Compiler | None, Exception | None]:
    """The compiler, and why it cannot build here; None for neither."""
    if isinstance(builder, BeiError):
        return None, builder
    if name not in builder.targets:
        return None, NotInThisVersionError(f"this version of bei has no target {name} yet")
    lacking = unknowns.ask("whether all packages that builds need are installed", lacking_for_builds)
    if lacking:
        extra = {"trtllm": "build"}.get(name, name)  # that of trtllm is for serving
        return None, MissingDependencyError(lacking[0], extra, "Building an artifact")
    asked: list[tuple[str, ...]] = [()]
    if name == "tensorrt-rtx":  # it builds for GPUs that are not here
        asked = [capabilities] if capabilities else [*([()] if nvidia.state == "ready" else []), ELSEWHERE]
    error: Exception | None = None
    for choice in asked:
        try:
            compiler = builder.compiler_for(name, choice)
            compiler.check_able()
        except Exception as why:  # a compiler's library may raise anything; what is no BeiError is "unknown"
            error = why
        else:
            return compiler, None
    return None, error


def _precisions(compiler: Compiler) -> list[str]:
    """Those that a build would accept on this machine."""
    accepted = []
    for precision in compiler.precisions:
        try:
            accepted.append(compiler.resolve_precision(precision))
        except BeiError:
            continue
    return accepted


def _why_no_serving(name: str) -> Iterator[Exception]:
    """Each thing that an engine of the target would miss on this machine."""
    module = ENGINES.get(name)
    if module is None or importlib.util.find_spec(module) is None:
        yield NotInThisVersionError("this version of bei has no engine for it yet")
        return
    purpose = f"Serving for the target {name}"
    checks: list[Callable[[], object]] = [
        lambda: load_cuda(purpose, name),
        lambda: _check_gpu(name, purpose),
    ]
    if name == "cpu":
        checks = [cpu_capabilities]
    elif name == "cuda":
        checks = [lambda: found_gpu(load_torch(purpose), purpose)]
    elif name in LIBRARIES:
        checks.insert(0, lambda: load_library(name, purpose))
    else:
        checks.insert(0, lambda: _find("tensorrt_llm", name, purpose))
    for check in checks:
        try:
            check()
        except Exception as error:  # a foreign library may raise anything; what is no BeiError is "unknown"
            yield error


def _check_gpu(name: str, purpose: str) -> None:
    """TensorRT-RTX has plans for some GPUs only. Raises ArtifactWrongDeviceError, and what finding the GPU raises."""
    gpu = current_gpu(load_cuda(purpose, name))
    if name == "tensorrt-rtx" and gpu.capability not in RTX_CAPABILITIES:
        known = ", ".join(f"{one // 10}.{one % 10}" for one in RTX_CAPABILITIES)
        raise ArtifactWrongDeviceError(
            f"TensorRT-RTX has no plans for {gpu.name} ({gpu.architecture}), only for compute capability {known}: use "
            "--target tensorrt."
        )


def _find(package: str, extra: str, purpose: str) -> None:
    """Importing TensorRT-LLM takes the GPU and a minute, so it is only looked for."""
    if importlib.util.find_spec(package) is None:
        raise MissingDependencyError(package, extra, purpose)


def _answer(errors: Sequence[Exception]) -> Answer:
    if not errors:
        return Answer("yes")
    reasons = list(dict.fromkeys(reason_of(error) for error in errors))
    is_known = all(isinstance(error, BeiError) for error in errors)
    return Answer("no" if is_known else "unknown", " ".join(reasons))


def _next_step(name: str, build_error: Exception | None, serve_errors: list[Exception], nvidia: Nvidia) -> str:
    """What the user can do about the errors; empty where nothing can be done, or need be."""
    if any(isinstance(error, NotInThisVersionError) for error in serve_errors) and build_error is not None:
        return ""
    to_build = _remedies([build_error] if build_error else [], name, nvidia)
    if to_build and name in _BUILDS_ON_ITS_GPU and nvidia.state != "ready":
        to_build = [gpu_remedy(nvidia), *to_build]
    to_serve = _remedies(serve_errors, name, nvidia)
    build, serve = (", then ".join(dict.fromkeys(steps)) for steps in (to_build, to_serve))
    if not (build and serve) or set(to_build) == set(to_serve):
        return build or serve
    return f"to build: {build}; to serve: {serve}"


def _remedies(errors: Sequence[Exception], name: str, nvidia: Nvidia) -> list[str]:
    steps = []
    for error in errors:
        if isinstance(error, (MissingDependencyError, BrokenDependencyError)):
            steps.append(error.remedy)
        elif isinstance(error, LibraryVersionError):
            steps.append(_TORCH_REMEDY if name == "cuda" else f"pip install 'bei[{name}]'")
        elif isinstance(error, DeviceNotFoundError):
            steps.insert(0, gpu_remedy(nvidia))
    return steps


def gpu_remedy(nvidia: Nvidia) -> str:
    """What gives this machine a GPU that CUDA can use; empty where it has one."""
    cuda = f"CUDA {nvidia.driver_cuda // 1000}.{nvidia.driver_cuda % 1000 // 10}" if nvidia.driver_cuda else "no CUDA"
    return {
        "ready": "",
        "absent": "take a machine with an NVIDIA GPU",
        "no driver": "install NVIDIA's driver, 580 or newer",
        "hidden": "let this process see the GPU (docker run --gpus all; CUDA_VISIBLE_DEVICES)",
        "old driver": f"update NVIDIA's driver to 580 or newer: {nvidia.driver or 'this one'} serves {cuda}, "
        "cuda-python needs 13",
        "no cuda-python": "pip install 'bei[tensorrt]'",
        "failed": f"see what nvidia-smi says about {nvidia.problem or 'the GPU'}",
    }[nvidia.state]
