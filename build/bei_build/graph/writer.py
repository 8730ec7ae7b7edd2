"""Writes an ONNX graph node by node, weights streamed to an external data file. Knows ONNX, not models.

Weights go to disk as they come, so a build never holds more than one tensor. The bytes depend only on the calls made:
the same calls give the same two files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

OPSET = 23  # the newest that TensorRT 11.1 and OpenVINO 2026 both read
_IR_VERSION = 11
_ALIGNMENT = 4096  # a page: lets readers map tensors instead of copying them
WEIGHTS_FILE = "model.weights"
MODEL_FILE = "model.onnx"

Dim: TypeAlias = "int | str"
FloatArray: TypeAlias = npt.NDArray[np.float32]


class DType(Enum):
    """Element types of a graph: name, ONNX code, numpy dtype."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"
    INT32 = "int32"

    @property
    def onnx(self) -> int:
        """TensorProto data type."""
        return {
            DType.FP32: TensorProto.FLOAT,
            DType.FP16: TensorProto.FLOAT16,
            DType.BF16: TensorProto.BFLOAT16,
            DType.INT8: TensorProto.INT8,
            DType.INT32: TensorProto.INT32,
        }[self]

    @property
    def numpy(self) -> np.dtype[Any]:
        """Numpy dtype (bfloat16 is ml_dtypes')."""
        dtypes: dict[DType, Any] = {
            DType.FP32: np.float32,
            DType.FP16: np.float16,
            DType.BF16: ml_dtypes.bfloat16,
            DType.INT8: np.int8,
            DType.INT32: np.int32,
        }
        dtype: np.dtype[Any] = np.dtype(dtypes[self])
        return dtype


@dataclass(frozen=True)
class GraphTypes:
    """``compute`` is the type of activations; matrices and tables are stored as ``storage`` and cast if it differs.

    INT8 storage is symmetric, one FP32 scale per output channel (weight row), and holds for matrices of linear layers
    only; tables are then stored as BF16.
    """

    compute: DType
    storage: DType


