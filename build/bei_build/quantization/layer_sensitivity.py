"""Sensitivity of a model's outputs to the rounding of single linear layers: the order of layers to keep high.

The FP32 graph runs in ONNX Runtime with an input beside each layer's product, which is added to it. The change of a
product is computed from the layer's input in this graph, and fed to that input; its effect shows in the outputs. A
layer before many others may have a large effect with a small error of its own, and the other way round
(docs/decisions.md).
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from bei.core import Encoding, PackedBatch
from bei.engine.packing import graph_inputs
from bei.errors import EngineError
from bei.utils.share_done import Tell, untold
from bei_build import memory
from bei_build.onnx_graph.attention import AttentionCore
from bei_build.onnx_graph.transformer import write_graph
from bei_build.onnx_graph.writer import GraphTypes
from bei_build.quantization.emulation import session_of
from bei_build.quantization.rounding import rounded_product
from bei_build.spec.dtypes import DType, FloatArray
from bei_build.spec.model_spec import ModelSpec
from bei_build.spec.quantization import Quantization, rounded

# Values by name.
Values: TypeAlias = "dict[str, FloatArray]"

_CHANGE = "change:"  # followed by a layer's name: the graph input that is added to its product
_MOST_TOKENS = 320  # for all texts together: the graph runs on them once per layer
_LONGEST = 48
_MOST_OPERATIONS = 1e14  # for all runs together: about ten minutes on two cores
_LEAST = 1e-30


def measure_effects(
    spec: ModelSpec,
    read: Callable[[str], FloatArray],
    quantization: Quantization,
    encodings: Sequence[Encoding],
    max_seq_len: int,
    scratch: Path,
    tell: Tell = untold,
) -> Mapping[str, float] | None:
    """For each layer of ``quantization``, the change from rounding it alone: the sum over all outputs of |changed -
    exact|^2 / |exact|^2.

    Measured on some of ``encodings``. None where ONNX Runtime is not installed, where memory or ten minutes do not
    suffice, and where the graph computes some layer's product other than as one product. Raises EngineError.
    """
    batch = PackedBatch.from_encodings(_sample(encodings))
    operations = 2.0 * spec.num_parameters * batch.num_tokens * len(quantization.layers)
    if importlib.util.find_spec("onnxruntime") is None or operations > _MOST_OPERATIONS:
        return None
    available = memory.available_bytes()
    if available is not None and 8 * spec.num_parameters > available:  # the file's pages, and the session's copy
        return None
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        types = GraphTypes(DType.FP32, DType.FP32)
        path = write_graph(spec, read, Path(folder), types, AttentionCore.TRT_ATTENTION, max_seq_len)
        graph = _PerturbedGraph(path, quantization, [str(head.output) for head in spec.heads], batch)
        if not graph.is_whole:
            return None
        effects: dict[str, float] = {}
        for name in quantization.layers:
            effects[name] = rounded(graph.effect(name))
            tell(len(effects), len(quantization.layers))
        return effects


def _sample(encodings: Sequence[Encoding]) -> list[Encoding]:
    """The first short encodings, so that several texts are used; the shortest one where none is short."""
    short = [encoding for encoding in encodings if encoding.num_tokens <= _LONGEST]
    chosen: list[Encoding] = []
    for encoding in short or sorted(encodings, key=lambda encoding: encoding.num_tokens):
        if chosen and sum(one.num_tokens for one in chosen) + encoding.num_tokens > _MOST_TOKENS:
            break
        chosen.append(encoding)
    return chosen


class _PerturbedGraph:
    """The graph at ``path`` with inputs for changes, run on ``batch``. ``is_whole``: it has every layer's product."""

    def __init__(self, path: Path, quantization: Quantization, outputs: Sequence[str], batch: PackedBatch) -> None:
        model = onnx.load(path, load_external_data=False)
        self._quantization, self._outputs = quantization, list(outputs)
        self._matrices = {
            node.name: numpy_helper.to_array(tensor, str(path.parent))
            for node, tensor in _products(model, quantization)
        }
        self.is_whole = self._matrices.keys() == quantization.layers.keys()
        self._read_by = _with_changes(model, self._matrices)
        path.write_bytes(model.SerializeToString())
        self._session = session_of(path)
        names = [one.name for one in self._session.get_inputs() if not one.name.startswith(_CHANGE)]
        self._inputs: dict[str, Any] = dict(graph_inputs(batch, names))
        self._inputs |= {_CHANGE + name: np.zeros((1, len(it)), np.float32) for name, it in self._matrices.items()}
        self._exact = self._run({}, [*self._outputs, *set(self._read_by.values())])

    def effect(self, layer: str) -> float:
        """The effect of rounding ``layer``."""
        rows, matrix = self._exact[self._read_by[layer]], self._matrices[layer]
        # A checkpoint's scales are for rows without the score scale, which queries have here.
        how = replace(self._quantization.layers[layer], row_scales={})
        change = rounded_product(rows, matrix, how, self._quantization.format) - rows @ matrix.T
        found = self._run({_CHANGE + layer: change}, self._outputs)
        sizes = {name: max(float(np.square(self._exact[name]).sum()), _LEAST) for name in self._outputs}
        return sum(float(np.square(found[name] - self._exact[name]).sum()) / sizes[name] for name in self._outputs)

    def _run(self, changes: Mapping[str, FloatArray], names: Sequence[str]) -> Values:
        try:
            return dict(zip(names, self._session.run(names, {**self._inputs, **changes}), strict=True))
        except Exception as error:  # its classes have no common base
            raise EngineError(f"ONNX Runtime failed on a batch: {error}") from error


def _products(model: ModelProto, quantization: Quantization) -> list[tuple[Any, Any]]:
    """The nodes that compute products of layers, and the tensors of their matrices."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    return [
        (node, tensors[node.input[1]])
        for node in model.graph.node
        if node.op_type == "Gemm" and node.name in quantization.layers
    ]


def _with_changes(model: ModelProto, layers: Mapping[str, FloatArray]) -> dict[str, str]:
    """Add inputs to ``model`` whose values are added to products; returns the input of each layer, which becomes an
    output."""
    read_by, nodes = {}, []
    for node in model.graph.node:
        nodes.append(node)
        if node.name not in layers or node.op_type != "Gemm":
            continue
        (product,) = node.output
        change = helper.make_tensor_value_info(_CHANGE + node.name, TensorProto.FLOAT, [None, len(layers[node.name])])
        model.graph.input.append(change)
        node.output[0] = f"{product}.exact"
        nodes.append(helper.make_node("Add", [f"{product}.exact", change.name], [product], f"{product}.changed"))
        read_by[node.name] = node.input[0]
    kept = [helper.make_node("Identity", [name], [f"read:{name}"]) for name in sorted(set(read_by.values()))]
    model.graph.output.extend(ValueInfoProto(name=node.output[0]) for node in kept)
    del model.graph.node[:]
    model.graph.node.extend([*nodes, *kept])
    return {name: f"read:{value}" for name, value in read_by.items()}
