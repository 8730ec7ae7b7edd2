"""Images among the tokens of a decoder."""

from __future__ import annotations

import numpy as np

from bei.engine.packing import FEATURE_SLOTS, image_features
from bei_build.onnx_graph.writer import GraphWriter
from bei_build.spec.dtypes import DType


def emit_with_images(graph: GraphWriter, words: str, width: int, name: str) -> str:
    """``words`` [T, width], with rows of an image tower in the place of those of the tokens that stand for them."""
    rows = graph.input(image_features(width), DType.FP32, ["R", width])
    slots = graph.input(FEATURE_SLOTS, DType.INT32, ["T"])
    found = graph.op("Gather", [rows, slots], f"{name}.image_rows", axis=0)
    found = graph.cast(found, graph.types.compute, f"{name}.image_rows.cast")
    is_image = graph.op("Greater", [slots, graph.constant(0, np.int32)], f"{name}.is_image")
    column = graph.op("Unsqueeze", [is_image, graph.constant([1])], f"{name}.is_image.column")
    return graph.op("Where", [column, found, words], f"{name}.with_images")
