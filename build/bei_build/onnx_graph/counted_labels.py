"""Labels of a schema and the margin of its count (``CountingSpec``), for the head that scores spans.

The GRU makes one step from an input that is always the same: its half of the gates is a part of their biases.
"""

from __future__ import annotations

import numpy as np

from bei_build.onnx_graph.word_rows import WordRows
from bei_build.spec.head_layers import CountingSpec, SpanScoresSpec

# What a score of attention loses where a slot holds no label: enough that its share is 0.
_HIDDEN = -1e4


def emit_counted_labels(rows: WordRows, labels: str, layer: SpanScoresSpec) -> str:
    """From the states of all labels, flat [B * C, width], to what spans are multiplied with."""
    counting = layer.counting
    assert counting is not None
    graph, name = rows.graph, f"{rows.name}.schema.label"
    step = _gru_step(rows, labels, layer.width)
    if counting.kind == "mlp":
        value = graph.op("Concat", [step, labels], f"{name}.pair", axis=1)
    else:
        total = graph.op("Add", [step, labels], f"{name}.sum")
        value = graph.op("Concat", [_transformer(rows, total, counting), total], f"{name}.pair", axis=1)
    last = len(counting.label_widths(layer.width)) - 2
    for index in range(last + 1):
        value = _linear(rows, value, f"label.{index}")
        if index < last:
            value = graph.op("Relu", [value], f"{name}.{index}.act")
    return value


def with_margin(rows: WordRows, value: str, scores: str) -> str:
    """``scores`` [B, W, C, n] with the margin of the count in the first column of a sequence that has further ones.
    ``value``: token states [T, width]."""
    graph, name = rows.graph, f"{rows.name}.schema.count"
    first, last = (_column(rows, place) for place in (0, -1))
    hidden = graph.op("Relu", [_linear(rows, rows.rows_at(value, first, f"{name}.state"), "count.0")], f"{name}.act")
    logits = _linear(rows, hidden, "count.1")
    none, some = graph.split(logits, [1, len(rows.read("schema.count.1.bias")) - 1], f"{name}.parts", 1)
    most = graph.op("ReduceMax", [some, graph.constant([1])], f"{name}.most", keepdims=1)
    margin = graph.op("Sub", [most, none], f"{name}.margin")
    by_word = graph.op("Unsqueeze", [margin, graph.constant([2, 3])], f"{name}.by_word")
    is_first = graph.op("Equal", [rows.label_slots, first], f"{name}.is_first")
    has_others = graph.op("Less", [first, last], f"{name}.has_others")
    is_own = graph.op("And", [is_first, has_others], f"{name}.is_own")
    is_own = graph.op("Unsqueeze", [is_own, graph.constant([1, 3])], f"{name}.is_own.by_word")
    return graph.op("Where", [is_own, by_word, scores], f"{name}.with_margin")


def _column(rows: WordRows, place: int) -> str:
    """The slot of each sequence's first (0) or last (-1) label, [B, 1]."""
    end = 1 if place == 0 else np.iinfo(np.int64).max
    bounds = [rows.graph.constant([bound]) for bound in (place, end, 1)]
    return rows.graph.op("Slice", [rows.label_slots, *bounds], f"{rows.name}.schema.label.at{place}")


def _linear(rows: WordRows, value: str, part: str) -> str:
    weight, bias = (rows.read(f"schema.{part}.{kind}") for kind in ("weight", "bias"))
    return rows.graph.linear(f"{rows.name}.schema.{part}", value, weight, bias)


def _gru_step(rows: WordRows, labels: str, width: int) -> str:
    """The GRU's first state; the gates are reset, update and new."""
    graph, name = rows.graph, f"{rows.name}.schema.gru"
    weight, read = rows.read("schema.gru.input.weight"), rows.read("schema.gru.input.bias")
    read = read + weight @ rows.read("schema.position.weight")[0]
    bias = rows.read("schema.gru.hidden.bias").copy()
    bias[: 2 * width] += read[: 2 * width]
    gates = graph.linear(f"{name}.hidden", labels, rows.read("schema.gru.hidden.weight"), bias)
    reset, update, new = graph.split(gates, [width] * 3, f"{name}.gates", 1)
    reset, update = (graph.op("Sigmoid", [gate], f"{gate}.act") for gate in (reset, update))
    new = graph.op("Mul", [reset, new], f"{name}.reset")
    new = graph.op("Add", [new, graph.vector(f"{name}.input", read[2 * width :])], f"{name}.sum")
    new = graph.op("Tanh", [new], f"{name}.new")
    kept = graph.op("Mul", [update, graph.op("Sub", [labels, new], f"{name}.difference")], f"{name}.kept")
    return graph.op("Add", [new, kept], name)


