"""Precision of heads where an engine on the CPU computes in BF16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino

from bei.core import Encoding, PackedBatch
from bei.engine.packing import graph_inputs
from bei_build.onnx_graph.attention import AttentionCore
from bei_build.onnx_graph.transformer import write_graph
from bei_build.onnx_graph.writer import GraphTypes
from bei_build.spec.dtypes import DType
from bei_build.spec.model_spec import HeadSpec
from bei_build.spec.parts import DenseSpec
from tests.bei_build.targets.tiny import HIDDEN, MAX_SEQ_LEN, VOCABULARY, static_spec
from tests.support.cpus import needs_bf16

CAP = 30.0


@needs_bf16
def test_two_scores_near_their_cap_are_compared_in_fp32(tmp_path: Path) -> None:
    """They differ by 0.16, and BF16 has steps of 0.12 there: a matrix product would be off by 0.05."""
    capped = DenseSpec("lm_head", HIDDEN, 2, bias=False, activation="tanh")
    compared = DenseSpec("compared", 2, 1, bias=False, factors=(CAP, -CAP))
    spec = replace(static_spec(None), heads=(HeadSpec("logits", ("last",), layers=(capped, compared)),))
    rng = np.random.default_rng(0)
    along = np.sign(rng.standard_normal(HIDDEN))
    states = along + 0.1 * rng.standard_normal((VOCABULARY, HIDDEN))
    rows = along * 2.0 / HIDDEN + 0.01 * rng.standard_normal((2, HIDDEN))
    weights = {
        "embeddings.word.weight": states.astype(np.float32),
        "lm_head.weight": rows.astype(np.float32),
        "compared.weight": np.array([[CAP, -CAP]], np.float32),
    }
    types = GraphTypes(DType.FP32, DType.FP32)
    path = write_graph(
        spec, weights.__getitem__, tmp_path, types, AttentionCore.MATMUL_SOFTMAX, max_seq_len=MAX_SEQ_LEN
    )
    model = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"})
    batch = PackedBatch.from_encodings([Encoding(np.array([i], np.int32), None) for i in range(VOCABULARY)])
    actual = model(graph_inputs(batch, [tensor.any_name for tensor in model.inputs]))["logits"][:VOCABULARY, 0]
    scores = CAP * np.tanh(states @ rows.T)
    expected = scores[:, 0] - scores[:, 1]
    assert np.sqrt(np.square(actual - expected).mean()) < 0.02
