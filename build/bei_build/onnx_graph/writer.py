"""ONNX graph writer, node by node, with weights streamed to an external data file. Knows ONNX, not models.

Weights are written to disk at once, so a build never holds more than one tensor. The bytes depend only on the calls:
the same calls give the same two files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from bei.engine.rounded_rows import RoundingSite
from bei_build.spec.dtypes import DType, FloatArray
from bei_build.spec.quantization import (
    LARGEST,
    LARGEST_UNSIGNED,
    Format,
    LayerQuantization,
    Quantization,
    scales_of_rows,
)

OPSET = 23  # the newest that TensorRT 11.1 and OpenVINO 2026 both read
_IR_VERSION = 11
_LEAST_SIZE = 1e-6  # lower bound of the size of a token's input, which may be all zeros
_ALIGNMENT = 4096  # a page, so that readers can map tensors instead of copying them
WEIGHTS_FILE = "model.weights"
MODEL_FILE = "model.onnx"

Dim: TypeAlias = "int | str"

_ONNX_TYPES: Mapping[DType, int] = {
    DType.FP32: TensorProto.FLOAT,
    DType.FP16: TensorProto.FLOAT16,
    DType.BF16: TensorProto.BFLOAT16,
    DType.FP8: TensorProto.FLOAT8E4M3FN,
    DType.INT8: TensorProto.INT8,
    DType.UINT8: TensorProto.UINT8,
    DType.INT32: TensorProto.INT32,
}


@dataclass(frozen=True)
class GraphTypes:
    """``compute``: the type of activations; matrices and tables are stored as ``storage`` and cast if it differs.

    ``quantization``: the linear layers that are quantized, inputs and matrices, and their scales.
    """

    compute: DType
    storage: DType
    quantization: Quantization | None = None


@dataclass(frozen=True)
class ObservedTensor:
    """A graph output, float32 [tokens, ``width``]: the input of linear layer ``layer``, or its product."""

    layer: str
    width: int
    is_product: bool = False


class _Rounded(NamedTuple):
    """A rounded value, and the divisors of its rows, [rows, 1], or None."""

    value: str
    sizes: str | None


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
        self._linear_inputs: dict[str, str] = {}
        self._rounded: dict[tuple[str, LayerQuantization], _Rounded] = {}
        self.roundings: list[RoundingSite] = []  # with a range for each token

    def input(self, name: str, dtype: DType, shape: Sequence[Dim]) -> str:
        """Declare a graph input, once. Equal dimension names mean equal sizes (TensorRT enforces it)."""
        if all(name != declared.name for declared in self._inputs):
            self._inputs.append(helper.make_tensor_value_info(name, _ONNX_TYPES[dtype], list(shape)))
        return name

    def output(self, name: str, value: str, dtype: DType, shape: Sequence[Dim]) -> None:
        """Declare ``value`` as the graph output ``name``."""
        self._nodes.append(helper.make_node("Identity", [value], [name], name=f"output/{name}"))
        self._outputs.append(helper.make_tensor_value_info(name, _ONNX_TYPES[dtype], list(shape)))

    def function(self, function: FunctionProto) -> None:
        """Attach a local function, once: the body of an op, or of an overload, that not every reader supports."""
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
        """The indices of the ``k`` largest values along the last axis, INT64, largest first."""
        inputs = [value, self.constant([k])]
        self._nodes.append(helper.make_node("TopK", inputs, [f"{name}.values", name], name=name, axis=-1))
        return name

    def constant(self, value: npt.ArrayLike, dtype: npt.DTypeLike = np.int64) -> str:
        """A small constant inside the graph; equal constants are emitted once."""
        array = np.asarray(value, dtype)
        key = (array.tobytes(), array.dtype.str, array.shape)
        if key not in self._constants:
            name = f"constant.{len(self._constants)}"
            self._constants[key] = name
            self._initializers.append(numpy_helper.from_array(array, name))
        return self._constants[key]

    def vector(self, name: str, array: FloatArray) -> str:
        """A bias or norm parameter, in the compute type."""
        return self._stored(name, array, self.types.compute)

    def fp32(self, name: str, array: FloatArray) -> str:
        """A parameter of the FP32 part after the pooling."""
        return self._stored(name, array, DType.FP32)

    def table(self, name: str, array: FloatArray) -> str:
        """An embedding table in the storage type; its rows are cast after the lookup (``lookup``)."""
        return self._stored(name, array, self.types.storage)

    def lookup(self, table: str, indices: str, name: str) -> str:
        """Rows of ``table`` at ``indices``, in the compute type."""
        rows = self.op("Gather", [table, indices], f"{name}.rows", axis=0)
        return self.cast(rows, self.types.compute, name)

    def cast(self, value: str, dtype: DType, name: str) -> str:
        """``value`` as ``dtype``. Readers drop casts without effect."""
        return self.op("Cast", [value], name, to=_ONNX_TYPES[dtype])

    def quantized(self, name: str) -> LayerQuantization | None:
        """Quantization of the linear layer ``name``; None: it is not quantized."""
        return self.types.quantization.layers.get(name) if self.types.quantization else None

    def linear(
        self,
        name: str,
        value: str,
        weight: FloatArray,
        bias: FloatArray | None = None,
        scales: FloatArray | None = None,
    ) -> str:
        """``value @ weight.T + bias`` for ``value`` [rows, in] and ``weight`` [out, in], in the compute type.

        If the graph's quantization has a layer ``name``, input and matrix are rounded to its format, and the product is
        computed from the rounded numbers. ``scales`` [out]: scales of the matrix's rows, if it is rounded already.
        """
        self._linear_inputs[name] = value
        quantization, layer = self.types.quantization, self.quantized(name)
        if quantization is None or layer is None:
            return self._gemm(name, value, self._matrix(f"{name}.weight", weight), bias)
        if layer.least is not None:
            of_least = np.float32(layer.least) * weight.sum(axis=1)
            bias = of_least if bias is None else bias + of_least
        if layer.smoothing is not None:
            weight = weight * np.array(layer.smoothing, np.float32)
        if scales is None:
            scales = scales_of_rows(weight, quantization.format, layer.matrix_bits)
        matrix = self._rounded_matrix(f"{name}.weight", weight, quantization.format, scales)
        rounded = self._rounded_input(value, layer, quantization.format)
        if rounded.sizes is None:
            product = self._gemm(name, rounded.value, matrix, bias)
        else:
            product = self._times_sizes(
                name, self._gemm(f"{name}.of_shares", rounded.value, matrix, None), rounded.sizes, bias
            )
        if layer.output_amax is None:
            return product
        return self._round(product, layer.output_amax, DType(quantization.format), f"{name}.rounded")

    def linear_fp32(self, name: str, value: str, weight: FloatArray, bias: FloatArray | None = None) -> str:
        """``linear`` in FP32, whatever the graph's types: for the part after the pooling, and for routers."""
        inputs = [value, self.fp32(f"{name}.weight", weight)]
        if bias is not None:
            inputs.append(self.fp32(f"{name}.bias", bias))
        return self.op("Gemm", inputs, name, transB=1)

    def observe(self, output: str, of: ObservedTensor) -> None:
        """Declare the value described by ``of`` as the graph output ``output``. KeyError if there is no such layer."""
        value = self._linear_inputs[of.layer]
        seen = self.cast(of.layer if of.is_product else value, DType.FP32, f"{output}.fp32")
        self.output(output, seen, DType.FP32, ["T", of.width])

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

    def _gemm(self, name: str, value: str, matrix: str, bias: FloatArray | None) -> str:
        offset = [] if bias is None else [self.vector(f"{name}.bias", bias)]
        return self.op("Gemm", [value, matrix, *offset], name, transB=1)

    def _matrix(self, name: str, array: FloatArray) -> str:
        stored = self._stored(name, array, self.types.storage)
        return (
            stored
            if self.types.storage is self.types.compute
            else self.cast(stored, self.types.compute, f"{name}.cast")
        )

    def _rounded_matrix(self, name: str, array: FloatArray, number_format: Format, scales: FloatArray) -> str:
        """``array`` [out, in] as numbers of the format, with a scale per row."""
        # Scales in the storage type, which may be coarse: both sides must use the same number.
        scale = scales.astype(self.types.compute.numpy)
        dtype = DType(number_format)
        codes = array / scale.astype(np.float32)[:, None]
        np.clip(
            np.rint(codes) if dtype is DType.INT8 else codes, -LARGEST[number_format], LARGEST[number_format], codes
        )
        inputs = [
            self._stored(f"{name}.{number_format}", codes, dtype),
            self._stored(f"{name}.scale", scale.astype(np.float32), self.types.compute),
        ]
        return self.op("DequantizeLinear", inputs, f"{name}.dequantized", axis=0)

    def _rounded_input(self, value: str, layer: LayerQuantization, number_format: Format) -> _Rounded:
        """``value`` as the input of ``layer``. Layers that share an input and its scale share the rounded one."""
        key = value, replace(layer, output_amax=None)
        if key not in self._rounded:
            name, sizes, exact, by = f"{value}.rounded.{len(self._rounded)}", None, value, None
            if layer.least is not None:
                offset = self.constant(-layer.least, self.types.compute.numpy)
                value = self.op("Add", [value, offset], f"{name}.from_least")
            if layer.smoothing is not None:
                factors = (1.0 / np.array(layer.smoothing)).astype(np.float32)
                by = self.vector(f"{name}.factors", factors)
                value = self.op("Mul", [value, by], f"{name}.smooth")
            if layer.per_token:
                sizes = self._sizes(value, name, is_signed=layer.least is None)
                value = self.op("Div", [value, sizes], f"{name}.shares")
                if number_format == "int8":
                    site = RoundingSite(value=exact, codes=f"{name}.codes", sizes=sizes, factors=by, least=layer.least)
                    self.roundings.append(site)
            stored = DType(number_format) if layer.least is None else DType.UINT8
            self._rounded[key] = _Rounded(self._round(value, layer.input_amax, stored, name), sizes)
        return self._rounded[key]

    def _sizes(self, value: str, name: str, *, is_signed: bool) -> str:
        """The largest value of each row of ``value``, of signed ones the largest absolute one, [rows, 1], above 0."""
        sized = self.op("Abs", [value], f"{name}.absolute") if is_signed else value
        largest = self.op("ReduceMax", [sized, self.constant([1])], f"{name}.largest", keepdims=1)
        least = self.constant(_LEAST_SIZE, self.types.compute.numpy)
        return self.op("Max", [largest, least], f"{name}.sizes")

    def _times_sizes(self, name: str, product: str, sizes: str, bias: FloatArray | None) -> str:
        """``product`` times the divisors of its rows, ``sizes``, plus the bias."""
        if bias is None:
            return self.op("Mul", [product, sizes], name)
        scaled = self.op("Mul", [product, sizes], f"{name}.scaled")
        return self.op("Add", [scaled, self.vector(f"{name}.bias", bias)], name)

    def _round(self, value: str, amax: float, stored: DType, name: str) -> str:
        """``value`` rounded to numbers of the type ``stored``, with one scale."""
        largest = LARGEST_UNSIGNED if stored is DType.UINT8 else LARGEST[stored.value]
        scale = self.constant(amax / largest, self.types.compute.numpy)
        zero = self._zero(stored)
        codes = self.op("QuantizeLinear", [value, scale, zero], f"{name}.codes")
        return self.op("DequantizeLinear", [codes, scale, zero], name)

    def _zero(self, dtype: DType) -> str:
        """The zero point, which also sets the type of values."""
        name = f"zero.{dtype.value}"
        if all(tensor.name != name for tensor in self._initializers):
            self._initializers.append(TensorProto(name=name, data_type=_ONNX_TYPES[dtype], raw_data=b"\0"))
        return name

    def _stored(self, name: str, array: FloatArray, dtype: DType) -> str:
        """Append ``array`` to the weights file as ``dtype``, and add an initializer ``name`` that refers to it."""
        self._data.write(b"\0" * (-self._data.tell() % _ALIGNMENT))
        tensor = TensorProto(name=name, data_type=_ONNX_TYPES[dtype], dims=array.shape)
        tensor.data_location = TensorProto.EXTERNAL
        raw = np.ascontiguousarray(array.astype(dtype.numpy, copy=False)).view(np.uint8)
        for key, value in (("location", WEIGHTS_FILE), ("offset", self._data.tell()), ("length", raw.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        self._data.write(raw.data)
        self._initializers.append(tensor)
        return name
