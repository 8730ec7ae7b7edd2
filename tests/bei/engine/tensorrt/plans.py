"""Plans of the stand-in: an ONNX graph with profiles, written as a file that can be cut off."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from bei.artifact.manifest import PlanProfile

_MAGIC = b"simulated plan\0\0"
HEADER_BYTES = len(_MAGIC) + 8
_DIMENSIONS = {"T": "tokens", "B": "sequences", "S": "longest"}
Ranges = dict[str, list[list[int]]]  # input -> least, usual, most


@dataclass(frozen=True)
class SimulatedPlan:
    """A plan. ``graph``: ONNX bytes with weights. ``has_weights``: False if it was compiled to be refitted."""

    version: str
    graph: bytes
    profiles: list[Ranges]
    has_weights: bool
    activation_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of all initializers."""
        initializers = onnx.load_from_string(self.graph).graph.initializer
        return sum(onnx.numpy_helper.to_array(tensor).nbytes for tensor in initializers)


def plan_bytes(
    graph: Path,
    profiles: list[PlanProfile],
    version: str,
    *,
    has_weights: bool = True,
    activation_bytes: int = 5000,
) -> bytes:
    """A plan of the ONNX file ``graph``."""
    model = onnx.load(graph)  # with its external data
    ranges = [
        {value.name: _ranges(value, profile) for value in model.graph.input}  # one an input, as a builder is told
        for profile in profiles
    ]
    facts = {"version": version, "profiles": ranges, "weights": has_weights, "activation_bytes": activation_bytes}
    head = json.dumps(facts).encode()
    body = struct.pack("<q", len(head)) + head + model.SerializeToString()
    return b"".join([_MAGIC, struct.pack("<q", len(body)), body])


def _ranges(value: onnx.ValueInfoProto, profile: PlanProfile) -> list[list[int]]:
    of_dimensions = [_range(dimension, profile) for dimension in value.type.tensor_type.shape.dim]
    return [list(sizes) for sizes in zip(*of_dimensions, strict=True)]


def _range(dimension: Any, profile: PlanProfile) -> tuple[int, int, int]:
    name = dimension.dim_param
    sizes: tuple[int, int, int] = getattr(profile, _DIMENSIONS[name])
    return sizes


def body_size(header: bytes) -> int:
    """The number of bytes after the header. Raises ValueError: not a plan."""
    if len(header) != HEADER_BYTES or not header.startswith(_MAGIC):
        raise ValueError("magic tag does not match")
    (size,) = struct.unpack("<q", header[len(_MAGIC) :])
    return int(size)


def plan_of(body: bytes) -> SimulatedPlan:
    """The plan in the bytes after the header."""
    (size,) = struct.unpack("<q", body[:8])
    facts = json.loads(body[8 : 8 + size])
    return SimulatedPlan(
        facts["version"], body[8 + size :], facts["profiles"], facts["weights"], facts["activation_bytes"]
    )


def zeroed(graph: bytes) -> bytes:
    """The graph with weights of zero, as in a plan without weights."""
    model = onnx.load_from_string(graph)
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros(tuple(tensor.dims), np.float32), tensor.name))
    return bytes(model.SerializeToString())
