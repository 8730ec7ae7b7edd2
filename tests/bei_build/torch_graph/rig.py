"""Running a module and the ONNX graph of the same spec on the same batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino

from bei.core import Encoding, Float32Array, PackedBatch, rows_of_sequences
from bei.engine.packing import graph_inputs
from bei_build.onnx_graph.attention import AttentionCore
from bei_build.onnx_graph.transformer import Read, write_graph
from bei_build.onnx_graph.writer import GraphTypes
from bei_build.spec.dtypes import DType
from bei_build.spec.model_spec import ModelSpec
from bei_build.torch_graph.model import PackedModel, run


def rows_by_output(
    spec: ModelSpec, outputs: dict[str, Float32Array], batch: PackedBatch
) -> dict[str, list[Float32Array]]:
    """Each output cut into the part of each sequence."""
    per_token: dict[str, bool] = {head.output: not head.pooling for head in spec.heads}
    return {name: rows_of_sequences(rows, batch, per_token=per_token[name]) for name, rows in outputs.items()}


def of_the_module(model: PackedModel, encodings: Sequence[Encoding]) -> dict[str, list[Float32Array]]:
    batch = PackedBatch.from_encodings(encodings)
    return rows_by_output(model.spec, run(model, batch), batch)


def of_the_graph(
    spec: ModelSpec, read: Read, max_seq_len: int, encodings: Sequence[Encoding], folder: Path
) -> dict[str, list[Float32Array]]:
    """Outputs of the graph in FP32, by OpenVINO."""
    folder.mkdir(parents=True, exist_ok=True)
    types, core = GraphTypes(DType.FP32, DType.FP32), AttentionCore.MATMUL_SOFTMAX
    path = write_graph(spec, read, folder, types, core, max_seq_len)
    model = openvino.Core().compile_model(
        path, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": "1"}
    )
    batch = PackedBatch.from_encodings(encodings)
    found = model(graph_inputs(batch, [tensor.any_name for tensor in model.inputs]))
    counts = {head.output: batch.batch_size if head.pooling else batch.num_tokens for head in spec.heads}
    outputs: dict[str, Float32Array] = {name: np.array(found[name][:count]) for name, count in counts.items()}
    return rows_by_output(spec, outputs, batch)
