"""Residual sums and norms by a kernel of our own: where it is used, and that it computes what the graph computes."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bei.artifact.manifest import ENGINE_DIR, OPENVINO_MODEL, Artifact
from bei.core import Float32Array
from bei.engine.load import load_engine
from bei.engine.normalized_sums import in_bf16, use_norm_kernel
from bei.engine.packed_attention import installed_kernels
from bei_build.quantization import scales
from tests.support.builds import build_artifact, embed
from tests.support.cpus import BF16
from tests.support.zoo import CASES, MAX_TOKENS, encodings_of, save_case

needs_kernels = pytest.mark.skipif(find_spec("bei_kernels_cpu") is None, reason="bei-kernels-cpu is not installed")

WIDTH = 70  # not whole vectors of any CPU
# Norms behind a sum, before one whose sum is read again, without a bias, and RMS norms on both sides.
NAMES = (
    "BertModel",
    "ModernBertModel",
    "LlamaModel",
    "Gemma2Model",
    "T5EncoderModel",
    "DebertaV2Model",
)
BY_NAME = {case.name: case for case in CASES}

Change = Callable[[Any, Any], Any]


class Graph:
    """Two matrices, their sum and its norm, which is the output beside the sum. Steps of it may be replaced."""

    def __init__(self, *, rms: bool = False, with_sum: bool = False, **changes: Change) -> None:
        import openvino

        self.openvino, self.ops = openvino, openvino.opset13
        self._changes = changes
        random = np.random.default_rng(0)
        self.weight, self.bias = random.normal(size=(2, WIDTH)).astype(np.float32)
        inputs = [self.ops.parameter([-1, WIDTH], openvino.Type.f32, name=name) for name in ("rows", "residual")]
        total = self._changed("total", inputs[0], lambda ops, rows: ops.add(rows, inputs[1]))
        norm = self._rms_norm(total) if rms else self._layer_norm(total)
        self.model = openvino.Model([norm, *([total] if with_sum else [])], inputs, "norm")

    def _changed(self, step: str, value: Any, usual: Change) -> Any:
        return self._changes.get(step, usual)(self.ops, value)

    def _layer_norm(self, total: Any) -> Any:
        shape = self._changed(
            "normalized", total, lambda ops, value: ops.mvn(value, ops.constant([-1]), True, 1e-6, "inside_sqrt")
        )
        product = self._changed("weighted", shape, lambda ops, value: ops.multiply(value, ops.constant(self.weight)))
        return self._changed("biased", product, lambda ops, value: ops.add(value, ops.constant(self.bias)))

    def _rms_norm(self, total: Any) -> Any:
        ops = self.ops
        square = self._changed("square", total, lambda ops, value: ops.power(value, ops.constant(np.float32(2))))
        mean = self._changed("mean", square, lambda ops, value: ops.reduce_mean(value, ops.constant([-1]), True))
        root = ops.sqrt(ops.add(mean, ops.constant(np.float32(1e-6))))
        inverse = self._changed("inverse", root, lambda ops, value: ops.power(value, ops.constant(np.float32(-1))))
        return ops.multiply(ops.multiply(total, inverse), ops.constant(self.weight))

    def place_kernels(self, *, computes_bf16: bool = False) -> int:
        kernels = installed_kernels(self.openvino, computes_bf16=computes_bf16)  # which keeps the library loaded
        assert kernels is not None
        return use_norm_kernel(self.openvino, self.model, kernels.library, computes_bf16=computes_bf16)

    def run(self, *inputs: Float32Array) -> list[Float32Array]:
        compiled = self.openvino.Core().compile_model(self.model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        return [np.array(found) for found in compiled(list(inputs)).values()]


def matrices(count: int) -> tuple[Float32Array, Float32Array]:
    rows, residual = np.random.default_rng(1).normal(0.3, 2, (2, count, WIDTH)).astype(np.float32)
    return rows, residual


@needs_kernels
@pytest.mark.parametrize("with_sum", [False, True])
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("computes_bf16", [False, True])
def test_a_sum_and_its_norm_are_one_operation(rms: bool, with_sum: bool, computes_bf16: bool) -> None:
    graph, kernel = Graph(rms=rms, with_sum=with_sum), Graph(rms=rms, with_sum=with_sum)
    if computes_bf16 and with_sum:  # no cast less, as the sum stays FP32
        assert kernel.place_kernels(computes_bf16=True) == 0
        return
    assert kernel.place_kernels(computes_bf16=computes_bf16) == 1
    kinds = {node.get_type_name() for node in kernel.model.get_ops()}
    assert kinds == {"Parameter", "Constant", "NormalizedSum", "Result", *(["Convert"] if computes_bf16 else [])}
    inputs = matrices(37)
    for found, expected in zip(kernel.run(*inputs), graph.run(*inputs), strict=True):
        np.testing.assert_allclose(
            found, expected, rtol=0.01 if computes_bf16 else 0, atol=0.04 if computes_bf16 else 2e-5
        )


@needs_kernels
@pytest.mark.parametrize("computes_bf16", [False, True])
def test_a_row_has_the_same_bits_in_any_batch(computes_bf16: bool) -> None:
    kernel = Graph(with_sum=not computes_bf16)
    kernel.place_kernels(computes_bf16=computes_bf16)
    rows, residual = matrices(50)
    together = kernel.run(rows, residual)
    for first, end in ((0, 1), (7, 30), (49, 50)):
        for part, whole in zip(kernel.run(rows[first:end], residual[first:end]), together, strict=True):
            np.testing.assert_array_equal(part, whole[first:end])


def over_the_rows(ops: Any, value: Any) -> Any:
    return ops.mvn(value, ops.constant([0]), True, 1e-6, "inside_sqrt")


def outside_the_root(ops: Any, value: Any) -> Any:
    return ops.mvn(value, ops.constant([-1]), True, 1e-6, "outside_sqrt")


def centred_alone(ops: Any, value: Any) -> Any:
    return ops.mvn(value, ops.constant([-1]), False, 1e-6, "inside_sqrt")


def read_twice(ops: Any, value: Any) -> Any:
    return ops.multiply(ops.multiply(value, ops.constant(np.ones(WIDTH, np.float32))), ops.relu(value))


OTHERS: dict[str, dict[str, Any]] = {
    "a sum with a constant": {"total": lambda ops, rows: ops.add(rows, ops.constant(np.ones(WIDTH, np.float32)))},
    "a difference": {"total": lambda ops, rows: ops.subtract(rows, ops.relu(rows))},
    "a row for all tokens": {"total": lambda ops, rows: ops.add(rows, ops.reduce_sum(rows, ops.constant([0]), True))},
    "a number for each token": {
        "total": lambda ops, rows: ops.add(rows, ops.reduce_sum(rows, ops.constant([1]), True))
    },
    "another axis": {"normalized": over_the_rows},
    "another place of epsilon": {"normalized": outside_the_root},
    "no variance": {"normalized": centred_alone},
    "normalized values read twice": {"weighted": read_twice},
    "one weight": {"weighted": lambda ops, value: ops.multiply(value, ops.constant(np.float32(2)))},
    "a weight that is computed": {"weighted": lambda ops, value: ops.multiply(value, ops.relu(value))},
    "cubes": {"rms": True, "square": lambda ops, value: ops.power(value, ops.constant(np.float32(3)))},
    "roots": {"rms": True, "inverse": lambda ops, value: ops.power(value, ops.constant(np.float32(-0.5)))},
    "a mean of tokens": {"rms": True, "mean": lambda ops, value: ops.reduce_mean(value, ops.constant([0]), True)},
}


@needs_kernels
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_computed_otherwise_is_left_alone(name: str) -> None:
    graph, other = Graph(**OTHERS[name]), Graph(**OTHERS[name])
    assert other.place_kernels() == 0
    inputs = matrices(9)
    np.testing.assert_array_equal(other.run(*inputs)[0], graph.run(*inputs)[0])


@needs_kernels
@pytest.mark.parametrize("bias", ["missing", "one", "computed"])
def test_what_is_no_bias_is_added_behind_the_kernel(bias: str) -> None:
    changes: dict[str, Change] = {
        "missing": lambda _, value: value,
        "one": lambda ops, value: ops.add(value, ops.constant(np.float32(3))),
        "computed": lambda ops, value: ops.add(value, ops.relu(value)),
    }
    graph, kernel = (Graph(biased=changes[bias]) for _ in range(2))
    assert kernel.place_kernels() == 1
    inputs = matrices(5)
    np.testing.assert_allclose(kernel.run(*inputs)[0], graph.run(*inputs)[0], atol=2e-5)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], Artifact]]:
    """The artifact of a model in a precision; in int8 with a range for each token wherever that is better at all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scales, "_WORTH_A_RANGE_A_TOKEN", 1.0)

        def make(name: str, precision: str) -> Artifact:
            folder = tmp_path_factory.mktemp(f"{name}-{precision}")
            checkpoint = save_case(folder / "checkpoint", BY_NAME[name])
            return build_artifact(checkpoint, folder / "artifact", precision=precision, verify=False)

        yield make


