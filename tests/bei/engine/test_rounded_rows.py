"""Rounding by a kernel of our own: where the graph has it, and that it computes what the graph computes."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from bei.artifact.manifest import ENGINE_DIR, OPENVINO_ROUNDINGS, Artifact
from bei.core import Float32Array
from bei.engine.load import load_engine
from bei.engine.openvino import OpenVINOEngine
from bei.engine.packed_attention import Kernels, installed_kernels
from bei.engine.rounded_rows import RoundingSite, encoded_roundings, use_rounding_kernel
from bei.errors import EngineError
from bei_build.quantization import scales
from tests.support.builds import build_artifact, embed
from tests.support.cpus import needs_bf16
from tests.support.zoo import CASES, MAX_TOKENS, encodings_of, save_case

needs_kernels = pytest.mark.skipif(find_spec("bei_kernels_cpu") is None, reason="bei-kernels-cpu is not installed")

# GELU, a gated MLP, experts' products of some tokens, and scores that the kernel of attention leaves alone.
NAMES = ("BertModel", "LlamaModel", "NomicBertModel", "DebertaV2Model")
BY_NAME = {case.name: case for case in CASES}


def made(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, worth: float = 1.0) -> Artifact:
    """In int8, with a range for each token wherever that is as much better: by default wherever it is at all."""
    monkeypatch.setattr(scales, "_WORTH_A_RANGE_A_TOKEN", worth)
    checkpoint = save_case(folder / "checkpoint", BY_NAME[name])
    return build_artifact(checkpoint, folder / "artifact", precision="int8", verify=False)


def sites_of(artifact: Artifact) -> list[RoundingSite]:
    return msgspec.json.decode((artifact.path / ENGINE_DIR / OPENVINO_ROUNDINGS).read_bytes(), type=list[RoundingSite])


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_gives_what_the_graph_gives(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = made(name, tmp_path, monkeypatch)
    assert sites_of(artifact)
    encodings = encodings_of(BY_NAME[name], [1, MAX_TOKENS, 2, 17, 5], artifact.manifest.spec.vocab_size)
    rows = []
    for kernels in (False, True):
        options = {"num_threads": 1, "use_kernels": int(kernels)}
        with closing(load_engine(artifact.engine_dir, artifact.manifest, options)) as engine:
            assert ("bei-kernels-cpu" in engine.info.device) == kernels
            rows.append(embed(engine, encodings))
    cosines = (rows[0] * rows[1]).sum(1) / np.linalg.norm(rows[0], axis=1) / np.linalg.norm(rows[1], axis=1)
    assert cosines.min() > 0.99
    assert not np.array_equal(rows[0], rows[1]), "the kernel rounds from other numbers, so some codes differ"


@needs_bf16
@needs_kernels
@pytest.mark.parametrize("worth", [0.8, 1.0])
def test_products_write_bf16(worth: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not FP32, which takes another pass to be what the kernels read."""
    artifact = made("BertModel", tmp_path, monkeypatch, worth=worth)
    with closing(load_engine(artifact.engine_dir, artifact.manifest)) as engine:
        assert isinstance(engine, OpenVINOEngine)
        facts = [node.get_rt_info() for node in engine._model.get_runtime_model().get_ops()]
    written = {it["outputPrecisions"].value for it in facts if it["layerType"].value == "FullyConnected"}
    assert "bf16" in written
    assert "f32" not in written


@needs_kernels
def test_a_list_that_does_not_fit_its_model_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bei_kernels_cpu
    import openvino

    artifact, listed = made("BertModel", tmp_path, monkeypatch), tmp_path / OPENVINO_ROUNDINGS
    listed.write_bytes(encoded_roundings([msgspec.structs.replace(sites_of(artifact)[0], codes="another")]))
    model = openvino.Core().read_model(artifact.path / ENGINE_DIR / "model.xml")
    with pytest.raises(EngineError, match=r"roundings\.json.*build it again"):
        use_rounding_kernel(openvino, model, listed, Kernels(bei_kernels_cpu.LIBRARY, ""), computes_bf16=False)


