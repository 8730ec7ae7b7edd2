"""How this machine's CPU adds up products of INT8."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

# A CPU's capability, beside OpenVINO's own words: its INT8 says nothing of how products are added up.
EXACT_INT8 = "EXACT_INT8"

_ARM = ("aarch64", "arm64")
_VNNI = {"avx512_vnni", "avx_vnni"}  # the kernel's words


@functools.cache
def sums_int8_exactly(machine: str = platform.machine(), cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether products of INT8 are added up in 32 bits: on x86 by VNNI, and on every Arm CPU.

    Other x86 CPUs add them up in pairs in 16 bits, and clip what does not fit (VPMADDUBSW in Intel's manual; oneDNN's
    page "Nuances of int8 computations"). False where the kernel does not say what an x86 CPU has.
    """
    if machine in _ARM:
        return True
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return not _VNNI.isdisjoint(flags)
