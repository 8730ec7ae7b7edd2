"""What ``bei doctor`` finds, as ``--json`` has it. A field that is None was not to be had; ``unknown`` says why."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Verdict: TypeAlias = Literal["yes", "no", "unknown"]

# Why there is, or is not, a GPU that CUDA can use.
GpuState: TypeAlias = Literal["ready", "absent", "no driver", "hidden", "old driver", "no cuda-python", "failed"]


class System(msgspec.Struct, frozen=True, kw_only=True):
    """``glibc``: its version, or another C library's name. ``open_files``: soft and hard limit; -1 is unlimited."""

    bei: str
    python: str
    system: str
    glibc: str
    open_files: tuple[int, int] | None
    cache_dir: str | None
    cache_writable: bool | None
    cache_free_bytes: int | None


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """``instruction_sets``: those that matter to engines. ``computes_in``: OpenVINO's words (BF16, INT8, ...)."""

    model: str | None
    architecture: str
    usable_cores: int
    instruction_sets: dict[str, bool] | None
    computes_in: list[str] | None
    memory_bytes: int | None
    available_bytes: int | None
    container_limit_bytes: int | None


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """An installed distribution, or None for its version. ``purpose``: what bei needs it for."""

    name: str
    version: str | None
    purpose: str


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One device of CUDA. ``capability`` 89 is compute capability 8.9."""

    index: int
    name: str
    capability: int
    memory_bytes: int
    free_bytes: int | None


class Nvidia(msgspec.Struct, frozen=True, kw_only=True):
    """``driver``: its own version. ``driver_cuda``: the newest CUDA it serves, 13000 is 13.0. ``problem``: CUDA's."""

    state: GpuState
    problem: str
    driver: str | None
    driver_cuda: int | None
    gpus: list[GpuFacts]


class LibraryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """TensorRT or TensorRT-RTX. ``problem`` is empty where it can be loaded and is of a version that bei knows."""

    target: str
    title: str
    version: str | None
    problem: str


class Answer(msgspec.Struct, frozen=True):
    """A verdict and, unless it is yes, its reason."""

    verdict: Verdict
    reason: str = ""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """``precisions``: those it builds in on this machine; ``auto``: what auto means. ``next_step`` is empty for none.

    ``cannot_run``: why what is built here has to be verified and served elsewhere; empty where it runs here.
    """

    name: str
    can_build: Answer
    can_serve: Answer
    cannot_run: str
    precisions: list[str]
    auto: str | None
    next_step: str

    @property
    def verdicts(self) -> tuple[Verdict, Verdict]:
        """Of building and of serving."""
        return self.can_build.verdict, self.can_serve.verdict


class AttentionLayer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether there is a fused kernel for one attention layer. ``capability`` None: for this machine's GPU."""

    target: str
    capability: int | None
    precision: str
    form: str
    head_size: int
    fused: Verdict
    reason: str
    seconds: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything. ``summary``, ``unknown`` and ``to_do`` are sentences, drawn from the rest."""

    summary: list[str]
    system: System
    cpu: Cpu
    packages: list[Package]
    nvidia: Nvidia
    libraries: list[LibraryFacts]
    targets: list[Target]
    attention: list[AttentionLayer]
    unknown: list[str]
    to_do: list[str]
