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
from bei.engine.cuda.device import TwinDevice
from bei.errors import CompileError
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.parts import RopeSpec
from bei_build.torch_graph.experts import Experts
from bei_build.torch_graph.fp8 import FP8Linear
from bei_build.torch_graph.model import PackedModel, packed_model, run, tensors_of
from bei_build.torch_graph.package import export_model, weights_of, write_package, write_weights
from bei_build.torch_graph.parameters import join_linear_layers
from tests.bei_build.targets.test_fp8 import quantization_of
from tests.bei_build.targets.tiny import MAX_SEQ_LEN, random_weights, read_case, tiny_spec, with_experts
from tests.bei_build.torch_graph.test_parity_graph import SPECS, encodings_of, model_of
from tests.support.zoo import CASES, Case
from tests.support.zoo import encodings_of as zoo_encodings


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


ROPE = RopeSpec(tuple(np.geomspace(1.0, 1e-3, 8).tolist()))
IN_FP8 = {
    "rotations": tiny_spec(rope=ROPE, causal=True),
    "experts, rotations": with_experts(tiny_spec(rope=ROPE)),
    "experts": with_experts(tiny_spec()),
    "causal": tiny_spec(causal=True),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "rotations" in name else pytest.mark.slow) for name in IN_FP8]
)
def test_an_exported_graph_in_fp8_computes_the_same_for_other_sizes(name: str) -> None:
    """Layers share rotations, and products share roundings: an exported graph must share them too."""
    spec = IN_FP8[name]
    model = packed_model(
        *(spec, random_weights(spec), MAX_SEQ_LEN), dtype=torch.bfloat16, quantization=quantization_of(spec, "fp8")
    )
    join_linear_layers(model)
    exported = export_model(model)
    assert_same(exported.module(), model, spec)


def test_the_example_of_an_export_has_the_size_of_a_usual_step() -> None:
    """Inductor chooses blocks and tunes by it."""
    nodes = export_model(model_of(tiny_spec())).graph.nodes
    hints = {node.name: node.meta["val"].shape[0].node.hint for node in nodes if node.name == "inputs_input_ids"}
    assert hints == {"inputs_input_ids": 4096}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_exported_graph_of_each_class_is_the_module(case: Case, precision: str, tmp_path: Path) -> None:
    checkpoint = read_case(case, tmp_path)
    spec, max_seq_len = checkpoint.spec, checkpoint.max_seq_len
    quantization = quantization_of(spec, "fp8") if precision == "fp8" else None
    with checkpoint.weights() as weights:
        model = packed_model(spec, weights.read, max_seq_len, dtype=torch.bfloat16, quantization=quantization)
    join_linear_layers(model)
    exported = export_model(model).module()
    for lengths in ([17, 1, 5, 33], [3, 3]):
        batch = PackedBatch.from_encodings(zoo_encodings(case, lengths, spec.embeddings.vocab_size))
        expected = run(model, batch)
        with torch.inference_mode():
            actual = exported(tensors_of(model, batch))
        assert actual.keys() == expected.keys()
        for name, rows in expected.items():
            np.testing.assert_array_equal(actual[name][: len(rows)].numpy(), rows)


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
    program = export_model(model)
    write_package(program, tmp_path / "model.pt2")
    write_weights(weights_of(program), tmp_path / "model.safetensors")
    package = TwinDevice(torch).load(tmp_path / "model.pt2", tmp_path / "model.safetensors")
    batch = PackedBatch.from_encodings(encodings_of(spec))
    expected = run(model, batch)["embedding"]
    actual = package.boxed_run(list(tensors_of(model, batch).values()))[0][: len(expected)].numpy()
    cosines = (actual * expected).sum(1) / np.linalg.norm(actual, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosines.min() >= (0.999 if dtype is torch.bfloat16 else 0.999999)


def test_a_module_whose_code_fixes_the_number_of_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """``len`` of a tensor is a number, and the symbol of its size becomes that number."""
    whole = PackedModel.forward

    def forward(self: PackedModel, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert len(inputs["input_ids"]) > 0
        return whole(self, inputs)

    monkeypatch.setattr(PackedModel, "forward", forward)
    with pytest.raises(CompileError, match=r"inputs_input_ids.* with a constant size"):
        export_model(model_of(tiny_spec()))
