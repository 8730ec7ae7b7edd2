"""``examine``: the whole report of ``bei doctor``, with its sentences on abilities, gaps and next steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from bei.cli.doctor.facts import (
    Cpu,
    Extra,
    InstalledPackage,
    LibraryFacts,
    Nvidia,
    System,
    Unknowns,
    cpu_facts,
    extras,
    libraries,
    nvidia_facts,
    packages,
    system_facts,
    version_of,
)
from bei.cli.doctor.targets import (
    HEAD_SIZES,
    TARGETS,
    AttentionLayer,
    Builder,
    TargetFacts,
    attention_facts,
    gpu_remedy,
    target_facts,
)
from bei.engine.packed_attention import PACKAGE, why_not_on_tiles
from bei.errors import BeiError

_FEWEST_FILES = 4096


class MachineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report, as ``--json`` prints it. ``summary``, ``unknown`` and ``to_do`` are sentences."""

    summary: list[str]
    system: System
    cpu: Cpu
    packages: list[InstalledPackage]
    extras: list[Extra]
    nvidia: Nvidia
    libraries: list[LibraryFacts]
    targets: list[TargetFacts]
    attention: list[AttentionLayer]
    unknown: list[str]
    to_do: list[str]

    @property
    def without_hardware(self) -> list[TargetFacts]:
        """Targets for NVIDIA GPUs, which this machine does not have, unless one of them was asked for."""
        return without_hardware(self.targets, self.nvidia)


def examine(
    builder: Builder | BeiError,
    *,
    target: str | None = None,
    head_sizes: tuple[int, ...] = HEAD_SIZES,
    capabilities: tuple[str, ...] = (),
    with_attention: bool = True,
    say: Callable[[str], None] = lambda text: None,
    root: Path = Path("/"),
) -> MachineReport:
    """Examine this machine.

    ``builder``: a BeiError says why there is none. ``target``: examine this one only. ``say`` is called with the
    current step. ``root``: the folder of /proc and /sys, for stand-ins of other machines.
    """
    unknowns = Unknowns()
    say("system, CPU, GPUs, libraries")
    system, cpu, nvidia = system_facts(unknowns), cpu_facts(root, unknowns), nvidia_facts(root, unknowns)
    installed, found = packages(), libraries()
    names = TARGETS if target is None else (target,)
    targets = [target_facts(name, builder, capabilities, nvidia, unknowns) for name in names]
    layers: list[AttentionLayer] = []
    untried = ["fused attention: not tried, as --no-attention says"]
    if with_attention:
        wanted = [library for library in found if library.target in names]
        layers, untried = attention_facts(builder, wanted, nvidia, head_sizes, capabilities, say)
    return MachineReport(
        summary=_summary(targets, cpu, nvidia),
        system=system,
        cpu=cpu,
        packages=installed,
        extras=extras(),
        nvidia=nvidia,
        libraries=found,
        targets=targets,
        attention=layers,
        unknown=list(dict.fromkeys([*unknowns, *untried, *_unknown_always()])),
        to_do=[*_to_do(targets, system, installed, nvidia, target), *_kernels_to_update(names, cpu)],
    )


def _summary(targets: Sequence[TargetFacts], cpu: Cpu, nvidia: Nvidia) -> list[str]:
    """The first lines: a sentence for each target that can do something, then one for the others, and one for those
    without hardware."""
    folded = without_hardware(targets, nvidia)
    targets = [target for target in targets if target not in folded]
    sentences = [_ability(target, cpu, nvidia) for target in targets if "yes" in target.verdicts]
    left = [target for target in targets if "yes" not in target.verdicts]
    unknown = [target.name for target in left if "unknown" in target.verdicts]
    unable = [target.name for target in left if "unknown" not in target.verdicts]
    if unknown:
        sentences.append(f"It is not known whether this machine can build or serve for {', '.join(unknown)}.")
    if unable:
        sentences.append(f"This machine can neither build nor serve for {', '.join(unable)}.")
    if folded:
        built = [target.name for target in folded if target.can_build.verdict == "yes"]
        but = f"; {', '.join(built)} can be built" if built else ""
        names = ", ".join(target.name for target in folded)
        sentences.append(f"It has no NVIDIA GPU, so nothing is served here for {names}{but}.")
    return sentences


