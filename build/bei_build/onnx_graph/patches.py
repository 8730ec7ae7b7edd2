"""Rows of an image's tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bei.engine.packing import pixel_levels
from bei_build.onnx_graph.writer import GraphWriter
from bei_build.spec.dtypes import DType, FloatArray
from bei_build.spec.patches import PatchesSpec


def emit_patches(graph: GraphWriter, read: Callable[[str], FloatArray], spec: PatchesSpec, name: str) -> str:
    """Rows of an image's tokens, [T, width]. Pixels are normalized in FP32, then cast to the graph's type."""
    levels = graph.input(pixel_levels(spec.width), DType.FP32, ["T", spec.width])
    scales, shifts = (np.tile(np.array(of, np.float32), spec.size**2) for of in (spec.scales, spec.shifts))
    scaled = graph.op("Mul", [levels, graph.fp32(f"{name}.scales", scales)], f"{name}.scaled")
    pixels = graph.op("Add", [scaled, graph.fp32(f"{name}.shifts", shifts)], f"{name}.normalized")
    matrix = read(f"{name}.patch.weight")
    if spec.flat != "pixels":  # [width, channel, row, column]
        by_channel = matrix.reshape(-1, 3, spec.size, spec.size)
        matrix = by_channel.transpose(0, 2, 3, 1).reshape(len(matrix), -1)
    bias = read(f"{name}.patch.bias") if spec.bias else None
    product = graph.linear(f"{name}.patch", graph.cast(pixels, graph.types.compute, f"{name}.pixels"), matrix, bias)
    return _behind_leading(graph, read, product, spec, name) if spec.num_leading else product


def _behind_leading(
    graph: GraphWriter, read: Callable[[str], FloatArray], patches: str, spec: PatchesSpec, name: str
) -> str:
    """Rows ``patches`` [T, width], with learned ones where tokens lead an image."""
    count, parts = spec.num_leading, []
    if spec.class_token:
        parts.append(read(f"{name}.patch.class_row")[None])
    if spec.registers:
        parts.append(read(f"{name}.patch.registers"))
    position_ids = graph.input("position_ids", DType.INT32, ["T"])
    is_leading = graph.op("Less", [position_ids, graph.constant(count, np.int32)], f"{name}.is_leading")
    column = graph.op("Unsqueeze", [is_leading, graph.constant([1])], f"{name}.column")
    rows = graph.vector(f"{name}.patch.leading", np.concatenate(parts))
    if count > 1:
        places = graph.op("Min", [position_ids, graph.constant(count - 1, np.int32)], f"{name}.places")
        rows = graph.op("Gather", [rows, places], f"{name}.leading", axis=0)
    return graph.op("Where", [column, rows, patches], f"{name}.rows")