class GraphWriter:
    """Collects nodes; ``finish`` writes ``model.onnx`` beside ``model.weights`` into ``folder``."""

    def __init__(self, folder: Path, types: GraphTypes) -> None:
        self.types = types
        self._folder = folder
        self._data = (folder / WEIGHTS_FILE).open("wb")
        self._nodes: list[NodeProto] = []
        self._initializers: list[TensorProto] = []
        self._constants: dict[tuple[bytes, str, tuple[int, ...]], str] = {}
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._functions: list[FunctionProto] = []

    def input(self, name: str, dtype: DType, shape: Sequence[Dim]) -> str:
        """Declare a graph input, once. Equal dimension names mean equal sizes (TensorRT holds us to it)."""
        if all(name != declared.name for declared in self._inputs):
            self._inputs.append(helper.make_tensor_value_info(name, dtype.onnx, list(shape)))
        return name

    def output(self, name: str, value: str, dtype: DType, shape: Sequence[Dim]) -> None:
        """Declare ``value`` as the graph output ``name``."""
        self._nodes.append(helper.make_node("Identity", [value], [name], name=f"output/{name}"))
        self._outputs.append(helper.make_tensor_value_info(name, dtype.onnx, list(shape)))

    def function(self, function: FunctionProto) -> None:
        """Attach a local function, once: the body of an op that not every reader has, or of one of its overloads."""
        if function not in self._functions:
            self._functions.append(function)

    def op(
        self, op_type: str, inputs: Sequence[str], name: str, *, domain: str = "", overload: str = "", **attributes: Any
    ) -> str:
        """Append a node with one output; returns the output's name, which is ``name``."""
        self._nodes.append(
            helper.make_node(op_type, list(inputs), [name], name, domain=domain, overload=overload, **attributes)
        )
        return name

    def split(self, value: str, sizes: Sequence[int], name: str, axis: int) -> list[str]:
        """Split ``value`` into pieces of ``sizes`` along ``axis``."""
        outputs = [f"{name}.{index}" for index in range(len(sizes))]
        inputs = [value, self.constant(sizes)]
        self._nodes.append(helper.make_node("Split", inputs, outputs, name=name, axis=axis))
        return outputs

    def top_k(self, value: str, k: int, name: str) -> str:
        """The places of the ``k`` largest along the last axis, INT64, largest first."""
        inputs = [value, self.constant([k])]
        self._nodes.append(helper.make_node("TopK", inputs, [f"{name}.values", name], name=name, axis=-1))
        return name

    def constant(self, value: npt.ArrayLike, dtype: npt.DTypeLike = np.int64) -> str:
        """A small constant inside the graph; equal constants are one."""
        array = np.asarray(value, dtype)
        key = (array.tobytes(), array.dtype.str, array.shape)
        if key not in self._constants:
            name = f"constant.{len(self._constants)}"
            self._constants[key] = name
            self._initializers.append(numpy_helper.from_array(array, name))
        return self._constants[key]

    def vector(self, name: str, array: FloatArray) -> str:
        """A bias or norm parameter, in the compute type."""
        return self._external(name, array, self.types.compute)

    def fp32(self, name: str, array: FloatArray) -> str:
        """A parameter of the FP32 part behind the pooling."""
        return self._external(name, array, DType.FP32)

    def table(self, name: str, array: FloatArray) -> str:
        """An embedding table, stored narrow; its rows are cast after the lookup (``lookup``)."""
        storage = DType.BF16 if self.types.storage is DType.INT8 else self.types.storage
        return self._external(name, array, storage)

    def lookup(self, table: str, indices: str, name: str) -> str:
        """Rows of ``table`` at ``indices``, in the compute type."""
        rows = self.op("Gather", [table, indices], f"{name}.rows", axis=0)
        return self.cast(rows, self.types.compute, name)

    def matrix(self, name: str, array: FloatArray) -> str:
        """The [out, in] matrix of a linear layer as the storage type says; returns a value of the compute type."""
        if self.types.storage is DType.INT8:
            return self._quantized(name, array)
        stored = self._external(name, array, self.types.storage)
        if self.types.storage is self.types.compute:
            return stored
        return self.op("Cast", [stored], f"{name}.cast", to=self.types.compute.onnx)

    def cast(self, value: str, dtype: DType, name: str) -> str:
        """``value`` as ``dtype``. The reader drops a cast to the type the value has already."""
        return self.op("Cast", [value], name, to=dtype.onnx)

    def linear(self, value: str, matrix: str, bias: str | None, name: str) -> str:
        """``value @ matrix.T + bias`` for a value of rank 2."""
        inputs = [value, matrix] if bias is None else [value, matrix, bias]
        return self.op("Gemm", inputs, name, transB=1)

    def finish(self) -> Path:
        """Write the graph; returns the path of ``model.onnx``."""
        self._data.close()
        graph = helper.make_graph(self._nodes, "bei", self._inputs, self._outputs, self._initializers)
        opsets = [helper.make_opsetid("", OPSET)]
        opsets += [helper.make_opsetid(domain, 1) for domain in sorted({one.domain for one in self._functions})]
        model: ModelProto = helper.make_model(
            graph, opset_imports=opsets, functions=self._functions, ir_version=_IR_VERSION, producer_name="bei"
        )
        path = self._folder / MODEL_FILE
        path.write_bytes(model.SerializeToString(deterministic=True))
        return path

    def _quantized(self, name: str, array: FloatArray) -> str:
        scale = np.maximum(np.abs(array).max(axis=1), np.finfo(np.float32).tiny) / 127.0
        rounded = np.clip(np.rint(array / scale[:, None]), -127, 127)
        inputs = [
            self._external(f"{name}.int8", rounded.astype(np.float32), DType.INT8),
            self._external(f"{name}.scale", scale.astype(np.float32), self.types.compute),
        ]
        return self.op("DequantizeLinear", inputs, f"{name}.dequantized", axis=0)

    def _external(self, name: str, array: FloatArray, dtype: DType) -> str:
        self._data.write(b"\0" * (-self._data.tell() % _ALIGNMENT))
        tensor = TensorProto(name=name, data_type=dtype.onnx, dims=array.shape)
        tensor.data_location = TensorProto.EXTERNAL
        raw = np.ascontiguousarray(array.astype(dtype.numpy, copy=False)).view(np.uint8)
        for key, value in (("location", WEIGHTS_FILE), ("offset", self._data.tell()), ("length", raw.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        self._data.write(raw.data)
        self._initializers.append(tensor)
        return name
