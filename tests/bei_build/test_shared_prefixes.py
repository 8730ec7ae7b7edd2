"""Models whose sequences share prefixes give the answers of those whose sequences do not: as OpenVINO's graph, with
attention by kernels of our own too, in ONNX Runtime as TensorRT's graph, and as the module for PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnxruntime
import openvino
import pytest
from hypothesis import given, settings

from bei.artifact.manifest import OPENVINO_ATTENTION
from bei.core import Encoding, Float32Array, PackedBatch
from bei.engine.packed_attention import installed_kernels, use_kernels
from bei.engine.packing import can_share, graph_inputs, rows_of_tokens
from bei.engine.shared_prefixes import sharing
from bei_build.onnx_graph.attention import AttentionCore
from bei_build.onnx_graph.transformer import write_graph
from bei_build.onnx_graph.writer import GraphTypes
from bei_build.spec.dtypes import DType
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import POOLINGS, NormSpec, RopeSpec
from bei_build.spec.short_convolution import ShortConvolutionSpec
from bei_build.torch_graph.model import packed_model, run
from tests.bei_build.targets.tiny import MAX_SEQ_LEN, VOCABULARY, random_weights, tiny_spec, with_heads_on_tokens
from tests.support.prefixes import encodings_with_prefixes

TOLERANCE = 1e-5

Outputs = dict[str, Float32Array]
Runs = Callable[[PackedBatch], Outputs]


def rope(**more: Any) -> RopeSpec:
    return RopeSpec(tuple(100.0 ** (-np.arange(8) / 8)), **more)


def with_convolution(spec: ModelSpec) -> ModelSpec:
    """``spec`` with a gated convolution in its first layer."""
    first, *others = spec.layers
    convolution = ShortConvolutionSpec(3, causal=True, bias=True)
    return replace(spec, layers=(replace(first, attention=None, convolution=convolution), *others))


SPECS: dict[str, ModelSpec] = {
    "positions of the table": tiny_spec(causal=True, pooling=("last",)),
    "rotation": tiny_spec(causal=True, rope=rope(), pooling=("last",)),
    "neighbours rotate, grouped queries": tiny_spec(
        causal=True, rope=rope(interleaved=True), num_kv_heads=1, pooling=("mean", "cls")
    ),
    "window, norms of heads": tiny_spec(
        causal=True, rope=rope(factor=1.2), window=8, qk_norm=NormSpec(1e-6, "rms", bias=False), pooling=("last",)
    ),
    "alibi and soft cap": tiny_spec(causal=True, alibi=True, softcap=3.0, pooling=("last",)),
    "a convolution": with_convolution(tiny_spec(causal=True, rope=rope(), pooling=("last",))),
    "all poolings": replace(tiny_spec(causal=True, rope=rope(), pooling=POOLINGS), pools_prompt=False, marked_id=3),
    "an output per token": with_heads_on_tokens(tiny_spec(causal=True, rope=rope())),
    "a score behind padding": replace(
        tiny_spec(causal=True, rope=rope()), heads=(HeadSpec("logits", ("last",), passed_id=5),)
    ),
}


def rows_of(spec: ModelSpec, found: Any, batch: PackedBatch) -> Outputs:
    rows: Outputs = {}
    for head in spec.heads:
        values = np.array(found[head.output])
        rows[head.output] = (
            values[: batch.batch_size] if head.pooling else rows_of_tokens(values[: batch.num_computed], batch)
        )
    return rows


def by_openvino(spec: ModelSpec, folder: Path, *, kernels: bool = False) -> Runs:
    types = GraphTypes(DType.FP32, DType.FP32)
    path = write_graph(spec, random_weights(spec), folder, types, AttentionCore.MATMUL_SOFTMAX, MAX_SEQ_LEN)
    hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": "1"}
    graph = openvino.Core().read_model(path)
    if kernels:
        found = installed_kernels(openvino, computes_bf16=False)
        assert found is not None
        use_kernels(openvino, graph, folder / OPENVINO_ATTENTION, found, MAX_SEQ_LEN, computes_bf16=False)
    model = openvino.Core().compile_model(graph, "CPU", hints)
    names = [port.any_name for port in model.inputs]
    assert can_share(names), names
    return lambda batch: rows_of(spec, model(graph_inputs(batch, names)), batch)


def by_kernels(spec: ModelSpec, folder: Path) -> Runs:
    return by_openvino(spec, folder, kernels=True)


def by_onnx_runtime(spec: ModelSpec, folder: Path) -> Runs:
    types = GraphTypes(DType.FP32, DType.FP32)
    path = write_graph(spec, random_weights(spec), folder, types, AttentionCore.TRT_ATTENTION, MAX_SEQ_LEN)
    session = onnxruntime.InferenceSession(path)
    names = [tensor.name for tensor in session.get_inputs()]
    outputs = [head.output for head in spec.heads]
    assert can_share(names), names
    return lambda batch: rows_of(
        spec, dict(zip(outputs, session.run(outputs, graph_inputs(batch, names)), strict=True)), batch
    )


# The module adds up packed tokens here, from the start of each sequence to its end, or reads their neighbours.
NOT_BY_PYTORCH = (
    "a convolution",
    "all poolings",
    "an output per token",
    "a score behind padding",
    "neighbours rotate, grouped queries",
)


def by_pytorch(spec: ModelSpec, _: Path) -> Runs:
    model = packed_model(spec, random_weights(spec), MAX_SEQ_LEN)
    assert can_share(model.input_names), model.input_names
    return lambda batch: run(model, batch)


FORMS = {
    "OpenVINO": by_openvino,
    "kernels": by_kernels,
    "ONNX Runtime": by_onnx_runtime,
    "PyTorch": by_pytorch,
}
needs_kernels = pytest.mark.skipif(find_spec("bei_kernels_cpu") is None, reason="bei-kernels-cpu is not installed")


@cache
def runs_of(form: str, name: str) -> Runs:
    with TemporaryDirectory() as folder:
        return FORMS[form](SPECS[name], Path(folder))


@pytest.mark.parametrize(
    ("form", "name"),
    [
        pytest.param(form, name, marks=needs_kernels if form == "kernels" else ())
        for form in FORMS
        for name in SPECS
        if form != "PyTorch" or name not in NOT_BY_PYTORCH
    ],
)
def test_shared_prefixes_change_no_answer(form: str, name: str) -> None:
    runs = runs_of(form, name)

    @settings(deadline=None, max_examples=12)
    @given(encodings_with_prefixes(VOCABULARY))
    def check(encodings: list[Encoding]) -> None:
        some = [one._replace(num_unpooled=min(2, one.num_tokens - 1)) for one in encodings]
        whole = PackedBatch.from_encodings(some)
        expected, found = runs(whole), runs(sharing(whole))
        for output, rows in expected.items():
            np.testing.assert_allclose(found[output], rows, atol=TOLERANCE, rtol=TOLERANCE)

    check()


@pytest.mark.parametrize("name", NOT_BY_PYTORCH)
def test_the_module_says_where_it_cannot_share(name: str) -> None:
    assert not can_share(packed_model(SPECS[name], random_weights(SPECS[name]), MAX_SEQ_LEN).input_names)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "kernels"])
def test_a_model_that_sees_later_tokens_would_answer_otherwise(form: str, tmp_path: Path) -> None:
    spec = tiny_spec(causal=False, pooling=("last",))
    runs = FORMS[form](spec, tmp_path)
    start = np.arange(1, 31, dtype=np.int32)
    batch = PackedBatch.from_encodings([Encoding(np.append(start, last).astype(np.int32)) for last in (40, 41)])
    whole, shared = (runs(one)["embedding"] for one in (batch, sharing(batch)))
    assert np.abs(whole - shared).max() > 10 * TOLERANCE
