"""What instances of structures are formed from (``RecordStatesSpec``), as a layer of a head.

All matrices between a boundary's state and what is read of candidates are one: it is multiplied here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bei_build.onnx_graph.boundary_states import BoundaryStates
from bei_build.spec.dtypes import DType, FloatArray
from bei_build.spec.head_layers import RecordStatesSpec


def emit_record_states(
    states: BoundaryStates, read: Callable[[str], FloatArray], value: str, layer: RecordStatesSpec, name: str
) -> str:
    """From token states ``value`` [T, width] to rows [T, columns], in the graph's type."""
    graph = states.graph
    of_boundaries = graph.linear(f"{name}.boundary", states.states, *_of_boundaries(read, layer))
    tokens = graph.input("boundary_words", DType.INT32, ["T"])
    rows = graph.op("Gather", [of_boundaries, tokens], f"{name}.boundaries", axis=0)
    of_labels = graph.linear(f"{name}.label", value, *_of_labels(read, layer))
    return graph.op("Concat", [rows, of_labels], name, axis=1)


def _of_boundaries(read: Callable[[str], FloatArray], layer: RecordStatesSpec) -> tuple[FloatArray, FloatArray]:
    """The matrix and bias of boundaries as starts, then as ends."""
    instance, candidate, value, key, seed, scores = (
        _linear(read, layer, part) for part in ("instance", "candidate", "value", "key", "seed", "object")
    )
    nothing, queries, base = _learned(read, layer)
    attention = queries * np.float32(layer.record_width**-0.5)
    parts = [
        instance,
        candidate,
        (instance[0] @ value[0], instance[0] @ value[1]),
        (attention @ key[0], attention @ key[1]),
        (base @ candidate[0], base @ candidate[1]),
        seed,
        (scores[0] @ value[0], scores[0] @ value[1]),
        (nothing @ instance[0], nothing @ instance[1]),
        (nothing @ instance[0] @ value[0], nothing @ instance[0] @ value[1]),
    ]
    matrix, bias = (np.concatenate(side) for side in zip(*parts, strict=True))
    encoder, encoder_bias = _linear(read, layer, "encoder")
    starts, ends = np.split(encoder, 2, axis=1)
    whole = np.concatenate([bias + matrix @ encoder_bias, np.zeros_like(bias)])
    return np.concatenate([matrix @ starts, matrix @ ends]).astype(np.float32), whole.astype(np.float32)


def _of_labels(read: Callable[[str], FloatArray], layer: RecordStatesSpec) -> tuple[FloatArray, FloatArray]:
    """The matrix and bias of labels."""
    (field, field_bias), (scores, scores_bias) = (_linear(read, layer, part) for part in ("field", "object"))
    nothing, _, base = _learned(read, layer)
    count = layer.num_queries
    of_nothing = np.repeat(nothing @ field, count + 1, axis=0)
    matrix = np.concatenate([field, of_nothing, np.zeros((count, layer.width), np.float32)])
    beside = np.append(base @ nothing[0], 0.0) + nothing[0] @ field_bias
    learned = read(f"{layer.name}.queries") @ scores[0] + scores_bias
    return matrix.astype(np.float32), np.concatenate([field_bias, beside, learned]).astype(np.float32)


def _learned(read: Callable[[str], FloatArray], layer: RecordStatesSpec) -> tuple[FloatArray, FloatArray, FloatArray]:
    """What stands for no value [1, D]; the learned instances as they look for candidates, and as instances [I, D]."""
    states = read(f"{layer.name}.queries")
    query, instance = (_linear(read, layer, part) for part in ("query", "instance"))
    nothing = read(f"{layer.name}.nothing")[None]
    return nothing, states @ query[0].T + query[1], states @ instance[0].T + instance[1]


def _linear(read: Callable[[str], FloatArray], layer: RecordStatesSpec, part: str) -> tuple[FloatArray, FloatArray]:
    return read(f"{layer.name}.{part}.weight"), read(f"{layer.name}.{part}.bias")
