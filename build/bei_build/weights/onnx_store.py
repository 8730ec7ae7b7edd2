"""Constant tensors of an ONNX graph, in its file or in files beside it, as they are stored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bei.errors import WeightsError
from bei_build.weights.onnx_file import external_place, is_external, read_model
from bei_build.weights.tensor_store import TensorStore

if TYPE_CHECKING:
    from onnx import GraphProto, TensorProto

# Types of numbers that are read, by ONNX's names.
FLOATS: Mapping[str, str] = {"FLOAT": "F32", "FLOAT16": "F16", "BFLOAT16": "BF16", "DOUBLE": "F64"}
_INTEGERS: Mapping[str, str] = {"INT64": "I64", "INT32": "I32"}
_MOST_DIMENSIONS = 8


class OnnxStore(TensorStore):
    """The initializers and constants of the graph in ``file`` by their names there. Numbers in the file stay in memory
    while the store is open; of those beside it one tensor is. Raises WeightsError."""

    def __init__(self, file: Path) -> None:
        self._file = file
        model = read_model(file)
        self.graph: GraphProto = model.graph
        self._tensors: dict[str, TensorProto] = {}
        constants = (
            (node.output[0], attribute.t)
            for node in self.graph.node
            if node.op_type == "Constant" and len(node.output) == 1
            for attribute in node.attribute
            if attribute.name == "value"
        )
        for name, tensor in [*((each.name, each) for each in self.graph.initializer), *constants]:
            if name in self._tensors:
                raise WeightsError(f"{file} has the tensor {name[:80]!a} twice. Download it again.")
            if len(tensor.dims) > _MOST_DIMENSIONS:
                raise WeightsError(f"{file} is no model: its tensor {name[:80]!a} has {len(tensor.dims)} dimensions.")
            self._tensors[name] = tensor
        if self.graph.sparse_initializer:
            raise WeightsError(f"{file} has sparse tensors: export the model without them.")

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        return {name: tuple(tensor.dims) for name, tensor in self._tensors.items()}

    @property
    def types(self) -> frozenset[str]:
        """The element types of the tensors: F32, I64, ..."""
        return frozenset(self.type_of(name) for name in self._tensors)

    def type_of(self, name: str) -> str:
        """The element type of the tensor called ``name``: F32, I64, ..., or ONNX's name of one that is not read."""
        from onnx import TensorProto

        number = self._tensors[name].data_type
        known = TensorProto.DataType.Name(number) if number in TensorProto.DataType.values() else f"type {number}"
        return FLOATS.get(known) or _INTEGERS.get(known) or known

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor called ``name``, float32. Raises WeightsError."""
        if (stored := self.type_of(name)) not in FLOATS.values():
            raise self._unread(name, f"is {stored}, and must hold floating-point numbers of 16 bits or more")
        return np.array(self._numbers(name), np.float32)  # a copy, as what is read from the file cannot be written to

    def read_integers(self, name: str) -> npt.NDArray[np.int64]:
        """The integer tensor called ``name``. Raises WeightsError."""
        if (stored := self.type_of(name)) not in _INTEGERS.values():
            raise self._unread(name, f"is {stored}, and must hold integers")
        return np.ascontiguousarray(self._numbers(name), np.int64)

    def close(self) -> None:
        """Drop the tensors."""
        self._tensors.clear()

    def _numbers(self, name: str) -> npt.NDArray[np.generic]:
        from onnx import helper, numpy_helper

        tensor = self._tensors[name]
        dtype, shape = helper.tensor_dtype_to_np_dtype(tensor.data_type), tuple(tensor.dims)
        if any(size < 0 for size in shape):
            raise self._unread(name, f"has the shape {list(shape)}")
        count = math.prod(shape)
        if not is_external(tensor):
            field = tensor.raw_data if tensor.HasField("raw_data") else None
            stored = len(getattr(tensor, helper.tensor_dtype_to_field(tensor.data_type)))
            if (len(field) if field is not None else stored) != count * (dtype.itemsize if field is not None else 1):
                raise self._unread(name, f"has the shape {list(shape)}, and other numbers than that")
            array: npt.NDArray[np.generic] = numpy_helper.to_array(tensor)
            return array
        path, offset = external_place(tensor, self._file)
        if offset + count * dtype.itemsize > path.stat().st_size:
            raise self._unread(name, f"has the shape {list(shape)}, and ends outside of {path.name}")
        return np.fromfile(path, dtype, count, offset=offset).reshape(shape)

    def _unread(self, name: str, how: str) -> WeightsError:
        return WeightsError(f"{self._file} is no model that is read: its tensor {name[:80]!a} {how}.")
