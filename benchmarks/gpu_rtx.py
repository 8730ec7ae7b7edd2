"""TensorRT-RTX on this GPU: does it build a plan of our graph, load it and run it, and is the answer right?

Its published list of GPUs does not have every data-centre GPU; whatever it says of this one is the result.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bei.engine.nvidia import load_library
from bei.errors import BeiError
from bei_build.torch_graph.model import PackedModel
from benchmarks.gpu_peers import require
from benchmarks.gpu_record import Found, Skipped, throughput


def plan_on_this_gpu(
    model: PackedModel, inputs_of: Any, wheels: Path | None, device: torch.device, *, budget_s: float
) -> tuple[dict[str, Tensor], Found]:
    """The outputs of a plan of ``model``, whose layers are not joined, in BF16, and what it took.

    ``inputs_of`` gives the tensors of the names that the plan reads. ``wheels``: a folder with TensorRT-RTX's wheels,
    where it is not installed.
    """
    if device.type != "cuda":
        raise Skipped("running a plan needs a GPU")
    require("onnx", "ml_dtypes")
    with tempfile.TemporaryDirectory() as scratch:
        if wheels is not None:
            _unpack(wheels, Path(scratch) / "site")
        try:
            trt: Any = load_library("tensorrt-rtx", "This measurement")
        except BeiError as error:
            raise Skipped(str(error)) from error
        plan = _built(trt, model, Path(scratch))
        return _run(trt, plan, inputs_of, device, budget_s)


def _unpack(wheels: Path, site: Path) -> None:
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise Skipped(f"{wheels} has no wheels")
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    sys.path.insert(0, str(site))


def _built(trt: Any, model: PackedModel, folder: Path) -> bytes:
    """The plan's bytes. Raises RuntimeError with the library's log where it refuses."""
    from bei_build.onnx_graph.attention import AttentionCore
    from bei_build.onnx_graph.transformer import write_graph
    from bei_build.onnx_graph.writer import GraphTypes
    from bei_build.spec.dtypes import DType

    weights = model.weights_by_name()
    types, core = GraphTypes(DType.BF16, DType.BF16), AttentionCore.TRT_ATTENTION
    path = write_graph(
        model.spec, lambda name: weights[name].float().cpu().numpy(), folder, types, core, model.max_seq_len
    )
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        raise RuntimeError("; ".join(parser.get_error(index).desc() for index in range(parser.num_errors)))
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    most = {"T": 65_536, "B": 1024, "S": model.max_seq_len}
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        names = [tensor.get_dimension_name(axis) for axis in range(len(tensor.shape))]
        bounds = [(1, most[name] // 4, most[name]) for name in names]
        profile.set_shape(tensor.name, *zip(*bounds, strict=True))
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise RuntimeError("the builder made no plan; its log is above")
    return bytes(plan)


def _run(
    trt: Any, plan: bytes, inputs_of: Any, device: torch.device, budget_s: float
) -> tuple[dict[str, Tensor], Found]:
    engine = trt.Runtime(trt.Logger(trt.Logger.WARNING)).deserialize_cuda_engine(plan)
    if engine is None:
        raise RuntimeError("the plan was built and cannot be loaded; the library's log is above")
    context = engine.create_execution_context()
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    is_input = {name: engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT for name in names}
    tensors: dict[str, Tensor] = dict(inputs_of([name for name in names if is_input[name]]))
    for name, tensor in tensors.items():
        context.set_input_shape(name, tuple(tensor.shape))
    for name in names:
        if not is_input[name]:
            tensors[name] = torch.full(tuple(context.get_tensor_shape(name)), torch.nan, device=device)
        context.set_tensor_address(name, tensors[name].data_ptr())
    stream = torch.cuda.current_stream(device)

    def execute() -> None:
        if not context.execute_async_v3(stream.cuda_stream):
            raise RuntimeError("the plan was loaded and does not run; the library's log is above")

    execute()
    torch.cuda.synchronize(device)
    outputs = {name: tensors[name].clone() for name in names if not is_input[name]}
    return outputs, {**throughput(execute, device, budget_s=budget_s), "plan_mb": round(len(plan) / 1e6, 1)}
