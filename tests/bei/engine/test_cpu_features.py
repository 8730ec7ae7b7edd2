"""CPUs that accumulate INT8 products exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

from bei.engine.cpu_features import sums_int8_exactly

ZEN_3 = "fpu sse4_1 ssse3 avx avx2 fma vaes"
SKYLAKE = "fpu avx2 avx512f avx512bw avx512vl"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (ZEN_3, False),
        (SKYLAKE, False),
        (f"{SKYLAKE} avx512_vnni", True),
        (f"{ZEN_3} avx_vnni", True),
        (f"{SKYLAKE} avx512_vnni amx_int8", True),
    ],
)
def test_x86_needs_vnni(flags: str, expected: bool, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: avx512_vnni\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
    assert sums_int8_exactly("x86_64", cpuinfo) is expected


@pytest.mark.parametrize(("machine", "expected"), [("aarch64", True), ("arm64", True), ("x86_64", False)])
def test_without_a_word_of_the_kernel_only_arm_does(machine: str, expected: bool, tmp_path: Path) -> None:
    assert sums_int8_exactly(machine, tmp_path / "missing") is expected
