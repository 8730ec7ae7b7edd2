"""Targets that can be built and served here, by the functions of ``bei build`` and ``bei serve``; fused attention."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from bei.cli.doctor.facts import LibraryFacts, Nvidia, Unknowns, lacking_for_builds, reason_of
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
HEAD_SIZES = (32, 64, 80, 96, 128, 256)
ELSEWHERE = ("89", "120")  # compute capabilities that these are asked about where this machine has none
_BUILDS_FOR_OTHERS = ("tensorrt-rtx", "cuda")

_BUILDS_ON_ITS_GPU = ("tensorrt",)

# Not the extra: pip is content with a PyTorch without CUDA.
_TORCH_REMEDY = f"install a build of PyTorch with CUDA, {'.'.join(map(str, LEAST))} or newer"


Verdict: TypeAlias = Literal["yes", "no", "unknown"]


class Ability(msgspec.Struct, frozen=True):
    """A verdict and, unless it is yes, its reason."""

    verdict: Verdict
    reason: str = ""


class TargetFacts(msgspec.Struct, frozen=True, kw_only=True):
    """``precisions``: those it builds in on this machine; ``auto``: the one that auto resolves to.

    ``cannot_run``: why an artifact built here must be verified and served elsewhere; empty if it runs here.
    ``next_step``: empty if there is nothing to do.
    """

    name: str
    can_build: Ability
    can_serve: Ability
    cannot_run: str
    precisions: list[str]
    auto: str | None
    next_step: str

    @property
    def verdicts(self) -> tuple[Verdict, Verdict]:
        """The verdicts on building and on serving."""
        return self.can_build.verdict, self.can_serve.verdict


class AttentionLayer(msgspec.Struct, frozen=True, kw_only=True):
    """``fused``: yes if a fused kernel exists for one attention layer. ``capability`` None: on this machine's GPU."""

    target: str
    capability: int | None
    precision: str
    form: str
    head_size: int
    fused: Verdict
    reason: str
    seconds: float


class Compiler(Protocol):
    """The part of ``bei_build.targets.base.Compiler`` that is used here."""

    precisions: tuple[str, ...]

    def resolve_precision(self, precision: str) -> str: ...

    def check_able(self) -> None: ...

    def cannot_run(self) -> str | None: ...


class NotInThisVersionError(BeiError):
    """Installing something would not help."""


@dataclass(frozen=True)
class Builder:
    """The builder, as the CLI passes it on.

    ``compiler_for``: makes a compiler for a target and compute capabilities; none: this machine's. ``probed``: for a
    target and each ``(capability, precision, form, head size)``: whether there is a fused kernel
    (``bei_build.targets.attention_probe``).
    """

    targets: tuple[str, ...]
    compiler_for: Callable[[str, tuple[str, ...]], Compiler]
    forms: tuple[str, ...]
    precisions: tuple[str, ...]
    probed: Callable[[str, Sequence[tuple[int | None, str, str, int]]], Iterator[Any]]


def target_facts(
    name: str, builder: Builder | BeiError, capabilities: tuple[str, ...], nvidia: Nvidia, unknowns: Unknowns
) -> TargetFacts:
    """``builder``: a BeiError says why there is none. ``capabilities``: those that are built for, or ()."""
    serve_errors = list(_why_no_serving(name))
    cannot_run, precisions, auto, build_error = None, list[str](), None, None
    try:
        compiler = _compiler(name, builder, capabilities, nvidia, unknowns)
    except Exception as error:  # a compiler's library may raise anything; the verdict on it is "unknown"
        build_error = error
    else:
        cannot_run = unknowns.ask(f"whether this machine runs what it builds for {name}", compiler.cannot_run)
        precisions = _precisions(compiler)
        auto = unknowns.ask(f"what precision auto is for {name}", compiler.resolve_precision, "auto")
    return TargetFacts(
        name=name,
        can_build=_ability([build_error] if build_error else []),
        can_serve=_ability(serve_errors),
        cannot_run=cannot_run or "",
        precisions=precisions,
        auto=auto,
        next_step=_next_step(name, build_error, serve_errors, nvidia),
    )


def _compiler(
    name: str, builder: Builder | BeiError, capabilities: tuple[str, ...], nvidia: Nvidia, unknowns: Unknowns
) -> Compiler:
    """A compiler that can build here. Raises the error that says why there is none."""
    if isinstance(builder, BeiError):
        raise builder
    if name not in builder.targets:
        raise NotInThisVersionError(f"this version of bei has no target {name} yet")
    lacking = unknowns.ask("whether all packages that builds need are installed", lacking_for_builds)
    if lacking:
        extra = {"trtllm": "build"}.get(name, name)  # the extra trtllm is for serving
        raise MissingDependencyError(lacking[0], extra, "Building an artifact")
    if name in _BUILDS_FOR_OTHERS and not capabilities:
        if nvidia.state == "ready":
            with contextlib.suppress(Exception):
                return _able(builder.compiler_for(name, ()))
        capabilities = ELSEWHERE
    return _able(builder.compiler_for(name, capabilities if name in _BUILDS_FOR_OTHERS else ()))


