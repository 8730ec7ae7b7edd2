"""The fused kernels: their choice and its reasons, in Triton's interpreter against their twins, and in exported
graphs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bei_build.torch_graph.fusion_choice import ALL, PARTS, choose_fusions
from bei_build.torch_graph.model import packed_model
from bei_build.torch_graph.package import export_model
from tests.bei_build.targets.test_fp8 import quantization_of
from tests.bei_build.targets.tiny import MAX_SEQ_LEN, random_weights

ROOT = Path(__file__).parent.parent.parent.parent
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: pip install --no-deps triton"
)

FIRST = (
    *("norm: LayerNorm without weights, smoothed", "norm: RMSNorm with an offset, of no sum, smoothed"),
    *("activation: GeGLU, rounded", "activation: gelu_10", "activation: mish", "rounding: extremes"),
    *("rotation: LayerNorms of heads, neighbours", "rotation: a part of each head"),
    *("pooling: mean without prompts, unit length", "pooling: max", "pooling: NaN"),
    "model: Llama, FP8",
)


@needs_triton
@pytest.mark.parametrize(
    "cases",
    [pytest.param(FIRST, id="some cases"), pytest.param((), id="all cases", marks=pytest.mark.slow)],
)
def test_the_kernels_equal_their_twins(cases: tuple[str, ...]) -> None:
    """In a separate process: Triton decides at import if its functions are interpreted."""
    command = [sys.executable, "-m", "tests.bei_build.torch_graph.interpreted_fused", *cases]
    path = os.pathsep.join([str(ROOT), str(ROOT / "build")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    differences = json.loads(result.stdout)
    assert len(differences) >= (len(cases) or 40)
    # A value between two numbers of FP8 that goes to the other one moves a model's output by a part of a step.
    bounds = {name: 1e-3 if "FP8" in name or "rounded" in name or "smoothed" in name else 2e-6 for name in differences}
    assert {name: found for name, found in differences.items() if not found <= bounds[name]} == {}


def test_the_choice_says_why_a_part_is_not_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = choose_fusions(torch.device("cpu"))
    assert not any(map(on_cpu.has, PARTS))
    assert set(on_cpu.reasons.values()) == {"Triton's kernels need CUDA, and the device is cpu"}
    found = {"triton": object()}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found.get(name))
    assert choose_fusions(torch.device("cuda")) == ALL
    found.clear()
    without = choose_fusions(torch.device("cuda"))
    assert not any(map(without.has, PARTS))
    assert set(without.reasons) == set(PARTS)
    assert "Triton is not installed" in without.reasons["norm"]


@needs_triton
def test_an_exported_graph_has_the_kernels_and_leaves_activations_to_inductor() -> None:
    """Traced on a CPU, which does not run them: sizes stay free, and no part of a kernel is lost."""
    from tests.bei_build.torch_graph.interpreted_fused import LLAMA, changed

    spec = changed(**LLAMA)
    model = packed_model(
        spec, random_weights(spec), MAX_SEQ_LEN, quantization=quantization_of(spec, "fp8"), fusions=ALL, kernel="ragged"
    )
    called = {str(node.target) for node in export_model(model).graph.nodes if node.op == "call_function"}
    assert {f"bei.{name}.default" for name in ("add_norm", "rotate", "pool", "ragged_attention")} <= called
    assert "bei.activate.default" not in called