def _transformer(rows: WordRows, value: str, counting: CountingSpec) -> str:
    """Layers of PyTorch's TransformerEncoderLayer over the labels of each sequence: norms follow sums."""
    graph, width, heads = rows.graph, counting.inner_width, counting.num_heads
    value = _linear(rows, value, "narrow")
    hidden = _hidden_slots(rows)
    by_head = graph.constant([0, 0, heads, width // heads])
    for index in range(counting.num_layers):
        part = f"blocks.{index}"
        name = f"{rows.name}.schema.{part}"
        joined = rows.by_sequence(_linear(rows, value, f"{part}.input"), rows.label_slots)
        query, key, values = (
            graph.op("Reshape", [one, by_head], f"{one}.heads")
            for one in graph.split(joined, [width] * 3, f"{name}.parts", 2)
        )
        query, values = (graph.op("Transpose", [one], f"{one}.turned", perm=[0, 2, 1, 3]) for one in (query, values))
        key = graph.op("Transpose", [key], f"{key}.turned", perm=[0, 2, 3, 1])
        scores = graph.op("MatMul", [query, key], f"{name}.scores")
        scale = graph.vector(f"{name}.scale", np.array((width // heads) ** -0.5, np.float32))
        scores = graph.op("Add", [graph.op("Mul", [scores, scale], f"{name}.scaled"), hidden], f"{name}.masked")
        shares = graph.op("Softmax", [scores], f"{name}.shares", axis=-1)
        context = graph.op("MatMul", [shares, values], f"{name}.context")
        context = graph.op("Transpose", [context], f"{name}.context.turned", perm=[0, 2, 1, 3])
        context = graph.op("Reshape", [context, graph.constant([-1, width])], f"{name}.context.flat")
        value = _normed(rows, value, _linear(rows, context, f"{part}.output"), f"{part}.attention_norm", counting)
        inner = graph.op("Relu", [_linear(rows, value, f"{part}.up")], f"{name}.act")
        value = _normed(rows, value, _linear(rows, inner, f"{part}.down"), f"{part}.mlp_norm", counting)
    return value


def _normed(rows: WordRows, value: str, added: str, norm: str, counting: CountingSpec) -> str:
    graph, name = rows.graph, f"{rows.name}.schema.{norm}"
    total = graph.op("Add", [value, added], f"{name}.sum")
    weights = [graph.vector(f"{name}.{kind}", rows.read(f"schema.{norm}.{kind}")) for kind in ("weight", "bias")]
    return graph.op("LayerNormalization", [total, *weights], name, axis=-1, epsilon=counting.eps)


def _hidden_slots(rows: WordRows) -> str:
    """What is added to scores of attention, [B, 1, 1, C]: 0 where a slot holds a label, else a large negative number.

    The first slot is the schema's own, and those behind the last label repeat it: in both no slot is in front of it.
    """
    graph, name = rows.graph, f"{rows.name}.schema.label"
    padded = graph.op("Pad", [rows.label_slots, graph.constant([0, 1, 0, 0])], f"{name}.shifted", mode="edge")
    bounds = [graph.constant([bound]) for bound in (0, -1, 1)]
    before = graph.op("Slice", [padded, *bounds], f"{name}.before")
    is_label = graph.op("Less", [before, rows.label_slots], f"{name}.is_label")
    added = [graph.constant(number, np.float32) for number in (0.0, _HIDDEN)]
    hidden = graph.op("Where", [is_label, *added], f"{name}.hidden")
    by_score = graph.op("Unsqueeze", [hidden, graph.constant([1, 2])], f"{name}.hidden.by_score")
    return graph.cast(by_score, graph.types.compute, f"{name}.hidden.cast")
