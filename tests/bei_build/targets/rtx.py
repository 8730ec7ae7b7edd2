"""TensorRT-RTX in place of TensorRT: it has the same parser and type rules, and compiles ahead of time without a
GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
from onnx import ModelProto, helper

from bei.artifact.manifest import PlanProfile
from bei.core import Limits
from bei.engine.tensorrt_logger import process_logger
from bei_build.onnx_graph.attention import Lowering
from bei_build.targets.base import Say
from bei_build.targets.tensorrt.network import parse
from bei_build.targets.tensorrt.plan import PlanSettings, write_plan
from bei_build.targets.tensorrt.profiles import profiles_of
from tests.bei_build.targets.tiny import MAX_SEQ_LEN

VERSION = "11.4.0.106"  # the TensorRT version in whose place RTX runs

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None,
    reason="tensorrt_rtx_bindings is not installed: pip install -e '.[trt-ci]'",
)


class AheadOfTimeBuilder:
    """TensorRT-RTX's builder (which cannot be subclassed), set to a GPU that need not be here."""

    def __init__(self, rtx: Any, logger: object) -> None:
        self._rtx, self._builder = rtx, rtx.Builder(logger)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def create_builder_config(self) -> Any:
        config = self._builder.create_builder_config()
        config.builder_optimization_level = 0
        config.num_compute_capabilities = 1
        assert config.set_compute_capability(self._rtx.ComputeCapability.SM89, 0)
        return config

    def build_serialized_network_to_stream(self, network: object, config: Any, writer: object) -> bool:
        assert config.num_optimization_profiles == 2
        assert not config.get_flag(self._rtx.BuilderFlag.TF32)
        assert config.get_flag(self._rtx.BuilderFlag.REQUIRE_USER_ALLOCATION)
        return bool(self._builder.build_serialized_network_to_stream(network, config, writer))


def module_like(original: ModuleType, **changes: object) -> ModuleType:
    module = ModuleType("tensorrt")
    vars(module).update(vars(original) | changes)
    return module


def limits_of(max_seq_len: int) -> Limits:
    return Limits(max_num_tokens=1000, max_batch_size=30, max_seq_len=max_seq_len)


def profiles(max_seq_len: int = MAX_SEQ_LEN, *, packed: bool = False) -> tuple[PlanProfile, PlanProfile]:
    return profiles_of(limits_of(max_seq_len), 512, 8, packed=packed)


def compiled(
    trt: ModuleType,
    path: Path,
    lowerings: Sequence[Lowering] = ("padded", "padded"),
    max_seq_len: int = MAX_SEQ_LEN,
    say: Say = lambda _: None,
    **settings: Any,
) -> bytes:
    """The plan; the compiler itself checks the log, that every input is read, and each attention's lengths and mask."""
    plan = path.parent / "model.plan"
    chosen = PlanSettings(profiles=profiles(max_seq_len, packed="packed" in lowerings), **settings)
    assert write_plan(trt, path, lowerings, chosen, plan, say) == []
    return plan.read_bytes()


@contextmanager
def parsed(trt: ModuleType, path: Path, lowerings: Sequence[Lowering] = ("padded", "padded")) -> Iterator[Any]:
    """The network that TensorRT's parser makes of the graph at ``path``."""
    logger = process_logger(trt.ILogger)
    builder = trt.Builder(logger)
    network, parser = parse(trt, builder, logger, path, lowerings)
    yield network
    del parser


def edited(path: Path, edit: Callable[[ModelProto], object]) -> Path:
    model = onnx.load(path, load_external_data=False)
    edit(model)
    path.write_bytes(model.SerializeToString())
    return path


def attention_nodes(model: ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "TRT_Attention"]


def forbid_decomposition(model: ModelProto) -> None:
    nodes = attention_nodes(model)
    assert nodes
    for node in nodes:
        settings = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        assert settings["TRT_decomposable"] == 1
        settings["TRT_decomposable"] = 0
        again = helper.make_node(
            node.op_type, node.input, node.output, domain=node.domain, overload=node.overload, **settings
        )
        node.CopyFrom(again)