def _able(compiler: Compiler) -> Compiler:
    compiler.check_able()
    return compiler


def _precisions(compiler: Compiler) -> list[str]:
    """The precisions that a build accepts on this machine."""
    accepted = []
    for precision in compiler.precisions:
        try:
            accepted.append(compiler.resolve_precision(precision))
        except BeiError:
            continue
    return accepted


def _why_no_serving(name: str) -> Iterator[Exception]:
    """An error for each requirement of the target's engine that this machine lacks."""
    module = ENGINES.get(name)
    if module is None or importlib.util.find_spec(module) is None:
        yield NotInThisVersionError("this version of bei has no engine for it yet")
        return
    purpose = f"Serving for the target {name}"
    gpu: list[Callable[[], object]] = [lambda: load_cuda(purpose, name), lambda: _check_gpu(name, purpose)]
    checks: dict[str, list[Callable[[], object]]] = {
        "cpu": [cpu_capabilities],
        "cuda": [lambda: found_gpu(load_torch(purpose), purpose)],
        "trtllm": [lambda: _find("tensorrt_llm", name, purpose), *gpu],
        **{library: [lambda: load_library(name, purpose), *gpu] for library in LIBRARIES},
    }
    for check in checks[name]:
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
    """Raise MissingDependencyError without importing: TensorRT-LLM's import takes the GPU and a minute."""
    if importlib.util.find_spec(package) is None:
        raise MissingDependencyError(package, extra, purpose)


def _ability(errors: Sequence[Exception]) -> Ability:
    if not errors:
        return Ability("yes")
    reasons = list(dict.fromkeys(reason_of(error) for error in errors))
    is_known = all(isinstance(error, BeiError) for error in errors)
    return Ability(
        "no" if is_known else "unknown", "; ".join([*(one.rstrip(".") for one in reasons[:-1]), reasons[-1]])
    )


def _next_step(name: str, build_error: Exception | None, serve_errors: list[Exception], nvidia: Nvidia) -> str:
    """A remedy for the errors; empty if there is none, or no error."""
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
    """The remedy for a missing GPU, or one that CUDA cannot use; empty if there is a usable one."""
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


# Fused attention.


def attention_facts(
    builder: Builder | BeiError,
    libraries: Sequence[LibraryFacts],
    nvidia: Nvidia,
    head_sizes: Sequence[int],
    capabilities: tuple[str, ...],
    say: Callable[[str], None],
) -> tuple[list[AttentionLayer], list[str]]:
    """Build each layer to see if there is a kernel for it; also sentences on layers that were not tried, and why.

    TensorRT builds for this machine's GPU only; TensorRT-RTX for ``capabilities``, else for this machine's GPU, else
    for ``ELSEWHERE``.
    """
    if isinstance(builder, BeiError):
        return [], [f"fused attention: {builder}"]
    layers: list[AttentionLayer] = []
    untried = []
    for library in libraries:
        if library.problem:
            untried.append(f"fused attention with {library.title}: {library.problem}")
        elif library.target == "tensorrt" and nvidia.state != "ready":
            untried.append(f"fused attention with {library.title}: it builds for the GPU of this machine only")
        else:
            layers += _layers(builder, library, _capabilities(library, nvidia, capabilities), head_sizes, say)
    return layers, untried


def _capabilities(library: LibraryFacts, nvidia: Nvidia, asked: tuple[str, ...]) -> list[int | None]:
    if library.target == "tensorrt":
        return [None]
    if not asked and nvidia.gpus:
        return [nvidia.gpus[0].capability]
    return [int(capability) for capability in asked or ELSEWHERE]


def _layers(
    builder: Builder,
    library: LibraryFacts,
    capabilities: list[int | None],
    head_sizes: Sequence[int],
    say: Callable[[str], None],
) -> Iterator[AttentionLayer]:
    asked = list(itertools.product(capabilities, builder.precisions, builder.forms, head_sizes))
    answers = builder.probed(library.target, asked)
    for index, (capability, precision, form, head_size) in enumerate(asked, 1):
        say(f"{library.title}: attention layer {index} of {len(asked)} ({precision}, {form}, heads of {head_size})")
        answer = next(answers)
        yield AttentionLayer(
            target=library.target,
            capability=capability,
            precision=precision,
            form=form,
            head_size=head_size,
            fused=answer.fused,
            reason=answer.reason,
            seconds=answer.seconds,
        )
