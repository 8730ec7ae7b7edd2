"""What CPUs differ in: tests that need more than every one has are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from bei_build.targets.openvino import cpu_capabilities

needs_bf16 = pytest.mark.skipif("BF16" not in cpu_capabilities(), reason="this CPU does not compute in bf16")

# For ``parametrize``.
BF16 = pytest.param("bf16", marks=needs_bf16)


def instructions() -> list[str]:
    """Instruction sets of this machine's CPU, by the kernel's names; on an x86 CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
