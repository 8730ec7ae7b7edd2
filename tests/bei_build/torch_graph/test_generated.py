"""The code that AOTInductor writes for GPUs, on a machine without one (``tests.support.fake_gpu``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bei_build.torch_graph.pretended_gpu import CAPABILITIES
from tests.support.fake_gpu import reason_to_skip
from tests.support.other_models import ADAPTED, OTHERS
from tests.support.zoo import FIRST_OF_FAMILY

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


# Launches of a layer, and around the layers. A layer has four products, the attention, two norms and an activation;
# some have rotations. Around them are embedding, first norm and pooling. In FP8 the attention's result is rounded: our
# own kernel does it, and behind PyTorch's FlashAttention, which cannot, it is a launch (docs/gpu.md).
LAUNCHES = {
    "BERT, BF16": (8, 2),
    "BERT, FP8": (9, 2),
    "Mistral, BF16": (9, 3),
    "Mistral, FP8": (10, 3),
    "Mistral with a soft cap, FP8": (9, 3),
}
NUM_LAYERS = 2


def check(case: str, facts: dict[str, Any], capability: int) -> None:
    """Kernels are for the capability, and ours compute nothing in FP64, which is 64 times slower on many GPUs. Their
    number is as written above, and no embedding is written twice.

    A few of Inductor's may: pooling finds marked tokens by integers as FP64 (``PackedStep.index_of_sequences``).
    """
    assert facts["kernels"]
    for name, kernel in facts["kernels"].items():
        assert kernel["target"].startswith(f".target sm_{capability}"), name
        assert kernel["cubin"] > 1000, name
        assert "fp64" not in kernel["signature"].values(), name
        assert kernel["fp64"] == 0 or not name.startswith("_"), name
    if case in LAUNCHES:
        of_a_layer, around = LAUNCHES[case]
        assert sum(facts["launches"].values()) <= NUM_LAYERS * of_a_layer + around, facts["launches"]
    for name, kernel in facts["kernels"].items():
        if "embedding" in name:
            written = {arg for arg, kind in kernel["signature"].items() if "out_ptr" in arg and kind == "*bf16"}
            values = [kernel["stored"][argument] for argument in written]
            assert len(values) == len(set(values)), (name, kernel["stored"])


def test_code_is_generated_and_kernels_compile() -> None:
    """Attention by Triton, rotations, norms to FP8, and numbers that are arguments of our kernels. With attention by
    PyTorch a package is made in targets/test_cuda_elsewhere.py, and the second tier looks at its code."""
    for case, facts in generated(90, "Mistral with a soft cap, FP8").items():
        check(case, facts, 90)


# FP8 products need 8.9.
BY_CAPABILITY = [
    (capability, precision)
    for capability in CAPABILITIES
    for precision in ("BF16", "FP8")
    if precision == "BF16" or capability >= 89
]
KINDS = (
    *("BERT", "Mistral", "Mistral with a soft cap", "positions: alibi", "positions: causal, window"),
    *("partial keys: primitive", "MPNetModel", "DebertaV2Model", "T5EncoderModel-gated", "experts"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "precision"), BY_CAPABILITY)
def test_every_kind_of_attention_compiles_for_every_generation(capability: int, precision: str) -> None:
    cases = [f"{name}, {precision}" for name in KINDS]
    for case, facts in generated(capability, *cases).items():
        check(case, facts, capability)


# Several a process: half of the time of one case is that of its process.
_NAMES = [*(case.name for case in FIRST_OF_FAMILY), *OTHERS]
FAMILIES = [_NAMES[start : start + 6] for start in range(0, len(_NAMES), 6)]


@pytest.mark.slow
@pytest.mark.parametrize("names", FAMILIES, ids=", ".join)
def test_every_family_compiles_for_sm_90(names: list[str]) -> None:
    cases = [f"{name}, BF16" for name in names] + [f"{name}, FP8" for name in names if name not in ADAPTED]
    for case, facts in generated(90, *cases).items():
        check(case, facts, 90)
