"""Numbers: the same file that TensorRT gets, run by ONNX Runtime.

Every model is compared with the HF class; models outside the zoo with the graph for the CPU, run by OpenVINO.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest

from bei.core import Encoding, Float32Array, Outputs, PackedBatch, rows_of_sequences
from bei.engine.packing import bucket, graph_inputs
from bei_build.checkpoint.checkpoint import Checkpoint
from bei_build.onnx_graph.attention import AttentionCore
from bei_build.spec.dtypes import DType
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import POOLINGS, Pooling
from tests.bei_build.targets.tiny import (
    BY_POSITION,
    HEADS,
    MAX_SEQ_LEN,
    PARTIAL_KEYS,
    VOCABULARY,
    case_named,
    graph_of,
    graph_of_checkpoint,
    read_case,
    static_spec,
    tiny_spec,
    with_experts,
    with_heads_on_tokens,
)
from tests.support.builds import random_encodings
from tests.support.zoo import CASES, MAX_TOKENS, Case, by_tier, encodings_of, hf_outputs

TOLERANCE = 1e-4
LONGEST = MAX_TOKENS - 3  # no bucket: there are slots beyond the model's last position
LENGTHS = [1, LONGEST, 2, 17, 16, 5, 33, 9, *range(1, 26)]  # 33 sequences, no bucket either: there is a filler row

# One model a lowering and kind of output: those whose FP16 is looked at.
IN_FP16 = (
    "BertModel",
    "BertForMaskedLM",
    "MPNetModel",
    "MPNetForTokenClassification",
    "DebertaV2Model",
    "ModernBertModel",
    "LlamaModel",
    "MistralForSequenceClassification",
    "Qwen3Model",
    "Gemma2Model",
    "Gemma3TextModel",
)


def mixed_batch(lengths: tuple[int, ...] = (1, 5, MAX_SEQ_LEN, 17, 2, 33, 8)) -> PackedBatch:
    rng = np.random.default_rng(1)
    return PackedBatch.from_encodings(
        [
            Encoding(rng.integers(0, VOCABULARY, n).astype(np.int32), rng.integers(0, 2, n).astype(np.int32))
            for n in lengths
        ]
    )


def run_onnxruntime(path: Path, batch: PackedBatch, **changes: Any) -> Outputs:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs = graph_inputs(batch, [tensor.name for tensor in session.get_inputs()]) | changes
    names = [tensor.name for tensor in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def run_openvino(path: Path, batch: PackedBatch, names: Iterable[str]) -> Outputs:
    import openvino

    model = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    outputs = model(graph_inputs(batch, [tensor.any_name for tensor in model.inputs]))
    return {name: outputs[name] for name in names}


def without_filler(outputs: Outputs, spec: ModelSpec, batch: PackedBatch) -> dict[str, Float32Array]:
    rows: dict[str, int] = {head.output: batch.batch_size if head.pooling else batch.num_tokens for head in spec.heads}
    return {name: values[: rows[name]] for name, values in outputs.items()}


def rows_of(checkpoint: Checkpoint, path: Path, case: Case, encodings: list[Encoding]) -> list[Float32Array]:
    """The rows of the graph at ``path`` for each of ``encodings``."""
    batch = PackedBatch.from_encodings(encodings)
    head = checkpoint.spec.heads[0]
    assert head.output == case.output
    outputs = without_filler(run_onnxruntime(path, batch), checkpoint.spec, batch)
    return rows_of_sequences(outputs[head.output], batch, per_token=not head.pooling)


# In the first tier one model a lowering: test_parity_matrix has a class of each family there, and the special cases.
@pytest.mark.parametrize("case", by_tier(*map(case_named, IN_FP16)))
def test_trt_graph_computes_what_the_hf_model_computes(tmp_path: Path, case: Case) -> None:
    checkpoint = read_case(case, tmp_path, pooling=None if case.vector else "mean", max_seq_len=LONGEST)
    encodings = encodings_of(case, LENGTHS, checkpoint.spec.embeddings.vocab_size)
    actual = rows_of(checkpoint, graph_of_checkpoint(checkpoint, tmp_path, DType.FP32), case, encodings)
    expected = hf_outputs(checkpoint.folder, case, encodings)
    if case.output == "embedding" and not case.vector:
        expected = [states.mean(0) for states in expected]
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)


# One model a form that can be packed, and one that is packed in some layers only.
PACKED = ("BertModel", "LlamaModel", "ModernBertModel", "Gemma3TextModel", "BartModel")


@pytest.mark.parametrize("case", by_tier(*(case for case in CASES if case.name in PACKED)))
def test_packed_graph_computes_what_the_hf_model_computes(tmp_path: Path, case: Case) -> None:
    checkpoint = read_case(case, tmp_path, pooling=None if case.vector else "mean", max_seq_len=LONGEST)
    encodings = encodings_of(case, LENGTHS, checkpoint.spec.embeddings.vocab_size)
    path = graph_of_checkpoint(checkpoint, tmp_path, DType.FP32, AttentionCore.TRT_PACKED)
    actual = rows_of(checkpoint, path, case, encodings)
    expected = hf_outputs(checkpoint.folder, case, encodings)
    if case.output == "embedding" and not case.vector:
        expected = [states.mean(0) for states in expected]
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("attention", [{}, {"causal": True}], ids=["both", "causal"])
def test_packed_graph_obeys_the_lengths(tmp_path: Path, attention: dict[str, Any]) -> None:
    """The control: with two neighbours given as one sequence, the second has another vector, and the rest the same
    (also the first, unless attention is causal)."""
    batch = mixed_batch((1, 5, MAX_SEQ_LEN, 17, 2, 33, 8))
    path = graph_of(tiny_spec(**attention), tmp_path, DType.FP32, AttentionCore.TRT_PACKED)
    right = run_onnxruntime(path, batch)["embedding"]
    starts = graph_inputs(batch, ["cu_query_lens"])["cu_query_lens"].copy()
    starts[4] = starts[3]  # the sequence 4 has all tokens of 3, and that none
    wrong = run_onnxruntime(path, batch, cu_query_lens=starts, cu_key_lens=starts)["embedding"]
    moved = np.abs(right - wrong).max(axis=1)[: batch.batch_size]
    assert moved[4] > 1e-3
    assert np.delete(moved, [3, 4]).max() < 1e-6
    assert (moved[3] > 1e-3) == ("causal" not in attention)


@pytest.mark.parametrize("name", IN_FP16)
def test_trt_graph_of_every_lowering_is_close_in_fp16(tmp_path: Path, name: str) -> None:
    """Filler slots and rows have no visible keys; no NaN of theirs reaches a token."""
    case = case_named(name)
    checkpoint = read_case(case, tmp_path, pooling="mean", max_seq_len=LONGEST)
    encodings = random_encodings(LENGTHS, checkpoint.spec.embeddings.vocab_size)
    wide, narrow = (
        np.concatenate(
            [
                np.atleast_2d(row)
                for row in rows_of(
                    checkpoint, graph_of_checkpoint(checkpoint, tmp_path / dtype.value, dtype), case, encodings
                )
            ]
        )
        for dtype in (DType.FP32, DType.FP16)
    )
    assert cosines(wide, narrow).min() > 0.999


def cosines(first: Float32Array, second: Float32Array) -> Float32Array:
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return cast(Float32Array, (first * second).sum(1) / lengths)


def assert_same_as_cpu_graph(
    spec: ModelSpec,
    folder: Path,
    batch: PackedBatch | None = None,
    core: AttentionCore = AttentionCore.TRT_ATTENTION,
) -> None:
    batch = batch or mixed_batch()
    actual = without_filler(run_onnxruntime(graph_of(spec, folder / "trt", DType.FP32, core), batch), spec, batch)
    path = graph_of(spec, folder / "cpu", DType.FP32, AttentionCore.MATMUL_SOFTMAX)
    for outputs in (run_openvino(path, batch, actual), run_onnxruntime(path, batch)):
        expected = without_filler(outputs, spec, batch)
        assert set(actual) == set(expected) == set(spec.dimensions)
        for name, values in actual.items():
            np.testing.assert_allclose(values, expected[name], atol=1e-5, rtol=0, err_msg=name)


@pytest.mark.parametrize("family", HEADS)
def test_trt_graph_computes_what_the_cpu_graph_computes(tmp_path: Path, family: str) -> None:
    assert_same_as_cpu_graph(tiny_spec(family, POOLINGS), tmp_path)


@pytest.mark.parametrize("attention", BY_POSITION.values(), ids=BY_POSITION)
def test_trt_graph_has_the_cpu_graphs_biases_by_position(tmp_path: Path, attention: dict[str, Any]) -> None:
    assert_same_as_cpu_graph(tiny_spec(**attention), tmp_path)


@pytest.mark.parametrize("attention", [{}, {"causal": True}, {"window": 8}], ids=["both", "causal", "window"])
@pytest.mark.parametrize("batch_size", [1, 7, 33], ids=str)  # 33: there is a filler sequence, which owns a token
def test_packed_graph_computes_what_the_cpu_graph_computes(
    tmp_path: Path, attention: dict[str, Any], batch_size: int
) -> None:
    lengths = tuple(1 + 7 * index % MAX_SEQ_LEN for index in range(batch_size))
    spec = with_heads_on_tokens(with_causal_or_window(attention))
    assert_same_as_cpu_graph(spec, tmp_path, mixed_batch(lengths), AttentionCore.TRT_PACKED)


def with_causal_or_window(attention: dict[str, Any]) -> ModelSpec:
    """``attention`` in the second layer only: two forms in one graph."""
    spec = tiny_spec()
    first, second = spec.layers
    return replace(spec, layers=(first, second.with_attention(**attention)))


@pytest.mark.parametrize("normalized", [False, True])
def test_all_experts_on_all_tokens_are_the_chosen_ones_on_theirs(tmp_path: Path, normalized: bool) -> None:
    """The two ways to compute experts; in a batch of one token most have none."""
    spec = with_experts(tiny_spec(), normalized=normalized)
    assert_same_as_cpu_graph(spec, tmp_path)
    assert_same_as_cpu_graph(spec, tmp_path, mixed_batch((1,)))
    trt, cpu = (
        {node.op_type for node in onnx.load(tmp_path / target / "model.onnx", load_external_data=False).graph.node}
        for target in ("trt", "cpu")
    )
    assert {"NonZero", "ScatterND"} & trt == set()
    assert {"NonZero", "ScatterND"} <= cpu


def test_trt_graph_has_the_cpu_graphs_heads_on_tokens(tmp_path: Path) -> None:
    assert_same_as_cpu_graph(with_heads_on_tokens(tiny_spec()), tmp_path)


@pytest.mark.parametrize("pooling", ["mean", "sum", "mean_sqrt_len", "weighted_mean"])
def test_both_graphs_leave_tokens_out_of_means(tmp_path: Path, pooling: Pooling) -> None:
    spec = replace(static_spec(unpooled_id=7), heads=(HeadSpec("embedding", (pooling,)),))
    assert_same_as_cpu_graph(spec, tmp_path)
    with_and_without = PackedBatch(np.array([7, 3, 7, 5, 7, 7, 3, 5], np.int32), np.array([0, 5, 6, 8], np.int32))
    rows = run_onnxruntime(graph_of(spec, tmp_path, DType.FP32), with_and_without)["embedding"]
    np.testing.assert_allclose(rows[0], rows[2], atol=1e-6)
    assert not rows[1].any()
    assert rows[2].any()


def partial_batch() -> PackedBatch:
    """Sequences in which 1 to all tokens are keys."""
    batch = mixed_batch()
    return batch._replace(key_lens=np.array([1, 2, 3, 17, 1, 20, 8], np.int32))


@pytest.mark.parametrize("attention", PARTIAL_KEYS.values(), ids=PARTIAL_KEYS)
def test_trt_graph_has_the_cpu_graphs_keys(tmp_path: Path, attention: dict[str, Any]) -> None:
    spec = replace(with_heads_on_tokens(tiny_spec(**attention)), partial_keys=True)
    assert_same_as_cpu_graph(spec, tmp_path / "partial", partial_batch())
    assert_same_as_cpu_graph(spec, tmp_path / "whole")
    path = graph_of(spec, tmp_path, DType.FP32)
    whole, partial = (run_onnxruntime(path, batch)["embedding"] for batch in (mixed_batch(), partial_batch()))
    if "causal" not in attention:  # where the first token sees itself alone
        assert np.abs(whole - partial).max(axis=1)[[1, 2, 4]].min() > 1e-3  # the control


@pytest.mark.parametrize("name", ["BertModel", "MPNetModel", "DebertaV2Model", "LlamaModel"])
def test_trt_graph_has_the_hf_models_keys(tmp_path: Path, name: str) -> None:
    case = case_named(name)
    checkpoint = read_case(case, tmp_path, pooling="cls", max_seq_len=LONGEST)
    checkpoint = replace(checkpoint, spec=replace(checkpoint.spec, partial_keys=True))
    rng = np.random.default_rng(0)
    encodings = [
        encoding._replace(num_keys=int(rng.integers(1, encoding.num_tokens + 1)))
        for encoding in random_encodings(LENGTHS, checkpoint.spec.embeddings.vocab_size)
    ]
    actual = rows_of(checkpoint, graph_of_checkpoint(checkpoint, tmp_path, DType.FP32), case, encodings)
    expected = [states[0] for states in hf_outputs(checkpoint.folder, case, encodings)]
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("attention", [{}, {"window": 8}, {"alibi": True}], ids=["padded", "boolean", "additive"])
def test_trt_graph_obeys_the_lengths(tmp_path: Path, attention: dict[str, Any]) -> None:
    """The control of the tests above: with lengths that reach into the padding, the vectors differ."""
    batch = mixed_batch((1, 5, MAX_SEQ_LEN, 17, 2))
    path = graph_of(tiny_spec(**attention), tmp_path, DType.FP32)
    right = run_onnxruntime(path, batch)["embedding"]
    lengths = np.full(batch.batch_size, bucket(MAX_SEQ_LEN), np.int32)
    wrong = run_onnxruntime(path, batch, seq_lens=lengths)["embedding"]
    _, *shorter = np.abs(right - wrong).max(axis=1)  # one token is padded with itself: the mean over it is the same
    longest = shorter.pop(1)
    assert longest == 0.0
    assert min(shorter) > 1e-3


@pytest.mark.parametrize("attention", BY_POSITION.values(), ids=BY_POSITION)
def test_biases_by_position_are_close_in_fp16(tmp_path: Path, attention: dict[str, Any]) -> None:
    spec, batch = tiny_spec(**attention), mixed_batch()
    wide, narrow = (
        run_onnxruntime(graph_of(spec, tmp_path / dtype.value, dtype), batch)["embedding"]
        for dtype in (DType.FP32, DType.FP16)
    )
    assert cosines(wide, narrow).min() > 0.9999


@pytest.mark.parametrize("experts", [False, True])
def test_trt_graph_in_fp16_is_close(tmp_path: Path, experts: bool) -> None:
    spec, batch = tiny_spec("bert", POOLINGS), mixed_batch()
    spec = with_experts(spec) if experts else spec
    wide, narrow = (
        run_onnxruntime(graph_of(spec, tmp_path / dtype.value, dtype), batch)["embedding"]
        for dtype in (DType.FP32, DType.FP16)
    )
    assert cosines(wide, narrow).min() > 0.9999
