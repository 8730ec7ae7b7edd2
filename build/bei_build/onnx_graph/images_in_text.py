"""Images among the tokens of a decoder."""

from __future__ import annotations

import numpy as np

from bei.engine.packing import FEATURE_SLOTS, image_features
from bei_build.onnx_graph.writer import GraphWriter
from bei_build.spec.dtypes import DType


def emit_with_images(graph: GraphWriter, words: str, width: int, num_layers: int, name: str) -> tuple[str, list[str]]:
    """``words`` [T, width], with rows of an image tower in the place of those of the tokens that stand for them; and
    what is added to the states behind each of the first ``num_layers`` layers, [T, width], zeros of other tokens."""
    rows = graph.input(image_features(width * (1 + num_layers)), DType.FP32, ["R", width * (1 + num_layers)])
    slots = graph.input(FEATURE_SLOTS, DType.INT32, ["T"])
    found = graph.op("Gather", [rows, slots], f"{name}.image_rows", axis=0)
    found = graph.cast(found, graph.types.compute, f"{name}.image_rows.cast")
    parts = [found]
    if num_layers:
        parts = graph.split(found, [width] * (1 + num_layers), f"{name}.image_rows.parts", axis=1)
    is_image = graph.op("Greater", [slots, graph.constant(0, np.int32)], f"{name}.is_image")
    column = graph.op("Unsqueeze", [is_image, graph.constant([1])], f"{name}.is_image.column")
    return graph.op("Where", [column, parts[0], words], f"{name}.with_images"), parts[1:]
