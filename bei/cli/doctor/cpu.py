"""The CPU, its instruction sets and the memory, from /proc and the container's limits."""

from __future__ import annotations

import platform
from pathlib import Path

from bei.cli.doctor.guarded import Unknowns
from bei.cli.doctor.report import Cpu
from bei.engine.openvino import cpu_capabilities
from bei.utils.cpu_count import usable_cores

# The kernel's word for each instruction set that engines use, the best last.
X86 = {
    "AVX2": "avx2",
    "AVX-512": "avx512f",
    "VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "AMX_INT8": "amx_int8",
    "AMX_BF16": "amx_bf16",
}
ARM = {"NEON": "asimd", "FP16": "asimdhp", "I8MM": "i8mm", "BF16": "bf16", "SVE": "sve", "SVE2": "sve2"}

# Arm's cpuinfo has numbers for a name: implementer and part, of the cores that servers have.
_ARM_CORES = {
    ("0x41", "0xd0c"): "Arm Neoverse N1",
    ("0x41", "0xd40"): "Arm Neoverse V1",
    ("0x41", "0xd49"): "Arm Neoverse N2",
    ("0x41", "0xd4f"): "Arm Neoverse V2",
    ("0x41", "0xd84"): "Arm Neoverse V3",
    ("0xc0", "0xac3"): "Ampere-1",
}


def cpu_facts(root: Path, unknowns: Unknowns) -> Cpu:
    """``root``: where /proc and /sys are."""
    cgroup = root / "sys/fs/cgroup"
    described = unknowns.ask("CPU model and instruction sets", _described, root / "proc/cpuinfo")
    model, instruction_sets = described or (None, None)
    meminfo = unknowns.ask("memory", _meminfo, root / "proc/meminfo") or {}
    return Cpu(
        model=model,
        architecture=platform.machine(),
        usable_cores=usable_cores(cgroup),
        instruction_sets=instruction_sets,
        computes_in=unknowns.ask("what the CPU computes in", cpu_capabilities),
        memory_bytes=meminfo.get("MemTotal"),
        available_bytes=meminfo.get("MemAvailable"),
        container_limit_bytes=_container_limit(cgroup, meminfo.get("MemTotal")),
    )


def _described(cpuinfo: Path) -> tuple[str | None, dict[str, bool]]:
    """Model, and which instruction sets there are, of the first core."""
    rows: dict[str, str] = {}
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        rows.setdefault(name.strip(), value.strip())
    if "Features" in rows:
        core = rows.get("CPU implementer", ""), rows.get("CPU part", "")
        model = rows.get("model name") or _ARM_CORES.get(core, f"Arm, implementer {core[0]}, part {core[1]}")
        return model, _present(ARM, rows["Features"])
    return rows.get("model name"), _present(X86, rows["flags"])


def _present(known: dict[str, str], flags: str) -> dict[str, bool]:
    there = set(flags.split())
    return {title: flag in there for title, flag in known.items()}


def _meminfo(path: Path) -> dict[str, int]:
    """Bytes by name."""
    rows = (line.split(":", 1) for line in path.read_text().splitlines())
    return {name: int(value.split()[0]) * 1024 for name, value in rows}


def _container_limit(cgroup: Path, total: int | None) -> int | None:
    """Bytes that the container may take (cgroup 2 or 1); None where there is no limit below the machine's memory."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = int((cgroup / name).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        return limit if total is None or limit < total else None
    return None