def without_hardware(targets: Sequence[TargetFacts], nvidia: Nvidia) -> list[TargetFacts]:
    """Those of several ``targets`` that this machine lacks the GPU for."""
    if len(targets) == 1 or nvidia.state != "absent":
        return []
    return [target for target in targets if target.name != "cpu" and target.can_serve.verdict != "yes"]


def _ability(target: TargetFacts, cpu: Cpu, nvidia: Nvidia) -> str:
    means = _cpu_means(target, cpu) if target.name == "cpu" else _gpu_means(target, nvidia)
    what = f"for {target.name}{f' ({means})' if means else ''}"
    if target.verdicts == ("yes", "yes"):
        if target.cannot_run:
            return f"This machine can build and serve {what}, and does not run what it builds: {target.cannot_run}."
        return f"This machine can build and serve {what}."
    if target.can_build.verdict == "yes":
        why = target.cannot_run or "see Targets"
        return f"This machine can build {what}, and cannot serve it: {why}."
    return f"This machine can serve {what} what was built elsewhere, and cannot build it, see Targets."


def _cpu_means(target: TargetFacts, cpu: Cpu) -> str:
    precision = target.auto or ("bf16" if "BF16" in (cpu.computes_in or []) else "fp32")
    return ", ".join([precision, *([unit] if (unit := _matrix_unit(cpu, precision)) else [])])


def _matrix_unit(cpu: Cpu, precision: str) -> str:
    """The CPU's best instruction set for ``precision``; empty if not known."""
    there = [name for name, is_there in (cpu.instruction_sets or {}).items() if is_there]
    best = ("AMX_BF16", "AVX512_BF16", "BF16") if precision == "bf16" else ("AVX-512", "AVX2", "SVE", "NEON")
    return next((name for name in best if name in there), "").replace("AMX_BF16", "AMX")


def _gpu_means(target: TargetFacts, nvidia: Nvidia) -> str:
    where = [nvidia.gpus[0].name] if nvidia.gpus and not target.cannot_run else []
    return ", ".join([*([target.auto] if target.auto else []), *where])


def _unknown_always() -> list[str]:
    """Facts that bei doctor never determines."""
    offline = " (HF_HUB_OFFLINE is set: builds do not try it)" if os.environ.get("HF_HUB_OFFLINE") else ""
    return [
        f"whether the hub can be reached: bei doctor opens no connections{offline}",
        "how fast this machine is: bei tune measures an artifact",
    ]


def _to_do(
    targets: Sequence[TargetFacts],
    system: System,
    installed: Sequence[InstalledPackage],
    nvidia: Nvidia,
    asked: str | None,
) -> list[str]:
    """Next steps. ``asked``: the user's --target, or None."""
    folded = without_hardware(targets, nvidia)
    steps = [f"{one.name}: {one.next_step}" for one in targets if one.next_step and one not in folded]
    if folded:
        names = ", ".join(target.name for target in folded)
        steps.append(f"{names}: {gpu_remedy(nvidia)} (bei doctor --target NAME says what else)")
    remedy = gpu_remedy(nvidia) if nvidia.state not in ("ready", "absent") and asked != "cpu" else ""
    if remedy and not any(remedy in step for step in steps):
        steps.append(f"GPU: {remedy}")
    if "torch" in [package.name for package in installed if package.version is None]:
        steps.append("torch: with it (its CPU build will do) builds are verified against the HF model itself")
    if system.cache_writable is False:
        steps.append(f"cache: {system.cache_dir} cannot be written; set BEI_CACHE_DIR")
    if system.open_files and 0 <= system.open_files[1] < _FEWEST_FILES:
        steps.append(f"open files: the limit of {system.open_files[1]} also limits connections; raise it (ulimit -Hn)")
    return steps


def _kernels_to_update(targets: Sequence[str], cpu: Cpu) -> Iterator[str]:
    """Where CPU engines pass over the kernels of bei's own that are installed."""
    version = version_of(PACKAGE) if "cpu" in targets and (cpu.instruction_sets or {}).get("AMX_BF16") else None
    if version is not None and (slow := why_not_on_tiles(version)):
        yield f"cpu: {slow}"
