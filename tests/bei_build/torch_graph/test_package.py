"""The module as an exported graph and as a compiled package: any sizes, the same numbers."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bei.core import PackedBatch
from bei_build.spec.model_spec import ModelSpec
from bei_build.torch_graph.experts import Experts
from bei_build.torch_graph.fp8 import FP8Linear
from bei_build.torch_graph.model import PackedModel, packed_model, run, tensors_of
from bei_build.torch_graph.package import export_model, write_package
from bei_build.torch_graph.parameters import join_linear_layers
from tests.bei_build.targets.test_fp8 import quantization_of
from tests.bei_build.targets.tiny import MAX_SEQ_LEN, random_weights, tiny_spec, with_experts
from tests.bei_build.torch_graph.test_parity_graph import SPECS, encodings_of, model_of


def assert_same(compiled: Any, model: PackedModel, spec: ModelSpec) -> None:
    """On batches of other sizes than the example's, without filler rows."""
    for encodings in (encodings_of(spec), encodings_of(spec)[:2]):
        batch = PackedBatch.from_encodings(encodings)
        expected = run(model, batch)
        with torch.inference_mode():
            actual = compiled(tensors_of(model, batch))
        assert actual.keys() == expected.keys()
        for name, rows in expected.items():
            np.testing.assert_allclose(actual[name][: len(rows)].numpy(), rows, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_the_exported_graph_computes_the_same_for_other_sizes(name: str) -> None:
    model = model_of(SPECS[name])
    assert_same(export_model(model).module(), model, SPECS[name])


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, True])
def test_an_exported_graph_in_fp8_computes_the_same_for_other_sizes(experts: bool) -> None:
    spec = with_experts(tiny_spec()) if experts else tiny_spec(causal=True)
    model = packed_model(spec, random_weights(spec), MAX_SEQ_LEN, quantization=quantization_of(spec, "fp8"))
    join_linear_layers(model)
    assert_same(export_model(model).module(), model, spec)


def test_an_exported_graph_calls_pytorchs_own_kernels_of_a_gpu_as_they_are_described() -> None:
    """Traced on a CPU, which does not run them: PyTorch's descriptions of the operators check every call."""
    spec = with_experts(tiny_spec(causal=True, num_kv_heads=1))
    model = packed_model(
        *(spec, random_weights(spec), MAX_SEQ_LEN),
        dtype=torch.bfloat16,
        kernel="flash",
        quantization=quantization_of(spec, "fp8"),
    )
    join_linear_layers(model)
    for module in model.modules():
        if isinstance(module, FP8Linear):
            module._product = "rowwise"
        elif isinstance(module, Experts):
            module._grouped = True
    called = Counter(str(node.target) for node in export_model(model).graph.nodes if node.op == "call_function")
    counts = {"_flash_attention_forward": 2, "_scaled_mm": 6, "_scaled_grouped_mm": 2}
    assert {name: called[f"aten.{name}.default"] for name in counts} == counts


@pytest.mark.slow
# PyTorch's compiler uses what PyTorch itself has deprecated.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning", "ignore:.*LeafSpec:FutureWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs g++")
@pytest.mark.parametrize(
    ("dtype", "is_fp8"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)], ids=str
)
def test_a_compiled_package_computes_the_same(dtype: torch.dtype, is_fp8: bool, tmp_path: Path) -> None:
    spec = tiny_spec(causal=True, window=20)
    quantization = quantization_of(spec, "fp8") if is_fp8 else None
    model = packed_model(spec, random_weights(spec), MAX_SEQ_LEN, dtype=dtype, quantization=quantization)
    join_linear_layers(model)
    path = tmp_path / "model.pt2"
    write_package(model, path)
    package = torch._inductor.aoti_load_package(str(path))
    batch = PackedBatch.from_encodings(encodings_of(spec))
    expected = run(model, batch)["embedding"]
    actual = package(tensors_of(model, batch))["embedding"][: len(expected)].numpy()
    cosines = (actual * expected).sum(1) / np.linalg.norm(actual, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosines.min() >= (0.999 if dtype is torch.bfloat16 else 0.999999)
