"""``TensorRTCompiler``: the compiler of ``tensorrt`` and ``tensorrt-rtx``."""

from __future__ import annotations

import tempfile
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import Any

import msgspec

from bei.artifact.certificate.thresholds import PRECISIONS_OF_TARGETS
from bei.artifact.manifest import TENSORRT_PLAN, EngineRequirements, Plan
from bei.core import Limits
from bei.engine.nvidia import LIBRARIES, Gpu, current_gpu, load_cuda, load_library
from bei.errors import BrokenDependencyError, ConfigError, DeviceNotFoundError, MissingDependencyError
from bei_build.config import BuildConfig
from bei_build.onnx_graph.attention import AttentionCore, Lowering, lowerings
from bei_build.onnx_graph.transformer import write_graph
from bei_build.onnx_graph.writer import GraphTypes
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.precision import PRECISIONS, check_precision
from bei_build.targets.base import Numerics, Say
from bei_build.targets.tensorrt import shared_plan, timing_cache
from bei_build.targets.tensorrt.devices import (
    PACKED_ON,
    architecture,
    dotted,
    parse_capabilities,
    without_bf16,
    without_fp8,
)
from bei_build.targets.tensorrt.plan import NoPlanError, PlanSettings, write_plan
from bei_build.targets.tensorrt.profiles import profiles_of
from bei_build.weights.model_weights import ModelWeights

_MOST_OF_REASON = 300  # characters of TensorRT's explanations, which go into manifests
_LEAST_SEQUENCES = 8  # minimum batch at the longest length, however large its padded view is
_MAX_SLOTS = 1 << 18  # default size of the padded view: TensorRT reserves B x S slots, however full a batch is


