"""The choice of a layer's attention kernel, and the Triton kernel in Triton's interpreter against the plain one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bei_build.spec.parts import AttentionSpec, DisentangledSpec, RelativeBiasSpec
from bei_build.torch_graph.attention_kernels import choose_kernel

CUDA = torch.device("cuda")
ROOT = Path(__file__).parent.parent.parent.parent

FP8 = "rounded, smoothed, heads of 26"
DISENTANGLED = DisentangledSpec(8, True, 32, True, True, True, None)


@pytest.mark.parametrize("changes", [{}, {"causal": True}, {"window": 8}, {"num_kv_heads": 1, "causal": True}], ids=str)
def test_flash_attention_computes_what_it_can(changes: dict[str, Any]) -> None:
    spec = AttentionSpec(**{"num_heads": 2, "head_dim": 64, "num_kv_heads": 2, "scale": 0.125, **changes})
    choice = choose_kernel(spec, CUDA, torch.bfloat16, partial_keys=False)
    assert (choice.kernel, choice.reasons) == ("flash", ())


@pytest.mark.parametrize(
    ("changes", "partial_keys", "reason"),
    [
        ({"softcap": 30.0}, False, "soft cap"),
        ({"alibi": True}, False, "ALiBi"),
        ({"relative_bias": RelativeBiasSpec(32, 128)}, False, "relative bias"),
        ({"disentangled": DISENTANGLED}, False, "disentangled scores"),
        ({"head_dim": 26}, False, "heads of 26"),
        ({"window": 8}, True, "no keys"),
        ({"causal": True}, True, "no keys"),
    ],
    ids=str,
)
def test_what_it_cannot_the_triton_kernel_does_and_the_choice_says_why(
    changes: dict[str, Any], partial_keys: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = AttentionSpec(**{"num_heads": 2, "head_dim": 64, "num_kv_heads": 2, "scale": 0.125, **changes})
    found = {"triton": object()}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found.get(name))
    choice = choose_kernel(spec, CUDA, torch.bfloat16, partial_keys=partial_keys)
    assert choice.kernel == "ragged"
    assert any(reason in each for each in choice.reasons)
    found.clear()
    without = choose_kernel(spec, CUDA, torch.bfloat16, partial_keys=partial_keys)
    assert without.kernel == "plain"
    assert without.reasons[-1] == "Triton is not installed"


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "reason"),
    [
        ("cpu", torch.bfloat16, 64, "the device is cpu"),
        ("cuda", torch.float32, 64, "torch.float32"),
        ("cuda", torch.bfloat16, 512, "up to 256"),
    ],
)
def test_the_plain_kernel_is_left_where_no_other_can(
    device: str, dtype: torch.dtype, head_dim: int, reason: str
) -> None:
    spec = AttentionSpec(num_heads=2, head_dim=head_dim, num_kv_heads=2, scale=0.125)
    choice = choose_kernel(spec, torch.device(device), dtype, partial_keys=False)
    assert choice.kernel == "plain"
    assert any(reason in each for each in choice.reasons)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(("all at once", "disentangled", "partial keys, window", FP8), id="some cases"),
        pytest.param((), id="all cases", marks=pytest.mark.slow),
    ],
)
def test_the_triton_kernel_equals_the_plain_one(cases: tuple[str, ...]) -> None:
    """In a separate process: Triton decides at import if its functions are interpreted."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: pip install --no-deps triton")
    command = [sys.executable, "-m", "tests.bei_build.torch_graph.interpreted", *cases]
    path = os.pathsep.join([str(ROOT), str(ROOT / "build")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    differences = json.loads(result.stdout)
    assert len(differences) >= (len(cases) or 17)
    # Of numbers in FP8, the part that goes to the other neighbour.
    bounds = {name: 1e-3 if name.startswith("rounded") else 1e-5 for name in differences}
    assert {name: found for name, found in differences.items() if not found <= bounds[name]} == {}
