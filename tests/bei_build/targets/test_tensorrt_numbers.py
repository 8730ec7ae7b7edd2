"""Numbers: the very file that TensorRT gets, run by ONNX Runtime, against the graph for the CPU, run by OpenVINO."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from bei.core import Encoding, Float32Array, PackedBatch
from bei.packing import bucket, graph_inputs
from bei_build.graph.attention import AttentionCore
from bei_build.graph.writer import DType
from bei_build.spec import POOLINGS
from tests.bei_build.targets.tiny import HEADS, MAX_SEQ_LEN, VOCABULARY, graph_of, tiny_spec


def mixed_batch(lengths: tuple[int, ...] = (1, 5, MAX_SEQ_LEN, 17, 2, 33, 8)) -> PackedBatch:
    rng = np.random.default_rng(1)
    return PackedBatch.from_encodings(
        [
            Encoding(rng.integers(0, VOCABULARY, n).astype(np.int32), rng.integers(0, 2, n).astype(np.int32))
            for n in lengths
        ]
    )


def run_onnxruntime(path: Path, batch: PackedBatch, **changes: Any) -> Float32Array:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs = graph_inputs(batch, [tensor.name for tensor in session.get_inputs()]) | changes
    (embedding,) = session.run(["embedding"], inputs)
    return cast(Float32Array, embedding[: batch.batch_size])


def run_openvino(path: Path, batch: PackedBatch) -> Float32Array:
    import openvino

    model = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    outputs = model(graph_inputs(batch, [tensor.any_name for tensor in model.inputs]))
    return cast(Float32Array, outputs["embedding"][: batch.batch_size])


@pytest.mark.parametrize("family", HEADS)
def test_trt_graph_computes_what_the_cpu_graph_computes(tmp_path: Path, family: str) -> None:
    spec, batch = tiny_spec(family, POOLINGS), mixed_batch()
    actual = run_onnxruntime(graph_of(spec, tmp_path / "trt", DType.FP32), batch)
    path = graph_of(spec, tmp_path / "cpu", DType.FP32, AttentionCore.MATMUL_SOFTMAX)
    for expected in (run_openvino(path, batch), run_onnxruntime(path, batch)):
        np.testing.assert_allclose(actual, expected, atol=1e-5, rtol=0)


def test_trt_graph_obeys_the_lengths(tmp_path: Path) -> None:
    """The control of the test above: with lengths that reach into the padding, the vectors are others."""
    batch, path = mixed_batch((1, 5, MAX_SEQ_LEN, 17, 2)), graph_of(tiny_spec(), tmp_path, DType.FP32)
    right = run_onnxruntime(path, batch)
    wrong = run_onnxruntime(path, batch, seq_lens=np.full(batch.batch_size, bucket(MAX_SEQ_LEN), np.int32))
    _, *shorter = np.abs(right - wrong).max(axis=1)  # one token is padded with itself: the mean over it is the same
    longest = shorter.pop(1)
    assert longest == 0.0
    assert min(shorter) > 1e-3


def test_trt_graph_in_fp16_is_close(tmp_path: Path) -> None:
    spec, batch = tiny_spec("bert", POOLINGS), mixed_batch()
    wide, narrow = (
        run_onnxruntime(graph_of(spec, tmp_path / dtype.value, dtype), batch) for dtype in (DType.FP32, DType.FP16)
    )
    cosines = (wide * narrow).sum(1) / np.linalg.norm(wide, axis=1) / np.linalg.norm(narrow, axis=1)
    assert cosines.min() > 0.9999
