"""Tensors of an ONNX graph under the names that the model's library has for them.

torch's exporters keep the name of a parameter, unless they transpose it for a product or find an equal one under
another name. Then the node that reads it says which module it belongs to: by its name
(``/encoder/layer.0/output/dense/MatMul``), or in its metadata. Products say which way round a matrix is stored, which
no shape does where it is square.

Where norms multiply by 1 + weight, the exporter computes that sum s, without a name of its own. s - 1 is read: for
every s that is such a sum of FP32, 1 + (s - 1) is s.

Only parameters are read. That the graph computes what config.json describes is not looked at, but a graph with fused,
quantized or conditional operators is refused, and so is a matrix without a name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bei.errors import WeightsError
from bei_build.families.base import Family
from bei_build.weights.onnx_store import FLOATS, OnnxStore
from bei_build.weights.tensor_store import WrappedStore

if TYPE_CHECKING:
    from onnx import NodeProto

_FROM_THE_ORIGINAL = "Build from the original checkpoint, or export it as it is (FP32 or FP16, without optimization)."
_CONTROL_FLOW = ("If", "Loop", "Scan", "SequenceMap")
_QUANTIZED = re.compile(r"(Dynamic)?QuantizeLinear|DequantizeLinear|QLinear\w+|\w+Integer")
# The part of a module that an operator's input is, by the input's place; of Add and Mul either input may be.
_ROLES: Mapping[str, Mapping[int, str]] = {
    "MatMul": {1: "weight"},
    "Gemm": {1: "weight", 2: "bias"},
    "Gather": {0: "weight"},
    "Add": {0: "bias", 1: "bias"},
    "Mul": {0: "weight", 1: "weight"},
    "LayerNormalization": {1: "weight", 2: "bias"},
    "RMSNormalization": {1: "weight"},
    "Conv": {1: "weight", 2: "bias"},
}
_OF_NORMS = ("Mul", "LayerNormalization", "RMSNormalization")
_PARAMETER = re.compile(r"[A-Za-z_]\w*(\.\w+)+")  # a path of modules and a part; exporters' own names have no dot
_COMPUTED = ("inv_freq", "embed_scale")  # buffers that config.json describes
_SCOPES = "pkg.torch.onnx.name_scopes"
_MOST_STEPS = 8  # operators between a stored tensor and the one that reads it
_CALLED_AGAIN = re.compile(r"_\d+(?=\.|$)")  # what the exporter appends to a module's name in its second call


@dataclass(frozen=True)
class _Use:
    """A stored tensor in the library's place of it: as it is, transposed, or with ``added`` in it, a family's
    ``norm_offset``."""

    stored: str
    transposed: bool = False
    added: float = 0.0


class OnnxNames(WrappedStore):
    """The tensors of ``store`` as ``family``'s library has them. Raises WeightsError."""

    def __init__(self, store: OnnxStore, family: Family) -> None:
        super().__init__(store)
        self._shapes = store.shapes
        self._is_known = partial(re.compile(_names_of(family)).search)
        self._makers = {output: node for node in store.graph.node for output in node.output}
        self._uses: dict[str, _Use] = {}
        shared: list[tuple[str, _Use]] = []
        for node in store.graph.node:
            _check(node)
            for place, value in enumerate(node.input):
                if (use := self._use_of(node, place, value)) is None:
                    continue
                part = _ROLES.get(node.op_type, {}).get(place)
                scope = f"{module}.{part}" if part and (module := _module(node)) else ""
                if use.stored.endswith(_COMPUTED):
                    continue
                if _PARAMETER.fullmatch(use.stored):
                    self._add(use.stored, use)
                    shared.append((scope, use))
                elif part == "weight" and node.op_type in ("MatMul", "Gemm") and len(self._shapes[use.stored]) == 2:
                    self._add(self._known(scope, node, use), use)
                elif part == "weight" and family.norm_offset and self._is_vector(node, use) and self._is_known(scope):
                    self._add(scope, replace(use, added=family.norm_offset))
        # Equal tensors are stored once: the others' names are their users'.
        for scope, use in shared:
            if scope and scope not in self._uses and self._is_known(scope):
                self._uses[scope] = use
        del self._makers

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        return {name: self._shapes[use.stored][:: -1 if use.transposed else 1] for name, use in self._uses.items()}

    @property
    def types(self) -> frozenset[str]:
        """The element types of the tensors: F32, F16, ..."""
        return frozenset(self.type_of(name) for name in self._uses)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor called ``name``, float32."""
        use = self._uses[name]
        array = self._store.read(use.stored)
        if use.added:
            return array - np.float32(use.added)
        return np.ascontiguousarray(array.T) if use.transposed else array

    def _stored_name(self, name: str) -> str:
        return self._uses[name].stored

    def _use_of(self, node: NodeProto, place: int, value: str) -> _Use | None:
        """The stored tensor that is input ``place`` of ``node``, as its library has it; None where it is none, or no
        floating-point one."""
        stored, flipped = value, False
        for _ in range(_MOST_STEPS):
            if stored in self._shapes:
                break
            if (maker := self._makers.get(stored)) is None or not (turned := _turns(maker)):
                return None
            stored, flipped = maker.input[0], flipped != (turned == "transposed")
        if stored not in self._shapes or _turns(node) or self._store.type_of(stored) not in FLOATS.values():
            return None
        if node.op_type == "MatMul" and place == 1:
            return _Use(stored, not flipped and len(self._shapes[stored]) == 2)
        if node.op_type == "Gemm" and place == 1:
            numbers = {attribute.name: attribute for attribute in node.attribute}
            scaled = any(numbers[name].f != 1 for name in ("alpha", "beta") if name in numbers)
            if scaled or ("transA" in numbers and numbers["transA"].i):
                raise WeightsError(f"The ONNX file's operator {node.name[:80]!a} scales a matrix. {_FROM_THE_ORIGINAL}")
            return _Use(stored, flipped == ("transB" in numbers and bool(numbers["transB"].i)))
        return _Use(stored)

    def _is_vector(self, node: NodeProto, use: _Use) -> bool:
        """True if ``node`` multiplies by ``use`` as norms do by their weights."""
        return node.op_type in _OF_NORMS and len(self._shapes[use.stored]) == 1

    def _known(self, scope: str, node: NodeProto, use: _Use) -> str:
        """The name of a matrix that has none of its own. Raises WeightsError."""
        if not scope:
            raise WeightsError(
                f"The ONNX file's matrix {use.stored[:80]!a} has no name of a parameter, and neither has the operator "
                f"that reads it ({node.name[:80]!a}). {_FROM_THE_ORIGINAL}"
            )
        first = _CALLED_AGAIN.sub("", scope)
        return first if first in self._uses and not self._is_known(scope) else scope

    def _add(self, name: str, use: _Use) -> None:
        """Raises WeightsError where ``name`` is another tensor already."""
        other = self._uses.setdefault(name, use)
        if other == use:
            return
        is_same_way = other.transposed == use.transposed
        if not is_same_way or not np.array_equal(self._store.read(other.stored), self._store.read(use.stored)):
            raise WeightsError(
                f"The ONNX file has two tensors for {name[:80]!a}: {other.stored[:80]!a} and {use.stored[:80]!a}. "
                f"{_FROM_THE_ORIGINAL}"
            )


def _check(node: NodeProto) -> None:
    """Raise WeightsError for an operator behind which no parameter of the library can be looked for."""
    name = f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
    if _QUANTIZED.fullmatch(node.op_type):
        what = "is quantized"
    elif name != node.op_type:
        what = "is fused, or made of functions"
    elif node.op_type in _CONTROL_FLOW:
        what = "has conditions"
    else:
        return
    raise WeightsError(f"The ONNX file's graph {what} (operator {name[:80]!a}). {_FROM_THE_ORIGINAL}")


def _turns(node: NodeProto) -> str:
    """What ``node`` makes of its input if no number of it changes: "same", "transposed"; else empty."""
    if not node.input:
        return ""
    if node.op_type == "Identity":
        return "same"
    if node.op_type == "Cast":  # to more bits; a tensor that is rounded is read as it is stored
        return "same"
    if node.op_type == "Transpose":
        orders = [list(attribute.ints) for attribute in node.attribute if attribute.name == "perm"]
        return "transposed" if orders in ([[1, 0]], []) else ""
    return ""


def _module(node: NodeProto) -> str:
    """The module that ``node`` was exported from, empty if it does not say."""
    for entry in node.metadata_props:
        if entry.key == _SCOPES:
            try:
                scopes = ast.literal_eval(entry.value) if len(entry.value) < 10_000 else None
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                return ""
            if not isinstance(scopes, list) or len(scopes) < 2 or not isinstance(scopes[-2], str):
                return ""
            return scopes[-2]
    parts = node.name.strip("/").split("/")
    return ".".join(parts[:-1]) if node.name.startswith("/") else ""


def _names_of(family: Family) -> str:
    """A pattern of the ends of all names that tensors of ``family`` have."""
    found = set()
    for ours, names in family.weights.items():
        kind = "" if ours.endswith((".weight", ".bias")) else r"\.(weight|bias)"
        for name in (names,) if isinstance(names, str) else names:
            found.add(re.escape(name).replace(r"\{i\}", r"\d+") + kind)
    return rf"(^|\.)({'|'.join(sorted(found))})$"