WIDTH, BOUND = 70, -0.17  # not whole vectors of any CPU; below what GELU gives


def activation(*, sized: bool, approximation: str = "erf") -> Any:
    """A graph that rounds GELU of its input, with a range for each row: of a product that has sizes and a bias or
    not."""
    import openvino

    ops, random = openvino.opset13, np.random.default_rng(0)
    inputs = [ops.parameter([-1, WIDTH], openvino.Type.f32), *([ops.parameter([-1, 1], openvino.Type.f32)] * sized)]
    value = inputs[0]
    if sized:
        value = ops.add(ops.multiply(value, inputs[1]), ops.constant(random.normal(size=WIDTH).astype(np.float32)))
    value = ops.gelu(value, approximation)
    factors = ops.constant(np.exp(random.normal(size=WIDTH)).astype(np.float32))
    shifted = ops.multiply(ops.subtract(value, ops.constant(np.float32(BOUND))), factors)
    sizes = ops.maximum(ops.reduce_max(shifted, ops.constant([1]), True), ops.constant(np.float32(1e-6)))
    shares = ops.multiply(ops.divide(shifted, sizes), ops.constant(np.float32(255)))
    codes = ops.convert(ops.round(shares), "u8")
    for name, node in (("value", value), ("factors", factors), ("sizes", sizes), ("codes", codes)):
        node.output(0).set_names({name})
    return openvino.Model([codes, sizes], inputs, "activation")


def with_kernel(model: Any, folder: Path, *, computes_bf16: bool = False, activates: bool = True) -> set[str]:
    """Put the kernel into ``model``; the kinds of its operations then."""
    import openvino

    kernels = installed_kernels(openvino, computes_bf16=computes_bf16)
    assert kernels is not None
    if activates and not kernels.activates:
        pytest.skip("the installed bei-kernels-cpu is older")
    listed = folder / OPENVINO_ROUNDINGS
    site = RoundingSite(value="value", codes="codes", sizes="sizes", factors="factors", least=BOUND)
    listed.write_bytes(encoded_roundings([site]))
    kernels = replace(kernels, activates=activates)
    use_rounding_kernel(openvino, model, listed, kernels, computes_bf16=computes_bf16)
    return {node.get_type_name() for node in model.get_ops()}


def outputs_of(model: Any, inputs: list[Float32Array]) -> tuple[Float32Array, Float32Array]:
    import openvino

    compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    codes, sizes = (np.array(found, np.float32) for found in compiled(inputs).values())
    return codes, sizes


@needs_kernels
@pytest.mark.parametrize("computes_bf16", [False, True])
@pytest.mark.parametrize("sized", [False, True])
def test_gelu_is_a_part_of_the_rounding_after_it(sized: bool, computes_bf16: bool, tmp_path: Path) -> None:
    model = activation(sized=sized)
    kinds = with_kernel(model, tmp_path, computes_bf16=computes_bf16)
    assert kinds == {"Parameter", "Constant", "RoundedRows", "Result", *(["Convert"] if computes_bf16 else [])}
    random = np.random.default_rng(1)
    inputs = [random.normal(0, 3, (37, WIDTH)).astype(np.float32)]
    if sized:
        inputs.append(random.uniform(0.5, 2, (37, 1)).astype(np.float32))
    (codes, sizes), (expected, of_graph) = outputs_of(model, inputs), outputs_of(activation(sized=sized), inputs)
    np.testing.assert_allclose(sizes, of_graph, rtol=0.01 if computes_bf16 else 1e-4)
    assert np.abs(codes - expected).max() <= (4 if computes_bf16 else 1)
    assert (codes != expected).mean() < (0.3 if computes_bf16 else 0.01)


@needs_kernels
def test_another_approximation_of_gelu_stays(tmp_path: Path) -> None:
    assert "Gelu" in with_kernel(activation(sized=True, approximation="tanh"), tmp_path)


@needs_kernels
def test_gelu_stays_where_the_package_is_older(tmp_path: Path) -> None:
    assert "Gelu" in with_kernel(activation(sized=True), tmp_path, activates=False)
