"""ONNX file to plan file: the builder's settings, and the build itself."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bei.artifact.manifest import PlanProfile
from bei.engine.tensorrt_logger import process_logger
from bei.errors import CompileError
from bei_build.onnx_graph.attention import Lowering
from bei_build.targets.base import Say
from bei_build.targets.tensorrt import timing_cache
from bei_build.targets.tensorrt.devices import architecture
from bei_build.targets.tensorrt.log_messages import compile_error, serious_messages
from bei_build.targets.tensorrt.network import parse
from bei_build.targets.tensorrt.plan_writer import build_into
from bei_build.targets.tensorrt.profiles import add_profile
from bei_build.targets.tensorrt.progress import cancellable, monitor_of

if TYPE_CHECKING:
    from tensorrt_module import TensorRTModule, TensorRTRTXModule


class NoPlanError(CompileError):
    """TensorRT parsed the graph and has no kernels for it."""


@dataclass(frozen=True)
class PlanSettings:
    """``capabilities``: GPUs to compile for ahead of time, in TensorRT-RTX only; empty: this machine's.

    ``stripped``: without the weights. ``hardware_compatible``: for every GPU from Ampere on.
    """

    profiles: tuple[PlanProfile, ...]
    capabilities: tuple[int, ...] = ()
    hardware_compatible: bool = False
    stripped: bool = False
    timing_cache: Path | None = None


def write_plan(
    trt: TensorRTModule, graph: Path, lowerings: Sequence[Lowering], settings: PlanSettings, plan: Path, say: Say
) -> list[str]:
    """Compile ``graph``, whose attentions are written as ``lowerings``, into the file ``plan``.

    The workspace stays at TensorRT's default, all device memory. Returns a sentence for each setting that could not be
    applied. Raises NoPlanError where TensorRT gives no plan, and CompileError that quotes TensorRT's log in all other
    cases, also where there is a plan and an error in the log.
    """
    logger = process_logger(trt.ILogger)
    with logger.recording():
        return _write_plan(trt, logger, graph, lowerings, settings, plan, say)


def _write_plan(
    trt: TensorRTModule,
    logger: Any,
    graph: Path,
    lowerings: Sequence[Lowering],
    settings: PlanSettings,
    plan: Path,
    say: Say,
) -> list[str]:
    cancelled = threading.Event()
    monitor = monitor_of(trt, say, cancelled)  # must outlive everything below
    try:
        builder = trt.Builder(logger)
    except TypeError as error:  # the bindings raise it where there is no builder
        raise compile_error(
            "has no builder here (it needs an NVIDIA GPU and its driver)", serious_messages(logger.lines)
        ) from error
    network, parser = parse(trt, builder, logger, graph, lowerings)
    config = builder.create_builder_config()
    config.progress_monitor = monitor
    notes = _configure(trt, builder, network, config, settings, logger)

    def work(held: Any = (monitor, parser)) -> bool:  # kept alive while it runs, also after a second Ctrl-C
        return build_into(trt, builder, network, config, plan)

    done = cancellable(work, cancelled)
    if monitor.error is not None:
        raise monitor.error
    if not done:
        raise compile_error("did not compile the graph", serious_messages(logger.lines), NoPlanError)
    if serious_messages(logger.lines):
        raise compile_error("compiled the graph, and reported", serious_messages(logger.lines))
    if settings.timing_cache is not None and (note := timing_cache.stored(config, settings.timing_cache)):
        notes.append(note)
    return notes


def _configure(
    trt: TensorRTModule,
    builder: TensorRTModule.Builder,
    network: TensorRTModule.INetworkDefinition,
    config: TensorRTModule.IBuilderConfig,
    settings: PlanSettings,
    logger: Any,
) -> list[str]:
    """Apply ``settings`` and read them back: TensorRT reports a refused one only in its log."""
    config.clear_flag(trt.BuilderFlag.TF32)  # else pooling, tail and fp32 graphs would be computed with 10 bits
    _require_set("TF32 off", not config.get_flag(trt.BuilderFlag.TF32), logger)
    if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):  # TensorRT-RTX's: the engine gives contexts their memory
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        _require_set("REQUIRE_USER_ALLOCATION", config.get_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION), logger)
    if settings.capabilities:
        _set_capabilities(cast("TensorRTRTXModule", trt), cast(Any, config), settings.capabilities, logger)
    if settings.hardware_compatible:
        wanted = trt.HardwareCompatibilityLevel.AMPERE_PLUS
        config.hardware_compatibility_level = wanted
        _require_set("hardware_compatible", config.hardware_compatibility_level == wanted, logger)
    if settings.stripped:
        # REFIT: other weights, a fine-tune's, may be loaded. REFIT_IDENTICAL would choose kernels for these weights.
        for flag in (trt.BuilderFlag.STRIP_PLAN, trt.BuilderFlag.REFIT):
            config.set_flag(flag)
            _require_set("strip_weights", config.get_flag(flag), logger)
    for profile in settings.profiles:
        add_profile(builder, network, config, profile)
    _require_set("its profiles", config.num_optimization_profiles == len(settings.profiles), logger)
    if settings.timing_cache is None:
        return []
    note = timing_cache.load(config, settings.timing_cache, logger.lines)
    return [note] if note else []


def _set_capabilities(
    trt: TensorRTRTXModule, config: TensorRTRTXModule.IBuilderConfig, capabilities: tuple[int, ...], logger: Any
) -> None:
    config.num_compute_capabilities = len(capabilities)
    for index, capability in enumerate(capabilities):
        wanted = getattr(trt.ComputeCapability, architecture(capability))
        config.set_compute_capability(wanted, index)
        _require_set(architecture(capability), config.get_compute_capability(index) == wanted, logger)


def _require_set(what: str, is_held: bool, logger: Any) -> None:
    if not is_held:
        raise compile_error(f"did not take the setting {what}", serious_messages(logger.lines))