class TensorRTCompiler:
    """Compiles for NVIDIA GPUs. ``tensorrt-rtx`` with ``compute_capability`` does not need a GPU."""

    precisions: tuple[str, ...] = PRECISIONS_OF_TARGETS["tensorrt"]
    calibrated: tuple[str, ...] = ("fp8",)
    shows_layers = True
    matrix_bits = 8
    longest_by_default = 8192  # the padded view is reserved for the longest sequence

    def __init__(self, config: BuildConfig) -> None:
        self._config = config
        self._target = config.target
        self._library = LIBRARIES[config.target]
        self._purpose = f"Building for the target {config.target}"

    def resolve_precision(self, precision: str) -> str:
        """``auto`` is bf16, which cannot overflow as fp16 can, but fp16 where a target GPU has no bf16."""
        check_precision(self._target, precision, self.precisions)
        try:
            capabilities = self._capabilities
        except (DeviceNotFoundError, MissingDependencyError):
            capabilities = ()  # check_able, which is called next, reports what is missing
        old = without_bf16(capabilities)
        if precision == "bf16" and old:
            gpus = ", ".join(map(dotted, old))
            raise ConfigError(f"GPUs of compute capability {gpus} do not compute in bf16: build with --precision fp16.")
        if precision == "fp8" and (without := without_fp8(capabilities)):
            gpus = ", ".join(map(dotted, without))
            raise ConfigError(f"GPUs of compute capability {gpus} do not compute in fp8: build with --precision bf16.")
        return ("fp16" if old else "bf16") if precision == "auto" else precision

    def default_limits(self, max_seq_len: int) -> Limits:
        """Large batches, which a GPU needs to be busy; fewer long sequences, for the padded view. Not measured yet."""
        return Limits(
            max_num_tokens=max(16384, max_seq_len),
            max_batch_size=min(256, max(_LEAST_SEQUENCES, _MAX_SLOTS // max_seq_len)),
            max_seq_len=max_seq_len,
        )

    def check_able(self) -> None:
        """Require the library; and the GPU, unless TensorRT-RTX was given the compute capabilities to build for.

        Raises MissingDependencyError, LibraryVersionError, DeviceNotFoundError, ConfigError.
        """
        trt = self._trt
        capabilities = self._capabilities
        if self._target == "tensorrt-rtx":
            parse_capabilities(list(map(str, capabilities)), trt)  # it may not know this machine's GPU
        if self._config.timing_cache is not None:
            timing_cache.check_writable(Path(self._config.timing_cache))

    def cannot_run(self) -> str | None:
        """The reason why a plan of this build cannot run here: no GPU, another one, no cuda-python."""
        try:
            gpu = self._gpu
        except (DeviceNotFoundError, MissingDependencyError, BrokenDependencyError) as error:
            return str(error).rstrip(".?")
        if gpu.capability in self._capabilities:
            return None
        names = ", ".join(map(architecture, self._capabilities))
        return f"this machine's {gpu.name} is {gpu.architecture}, and the plan is for {names}"

    def machine(self) -> list[str]:
        """The library's version, and the GPUs: by name where a plan is for one model of GPU only."""
        version: str = self._trt.__version__
        gpus = [architecture(capability) for capability in self._capabilities]
        return [version, *gpus, *([self._gpu.name] if self._target == "tensorrt" else [])]

    def compile(
        self, spec: ModelSpec, weights: ModelWeights, numerics: Numerics, limits: Limits, folder: Path, say: Say
    ) -> EngineRequirements:
        """Write ``model.plan`` into ``folder``, and the graph with its weights if the plan has none.

        Raises CompileError, and the errors of ``check_able``.
        """
        if self._config.plan_of is not None:
            return self._with_plan_of(Path(self._config.plan_of), spec, weights, numerics, limits, folder)
        fallbacks: list[str] = []
        plan = None
        if self._is_packed_tried and spec.joins_rows:
            fallbacks.append("attention is padded, since packed tokens need not be whole blocks of merged patches")
        elif self._is_packed_tried:
            try:
                plan = self._compiled(spec, weights, numerics, limits, folder, say, AttentionCore.TRT_PACKED)
            except NoPlanError as error:
                reason = shorten(str(error), _MOST_OF_REASON, placeholder=" ...")
                fallbacks.append(f"attention is padded, since there is no kernel for packed attention: {reason}")
        if plan is None:
            plan = self._compiled(spec, weights, numerics, limits, folder, say, AttentionCore.TRT_ATTENTION)
        elif self._config.attention_lowering == "packed" and "packed" not in plan.lowerings:
            fallbacks.append("no layer of this model can have packed attention")
        plan.fallbacks[:0] = fallbacks
        return self._requirements(plan)

    def _requirements(self, plan: Plan) -> EngineRequirements:
        return EngineRequirements(
            compiler=self._target,
            compiler_version=self._trt.__version__,
            device=self._device,
            capabilities=[architecture(capability) for capability in self._capabilities],
            plan=plan,
        )

    def _with_plan_of(
        self, path: Path, spec: ModelSpec, weights: ModelWeights, numerics: Numerics, limits: Limits, folder: Path
    ) -> EngineRequirements:
        """The plan of the artifact at ``path`` with this model's graph and weights."""
        lent = shared_plan.plan_source(path).engine.plan
        assert lent is not None
        core = AttentionCore.TRT_PACKED if "packed" in lent.lowerings else AttentionCore.TRT_ATTENTION
        plan = msgspec.structs.replace(self._plan(lowerings(spec, core), limits), fallbacks=lent.fallbacks)
        write_graph(spec, weights.read, folder, _types(numerics), core, limits.max_seq_len)
        requirements = self._requirements(plan)
        shared_plan.copy_plan(path, requirements, numerics.precision, limits, folder)
        return requirements

    def _plan(self, written: list[Lowering], limits: Limits) -> Plan:
        """The plan's description before it is compiled."""
        config = self._config
        profiles = profiles_of(limits, config.latency_tokens, config.latency_sequences, packed="packed" in written)
        return Plan(
            lowerings=written,
            fallbacks=[],
            profiles=list(profiles),
            hardware_compatible=config.hardware_compatible,
            refit=config.strip_weights,
        )

    def _compiled(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        numerics: Numerics,
        limits: Limits,
        folder: Path,
        say: Say,
        core: AttentionCore,
    ) -> Plan:
        config = self._config
        plan = self._plan(lowerings(spec, core), limits)
        settings = PlanSettings(
            profiles=tuple(plan.profiles),
            capabilities=self._capabilities if self._target == "tensorrt-rtx" else (),
            hardware_compatible=config.hardware_compatible,
            stripped=config.strip_weights,
            timing_cache=self._timing_cache,
        )
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            say("writing the graph")
            # A stripped plan gets its weights from the graph's file again, when it is loaded.
            place = folder if config.strip_weights else Path(scratch)
            types = _types(numerics)
            graph = write_graph(spec, weights.read, place, types, core, limits.max_seq_len, numerics.observed)
            plan.fallbacks.extend(write_plan(self._trt, graph, plan.lowerings, settings, folder / TENSORRT_PLAN, say))
        return plan

    @property
    def _timing_cache(self) -> Path | None:
        """The file that was asked for, or this user's; TensorRT-RTX measures nothing."""
        if self._target == "tensorrt-rtx":
            return None
        if self._config.timing_cache is not None:
            return Path(self._config.timing_cache)
        return timing_cache.default_file(self._trt.__version__, self._gpu.name)

    @property
    def _is_packed_tried(self) -> bool:
        asked = self._config.attention_lowering
        return asked == "packed" or (asked == "auto" and PACKED_ON.issuperset(self._capabilities))

    @property
    def _device(self) -> str:
        if self._target == "tensorrt-rtx":
            return f"any GPU of compute capability {' or '.join(map(dotted, self._capabilities))}"
        return "any GPU from Ampere on" if self._config.hardware_compatible else self._gpu.name

    @cached_property
    def _trt(self) -> Any:
        return load_library(self._target, self._purpose)

    @cached_property
    def _gpu(self) -> Gpu:
        return current_gpu(load_cuda(self._purpose, self._target))

    @property
    def _capabilities(self) -> tuple[int, ...]:
        """GPUs that the plan is for. Raises DeviceNotFoundError where that is this machine's, and it has none."""
        asked = self._config.compute_capability
        if asked:
            return parse_capabilities(asked, self._trt)
        try:
            return (self._gpu.capability,)
        except DeviceNotFoundError as error:
            raise DeviceNotFoundError(f"{error} {self._remedy}") from error

    @property
    def _remedy(self) -> str:
        if self._target == "tensorrt-rtx":
            return "Say which GPUs the artifact is for, and none is needed: --compute-capability 89,120."
        return (
            "A plan of TensorRT is built on the GPU that it is for; --target tensorrt-rtx builds for some GPUs without "
            "having one, and --target cpu needs none."
        )


def _types(numerics: Numerics) -> GraphTypes:
    storage = PRECISIONS[numerics.precision].storage
    return GraphTypes(compute=storage, storage=storage, quantization=numerics.quantization)
