"""Instruction sets of this machine's CPU that OpenVINO does not tell of."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

# A capability beside OpenVINO's own terms: its INT8 does not tell how products are accumulated.
EXACT_INT8 = "EXACT_INT8"

_ARM = ("aarch64", "arm64")
_VNNI = {"avx512_vnni", "avx_vnni"}  # the kernel's names


@functools.cache
def sums_int8_exactly(machine: str = platform.machine(), cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """True if INT8 products are accumulated in 32 bits: on x86 with VNNI, and on every Arm CPU.

    Other x86 CPUs accumulate pairs in 16 bits with saturation (VPMADDUBSW in Intel's manual; oneDNN's page "Nuances of
    int8 computations"). False if the kernel does not list an x86 CPU's features.
    """
    if machine in _ARM:
        return True
    return not _VNNI.isdisjoint(_flags(cpuinfo))


@functools.cache
def has_tiles_of_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """True if the CPU multiplies tiles of BF16 (AMX)."""
    return "amx_bf16" in _flags(cpuinfo)


def _flags(cpuinfo: Path) -> list[str]:
    """Features of an x86 CPU, by the kernel's names."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
