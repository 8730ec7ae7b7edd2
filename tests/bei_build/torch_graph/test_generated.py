"""The code that AOTInductor writes for GPUs, on a machine without one (``tests.support.fake_gpu``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_gpu import reason_to_skip

ROOT = Path(__file__).parent.parent.parent.parent
pytestmark = pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip()))


def generated(capability: int, *cases: str) -> dict[str, Any]:
    """The facts of ``tests.bei_build.torch_graph.generated``, by case."""
    command = [sys.executable, "-m", "tests.bei_build.torch_graph.generated", str(capability), *cases]
    path = os.pathsep.join([str(ROOT), str(ROOT / "build")])
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
    assert result.returncode == 0, result.stderr[-4000:]
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def check_kernels(facts: dict[str, Any], capability: int) -> None:
    """Each is a cubin for the capability, and computes nothing in FP64, which is 64 times slower on many GPUs."""
    assert facts["kernels"]
    for name, kernel in facts["kernels"].items():
        assert kernel["target"].startswith(f".target sm_{capability}"), name
        assert kernel["cubin"] > 1000, name
        assert "fp64" not in kernel["signature"].values(), name
        assert kernel["fp64"] == 0, name


def test_code_is_generated_and_kernels_compile() -> None:
    """Attention by PyTorch and by Triton, rotations, norms to FP8, and numbers that are arguments of our kernels."""
    for facts in generated(90, "BERT, FP8", "Mistral with a soft cap, FP8").values():
        check_kernels(facts, 90)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [89, 100, 120])
def test_code_is_generated_for_every_generation_of_gpus(capability: int) -> None:
    for facts in generated(capability, "BERT, BF16", "Mistral, BF16").values():
        check_kernels(facts, capability)
