"""The graphs for TensorRT, compiled by TensorRT-RTX ahead of time for SM89, and what the compiler says of itself.

TensorRT-RTX has TensorRT's parser and type rules and needs no GPU to compile. What it cannot tell: whether TensorRT
has the same kernels, and how fast they are.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from onnx import ModelProto, TensorProto, helper

from bei.cli import main
from bei.core import Limits
from bei.errors import CompileError, ConfigError, MissingDependencyError
from bei.packing import bucket
from bei_build.config import BuildConfig
from bei_build.graph.attention import AttentionCore
from bei_build.graph.writer import DType
from bei_build.model_weights import ModelWeights
from bei_build.spec import POOLINGS, Pooling
from bei_build.targets import compiler_for, tensorrt
from tests.bei_build.targets.rtx import (
    VERSION,
    AheadOfTimeBuilder,
    attention_nodes,
    compiled,
    edited,
    forbid_decomposition,
    limits_of,
    module_like,
    needs_rtx,
)
from tests.bei_build.targets.tiny import HEADS, MAX_SEQ_LEN, graph_of, random_weights, tiny_spec, with_tail

LIMITS = limits_of(MAX_SEQ_LEN)


@needs_rtx
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("family", HEADS)
def test_every_family_and_pooling_compiles(trt: ModuleType, tmp_path: Path, family: str, pooling: Pooling) -> None:
    assert compiled(trt, graph_of(tiny_spec(family, (pooling,)), tmp_path))


@needs_rtx
@pytest.mark.parametrize("family", HEADS)
def test_concatenated_poolings_and_a_tail_compile(trt: ModuleType, tmp_path: Path, family: str) -> None:
    assert compiled(trt, graph_of(with_tail(tiny_spec(family, POOLINGS)), tmp_path))


@needs_rtx
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP32])
def test_other_types_compile(trt: ModuleType, tmp_path: Path, dtype: DType) -> None:
    assert compiled(trt, graph_of(with_tail(tiny_spec()), tmp_path, dtype))


@needs_rtx
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_16_bit_attention_has_a_fused_kernel(trt: ModuleType, tmp_path: Path, dtype: DType) -> None:
    """Without leave to decompose it, TensorRT-RTX fails where it has no kernel, as it does in fp32."""
    assert compiled(trt, edited(graph_of(tiny_spec(), tmp_path, dtype), forbid_decomposition))


@needs_rtx
def test_attention_may_be_decomposed(trt: ModuleType, tmp_path: Path) -> None:
    path = graph_of(tiny_spec(), tmp_path, DType.FP32)
    with pytest.raises(CompileError, match="not supported by a dedicated kernel"):
        compiled(trt, edited(path, forbid_decomposition))


@needs_rtx
def test_compile_writes_the_plan_alone(trt: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt, "load_tensorrt", lambda: trt)
    monkeypatch.setattr(tensorrt, "current_gpu", lambda: ("NVIDIA L4", "SM89"))
    spec = tiny_spec()
    weights = cast(ModelWeights, SimpleNamespace(read=random_weights(spec)))
    requirements = tensorrt.TensorRTCompiler().compile(spec, weights, "bf16", LIMITS, tmp_path, print)
    assert [file.name for file in tmp_path.iterdir()] == [tensorrt.PLAN_FILE]
    assert (requirements.compiler, requirements.compiler_version) == ("tensorrt", VERSION)
    assert (requirements.device, requirements.capabilities) == ("NVIDIA L4", ["SM89"])


# What TensorRT takes without a word, or with one that is easily missed.


@needs_rtx
def test_an_unused_input_fails(trt: ModuleType, tmp_path: Path) -> None:
    path = edited(graph_of(tiny_spec(), tmp_path), add_input)
    with pytest.raises(CompileError, match="reads the input never_read"):
        compiled(trt, path)


@needs_rtx
def test_an_input_that_leads_nowhere_fails(trt: ModuleType, tmp_path: Path) -> None:
    def edit(model: ModelProto) -> None:
        add_input(model)
        model.graph.node.append(helper.make_node("Cast", ["never_read"], ["nowhere"], to=TensorProto.FLOAT))

    with pytest.raises(CompileError, match="Input Tensor never_read is unused"):
        compiled(trt, edited(graph_of(tiny_spec(), tmp_path), edit))


def add_input(model: ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("never_read", TensorProto.INT32, ["T"]))


@needs_rtx
@pytest.mark.parametrize(
    "lengths",
    [[], ["", "seq_lens"], ["", "", "", "", "seq_lens"], ["slot_mask_4d"]],
    ids=["dropped", "as query lengths", "where TensorRT 11.0 had them", "as a mask"],
)
def test_lengths_that_are_not_wired_fail(trt: ModuleType, tmp_path: Path, lengths: list[str]) -> None:
    def edit(model: ModelProto) -> None:
        for node in attention_nodes(model):
            node.input[3:] = lengths
        mask = helper.make_node("Unsqueeze", ["slot_mask_16", "mask_axes"], ["slot_mask_4d"])
        model.graph.node.insert(0, mask)
        model.graph.node.insert(0, helper.make_node("Cast", ["slot_mask"], ["slot_mask_16"], to=TensorProto.FLOAT16))
        model.graph.initializer.append(helper.make_tensor("mask_axes", TensorProto.INT64, [2], [1, 2]))

    with pytest.raises(CompileError, match="key/value lengths: it would attend to padding"):
        compiled(trt, edited(graph_of(tiny_spec(), tmp_path), edit))


@needs_rtx
def test_attention_that_is_not_fused_fails(trt: ModuleType, tmp_path: Path) -> None:
    path = graph_of(tiny_spec(), tmp_path, DType.FP32, AttentionCore.MATMUL_SOFTMAX)
    with pytest.raises(CompileError, match="0 attention layers of 2"):
        compiled(trt, path)


@needs_rtx
def test_an_ill_typed_graph_fails_with_the_parsers_words(trt: ModuleType, tmp_path: Path) -> None:
    def edit(model: ModelProto) -> None:
        index = next(i for i, node in enumerate(model.graph.node) if node.name == "layers.0.mlp_residual")
        add = model.graph.node[index]
        cast_up = helper.make_node("Cast", [add.input[1]], ["wide"], to=TensorProto.FLOAT)
        add.input[1] = "wide"
        model.graph.node.insert(index, cast_up)

    with pytest.raises(CompileError) as failure:
        compiled(trt, edited(graph_of(tiny_spec(), tmp_path), edit))
    message = str(failure.value)
    assert "layers.0.mlp_residual (Add)" in message
    assert "must have same input types" in message
    assert "\n" not in message


@needs_rtx
def test_a_file_that_is_not_a_graph_fails(trt: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"not ONNX")
    with pytest.raises(CompileError, match="refused the graph"):
        compiled(trt, tmp_path / "model.onnx")


@needs_rtx
def test_an_error_in_the_log_fails_although_there_is_a_plan(trt: ModuleType, tmp_path: Path) -> None:
    class Builder(AheadOfTimeBuilder):
        def create_builder_config(self) -> Any:
            config = super().create_builder_config()
            config.get_compute_capability(7)  # there is no eighth: an ERROR line and nothing else
            return config

    path = graph_of(tiny_spec(), tmp_path)
    with pytest.raises(CompileError, match="Index of compute capability is not in a valid range"):
        compiled(module_like(trt, Builder=lambda logger: Builder(trt, logger)), path)
    assert compiled(trt, path), "the log of one build is not held against the next"


@needs_rtx
def test_no_builder_fails(trt: ModuleType, tmp_path: Path) -> None:
    def no_builder(logger: object) -> None:
        raise TypeError("pybind11::init(): factory function returned nullptr")

    with pytest.raises(CompileError, match="has no builder here"):
        compiled(module_like(trt, Builder=no_builder), tmp_path / "model.onnx")


# What the compiler says of itself and of the machine.


@pytest.mark.parametrize(
    "limits", [LIMITS, Limits(16384, 256, 512), Limits(8192, 8, 8192), Limits(10, 3, 9), Limits(1, 1, 1)]
)
def test_profiles_hold_every_batch_within_the_limits(limits: Limits) -> None:
    latency, throughput = tensorrt.profiles(limits)
    for ranges in (*latency.values(), *throughput.values()):
        assert 1 <= ranges[0] <= ranges[1] <= ranges[2]
    for name, size in (("T", limits.max_num_tokens), ("S", limits.max_seq_len)):
        assert throughput[name][2] >= bucket(size)
        assert latency[name][2] >= min(bucket(size), 512)
    assert throughput["B"][2] >= bucket(limits.max_batch_size, min_step=1)
    assert latency["T"][2] <= 512
    assert latency["B"][2] <= 8


def test_room_for_filler_is_never_short() -> None:
    assert all(bucket(size) <= tensorrt._with_filler(size) for size in range(1, 40_000))


def test_default_limits_bound_the_padded_view() -> None:
    compiler = compiler_for(BuildConfig(model="tiny", target="tensorrt"))
    assert compiler.default_limits(512) == Limits(16384, 256, 512)
    assert compiler.default_limits(8192) == Limits(16384, 32, 8192)
    assert compiler.default_limits(65536) == Limits(65536, 8, 65536)


def test_precisions() -> None:
    compiler = compiler_for(BuildConfig(model="tiny", target="tensorrt"))
    assert compiler.resolve_precision("auto") == "bf16"
    assert [compiler.resolve_precision(name) for name in compiler.precisions] == ["bf16", "fp16", "fp32"]
    with pytest.raises(ConfigError, match="no precision 'int8'"):
        compiler.resolve_precision("int8")


def test_build_is_refused_at_once_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["build", "no/such-checkpoint", "--target", "tensorrt"])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    for words in ("cannot be built yet", "tensorrt>=11.1,<12", "NVIDIA GPU", "'bei[trt-ci]'", "--target cpu"):
        assert words in message


@pytest.mark.parametrize(
    ("module", "state"),
    [
        (None, "(not installed here)"),
        (SimpleNamespace(__version__="11.4.0.106"), "(installed: 11.4.0.106)"),
        (SimpleNamespace(__version__="10.9.0"), "(TensorRT 10.9.0 is installed, bei needs >=11.1,<12: "),
    ],
)
def test_refusal_says_what_is_installed(module: object, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    with pytest.raises(CompileError) as failure:
        compiler_for(BuildConfig(model="tiny", target="tensorrt")).check_able()
    assert state in str(failure.value)


@pytest.mark.parametrize(
    ("version", "accepted"),
    [("10.16.1.11", False), ("11.0.0.114", False), ("11.1.0.106", True), ("11.10.0.1", True), ("12.0.0.1", False)],
)
def test_version_gate(version: str, accepted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(__version__=version)
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    if accepted:
        assert tensorrt.load_tensorrt() is module
    else:
        with pytest.raises(CompileError, match=f"TensorRT {version} is installed"):
            tensorrt.load_tensorrt()


def test_absent_packages_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, load in (("tensorrt", tensorrt.load_tensorrt), ("cuda.bindings.runtime", tensorrt.current_gpu)):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MissingDependencyError, match=r"pip install 'bei\[tensorrt\]'"):
            load()


@pytest.mark.parametrize("found", [True, False])
def test_current_gpu(found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers are those of cuda-python 13.4: a status, and properties or None."""
    properties = SimpleNamespace(name=b"NVIDIA H200", major=9, minor=0)
    answer = (SimpleNamespace(name="cudaSuccess"), properties)
    if not found:
        answer = (SimpleNamespace(name="cudaErrorInsufficientDriver"), None)  # type: ignore[assignment]
    runtime = SimpleNamespace(cudaGetDeviceProperties=lambda index: answer)
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", runtime)
    if found:
        assert tensorrt.current_gpu() == ("NVIDIA H200", "SM90")
    else:
        with pytest.raises(CompileError, match="no GPU here \\(cudaErrorInsufficientDriver\\)"):
            tensorrt.current_gpu()