def use_package_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As versions before 0.4.0, which had no list of operations."""
    import bei_kernels_cpu

    monkeypatch.delattr(bei_kernels_cpu, "OPERATIONS")


@needs_kernels
@pytest.mark.parametrize("precision", ["fp32", BF16, "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_an_engine_gives_what_it_gives_without_the_operation(
    name: str, precision: str, made: Callable[[str, str], Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = made(name, precision)
    encodings = encodings_of(BY_NAME[name], [1, MAX_TOKENS, 2, 17, 5], artifact.manifest.spec.vocab_size)
    rows = []
    for is_old in (False, True):
        with monkeypatch.context() as patch:
            if is_old:
                use_package_without(patch)
            with closing(load_engine(artifact.engine_dir, artifact.manifest, {"num_threads": 1})) as engine:
                rows.append(embed(engine, encodings))
    cosines = (rows[0] * rows[1]).sum(1) / np.linalg.norm(rows[0], axis=1) / np.linalg.norm(rows[1], axis=1)
    assert cosines.min() > (0.99 if precision == "int8" else 0.999)
    if precision != "int8":  # there, by what is rounded
        assert np.array_equal(rows[0], rows[1]) == (precision == "fp32")


@needs_kernels
@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_every_sum_that_a_norm_follows_is_found(
    name: str, precision: str, made: Callable[[str, str], Artifact]
) -> None:
    import openvino

    artifact, kernels = made(name, precision), installed_kernels(openvino, computes_bf16=False)
    assert kernels is not None
    model = openvino.Core().read_model(artifact.path / ENGINE_DIR / OPENVINO_MODEL)
    found = use_norm_kernel(openvino, model, kernels.library, computes_bf16=False)
    left = [node for node in model.get_ordered_ops() if node.get_type_name() in ("MVN", "ReduceMean")]
    assert found
    assert all(node.input_value(0).get_node().get_type_name() != "Add" for node in left)
    if precision == "int8":
        assert any(node.get_type_name() == "FakeQuantize" for node in model.get_ops()), "OpenVINO needs one"


def test_of_sums_before_a_cast_only_the_bias_of_a_product_is_narrowed() -> None:
    import openvino

    ops = openvino.opset13
    rows, row = ops.parameter([-1, WIDTH], openvino.Type.f32), ops.constant(np.ones(WIDTH, np.float32))
    product = ops.matmul(rows, ops.constant(np.ones((WIDTH, WIDTH), np.float32)), False, True)
    biased, scaled = ops.add(product, row), ops.add(ops.multiply(product, row), row)
    for total, is_narrow in (
        (biased, True),
        (scaled, True),
        (ops.add(rows, row), False),
        (ops.add(product, rows), False),
    ):
        in_bf16(ops, total.output(0))
        assert ("enforceBF16evenForGraphTail" in dict(total.get_rt_info().items())) == is_narrow


def test_a_package_without_the_operation_is_used_for_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(bei_kernel=lambda _: b"avx2")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    openvino = SimpleNamespace(__version__="2026.4.1-1")
    with_norms = {"OPERATIONS": ("NormalizedSum", "PackedAttention")}
    for version, operations, normalizes, activates in (
        ("0.3.0", {}, False, False),
        ("0.5.0", with_norms, True, False),
        ("0.6.0", with_norms, True, True),
    ):
        package = SimpleNamespace(__version__=version, OPENVINO="2026.4.1", LIBRARY=Path("lib.so"), **operations)
        monkeypatch.setitem(sys.modules, "bei_kernels_cpu", package)
        kernels = installed_kernels(openvino, computes_bf16=True)
        assert kernels is not None
        assert (kernels.normalizes_sums, kernels.activates) == (normalizes, activates)
