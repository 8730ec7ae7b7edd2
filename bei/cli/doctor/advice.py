"""The report's sentences: what this machine can do, what is not known, what to do next."""

from __future__ import annotations

import os
from collections.abc import Sequence

from bei.cli.doctor.report import Cpu, Nvidia, Package, System, Target
from bei.cli.doctor.targets import gpu_remedy

_FEWEST_FILES = 4096


def summary(targets: Sequence[Target], cpu: Cpu, nvidia: Nvidia) -> list[str]:
    """The first lines: a sentence for each target that can do something, then one for the others."""
    sentences = [_ability(target, cpu, nvidia) for target in targets if "yes" in target.verdicts]
    left = [target for target in targets if "yes" not in target.verdicts]
    unknown = [target.name for target in left if "unknown" in target.verdicts]
    unable = [target.name for target in left if "unknown" not in target.verdicts]
    if unknown:
        sentences.append(f"It is not known whether this machine can build or serve for {', '.join(unknown)}.")
    if unable:
        sentences.append(f"This machine can neither build nor serve for {', '.join(unable)}.")
    return sentences


def _ability(target: Target, cpu: Cpu, nvidia: Nvidia) -> str:
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


def _cpu_means(target: Target, cpu: Cpu) -> str:
    precision = target.auto or ("bf16" if "BF16" in (cpu.computes_in or []) else "fp32")
    return ", ".join([precision, *([unit] if (unit := matrix_unit(cpu, precision)) else [])])


def matrix_unit(cpu: Cpu, precision: str) -> str:
    """The best instruction set of the CPU for ``precision``; empty where that is not known."""
    there = [name for name, is_there in (cpu.instruction_sets or {}).items() if is_there]
    if precision == "bf16":
        return next((name for name in ("AMX_BF16", "AVX512_BF16", "BF16") if name in there), "").replace(
            "AMX_BF16", "AMX"
        )
    return next((name for name in ("AVX-512", "AVX2", "SVE", "NEON") if name in there), "")


def _gpu_means(target: Target, nvidia: Nvidia) -> str:
    where = [nvidia.gpus[0].name] if nvidia.gpus and not target.cannot_run else []
    return ", ".join([*([target.auto] if target.auto else []), *where])


def unknown_always() -> list[str]:
    """What bei doctor does not look at."""
    offline = " (HF_HUB_OFFLINE is set: builds do not try it)" if os.environ.get("HF_HUB_OFFLINE") else ""
    return [
        f"whether the hub can be reached: bei doctor opens no connections{offline}",
        "how fast this machine is: bei tune measures an artifact",
    ]


def to_do(
    targets: Sequence[Target], system: System, packages: Sequence[Package], nvidia: Nvidia, wanted: str | None
) -> list[str]:
    """Next steps. ``wanted``: the only target that the user asks about, or None."""
    steps = [f"{target.name}: {target.next_step}" for target in targets if target.next_step]
    remedy = gpu_remedy(nvidia) if nvidia.state not in ("ready", "absent") and wanted != "cpu" else ""
    if remedy and not any(remedy in step for step in steps):
        steps.append(f"GPU: {remedy}")
    if "torch" in [package.name for package in packages if package.version is None]:
        steps.append("torch: with it (its CPU build will do) builds are verified against the HF model itself")
    if system.cache_writable is False:
        steps.append(f"cache: {system.cache_dir} cannot be written; set BEI_CACHE_DIR")
    if system.open_files and 0 <= system.open_files[1] < _FEWEST_FILES:
        steps.append(f"open files: the limit of {system.open_files[1]} also limits connections; raise it (ulimit -Hn)")
    return steps
