"""Labels of a schema and the scores of its counts (``CountingSpec``), for the head that scores spans.

The GRU's first step is from an input that is always the same: its half of the gates is a part of their biases. Few
labels have further ones.
"""

from __future__ import annotations

import numpy as np

from bei.engine.schema_columns import count_columns, count_slots
from bei_build.onnx_graph.word_rows import WordRows
from bei_build.spec.dtypes import DType, FloatArray
from bei_build.spec.head_layers import CountingSpec, SpanScoresSpec

# What a score of attention loses where a slot holds no label: enough that its share is 0.
_HIDDEN = -1e4


def emit_counted_labels(rows: WordRows, value: str, layer: SpanScoresSpec) -> str:
    """From token states ``value`` [T, width] to what spans are multiplied with, for each label in each instance that is
    asked for, [Q, width]."""
    counting = layer.counting
    assert counting is not None
    graph, name = rows.graph, f"{rows.name}.schema.label"
    labels = rows.rows_at(value, graph.input("label_tokens", DType.INT32, ["N"]), f"{name}.tokens")
    steps = _steps(rows, labels, layer.width)
    steps = rows.rows_at(steps, graph.input("column_rows", DType.INT32, ["Q"]), f"{name}.steps")
    labels = rows.rows_at(labels, graph.input("column_labels", DType.INT32, ["Q"]), f"{name}.states")
    if counting.kind == "mlp":
        found = graph.op("Concat", [steps, labels], f"{name}.pair", axis=1)
    else:
        total = graph.op("Add", [steps, labels], f"{name}.sum")
        found = graph.op("Concat", [_transformer(rows, total, counting), total], f"{name}.pair", axis=1)
    last = len(counting.label_widths(layer.width)) - 2
    for index in range(last + 1):
        found = _linear(rows, found, f"label.{index}")
        if index < last:
            found = graph.op("Relu", [found], f"{name}.{index}.act")
    return found


def with_counts(rows: WordRows, value: str, scores: str, layer: SpanScoresSpec) -> str:
    """``scores`` [B, W, C, n] with those of counts in the columns of these. ``value``: token states [T, width]."""
    counting = layer.counting
    assert counting is not None
    graph, name, width = rows.graph, f"{rows.name}.schema.count", layer.max_width
    per_count = count_columns(counting.num_counts, width)
    parts = graph.input("part_tokens", DType.INT32, ["G"])
    hidden = graph.op("Relu", [_linear(rows, rows.rows_at(value, parts, f"{name}.state"), "count.0")], f"{name}.act")
    logits = _linear(rows, hidden, "count.1")
    missing = graph.constant([0, 0, 0, per_count * width - counting.num_counts])
    filled = graph.op("Pad", [logits, missing], f"{name}.filled")
    table = graph.op("Reshape", [filled, graph.constant([-1, width])], f"{name}.columns")
    table = graph.op("Pad", [table, graph.constant([1, 0, 0, 0])], f"{name}.table")  # a row for labels
    slots = graph.input(count_slots(per_count), DType.INT32, ["B", "C"])
    of_columns = rows.by_sequence(rows.rows_at(table, slots, f"{name}.by_column"), slots)
    by_word = graph.op("Unsqueeze", [of_columns, graph.constant([1])], f"{name}.by_word")
    is_count = graph.op("Less", [graph.constant(0, np.int32), slots], f"{name}.is_count")
    is_count = graph.op("Unsqueeze", [is_count, graph.constant([1, 3])], f"{name}.is_count.by_word")
    return graph.op("Where", [is_count, by_word, scores], f"{name}.with_counts")


def _steps(rows: WordRows, labels: str, width: int) -> str:
    """The GRU's states [N + I * R, width]: the first one of all ``labels`` [N, width], then the further ones of labels
    of several instances."""
    graph, name = rows.graph, f"{rows.name}.schema.gru"
    first = _gru_step(rows, labels, width)
    repeated = graph.input("repeated_labels", DType.INT32, ["R"])
    begun = graph.op("Unsqueeze", [rows.rows_at(first, repeated, f"{name}.begun"), graph.constant([0])], f"{name}.h")
    table = graph.vector(f"{name}.position", rows.read("schema.position.weight"))
    further = rows.rows_at(table, graph.input("further_instances", DType.INT32, ["I"]), f"{name}.further")
    further = graph.op("Unsqueeze", [further, graph.constant([1])], f"{name}.by_label")
    further = graph.op("Expand", [further, graph.op("Shape", [begun], f"{name}.sizes")], f"{name}.inputs")
    matrices = [
        graph.vector(f"{name}.{kind}.gates", _gates(rows.read(f"schema.gru.{kind}.weight"))[None])
        for kind in ("input", "hidden")
    ]
    biases = np.concatenate([_gates(rows.read(f"schema.gru.{kind}.bias")) for kind in ("input", "hidden")])
    inputs = [further, *matrices, graph.vector(f"{name}.bias", biases[None]), "", begun]
    states = graph.op("GRU", inputs, f"{name}.states", hidden_size=width, linear_before_reset=1)  # [I, 1, R, width]
    flat = graph.op("Reshape", [states, graph.constant([-1, width])], f"{name}.flat")
    return graph.op("Concat", [first, flat], f"{name}.all", axis=0)


def _gates(rows: FloatArray) -> FloatArray:
    """PyTorch's gates are reset, update, new; ONNX's update, reset, new."""
    reset, update, new = np.split(rows, 3)
    return np.concatenate([update, reset, new])


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
    """Layers of PyTorch's TransformerEncoderLayer over the labels of each part and instance: norms follow sums."""
    graph, width, heads = rows.graph, counting.inner_width, counting.num_heads
    groups = graph.input("group_columns", DType.INT32, ["A", "M"])
    value = rows.rows_at(_linear(rows, value, "narrow"), groups, f"{rows.name}.schema.groups")
    hidden = _hidden_slots(rows, groups)
    by_head = graph.constant([0, 0, heads, width // heads])
    for index in range(counting.num_layers):
        part = f"blocks.{index}"
        name = f"{rows.name}.schema.{part}"
        joined = rows.by_sequence(_linear(rows, value, f"{part}.input"), groups)
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
    places = graph.input("column_places", DType.INT32, ["Q"])
    return rows.rows_at(value, places, f"{rows.name}.schema.of_columns")


def _normed(rows: WordRows, value: str, added: str, norm: str, counting: CountingSpec) -> str:
    graph, name = rows.graph, f"{rows.name}.schema.{norm}"
    total = graph.op("Add", [value, added], f"{name}.sum")
    weights = [graph.vector(f"{name}.{kind}", rows.read(f"schema.{norm}.{kind}")) for kind in ("weight", "bias")]
    return graph.op("LayerNormalization", [total, *weights], name, axis=-1, epsilon=counting.eps)


def _hidden_slots(rows: WordRows, groups: str) -> str:
    """What is added to scores of attention, [A, 1, 1, M]: 0 where a slot of ``groups`` holds a label, else a large
    negative number. Slots behind the last label repeat it."""
    graph, name = rows.graph, f"{rows.name}.schema.slots"
    none = graph.constant(-1, np.int32)
    padded = graph.op("Pad", [groups, graph.constant([0, 1, 0, 0]), none], f"{name}.shifted")
    bounds = [graph.constant([bound]) for bound in (0, -1, 1)]
    before = graph.op("Slice", [padded, *bounds], f"{name}.before")
    is_label = graph.op("Less", [before, groups], f"{name}.is_label")
    added = [graph.constant(number, np.float32) for number in (0.0, _HIDDEN)]
    hidden = graph.op("Where", [is_label, *added], f"{name}.hidden")
    by_score = graph.op("Unsqueeze", [hidden, graph.constant([1, 2])], f"{name}.hidden.by_score")
    return graph.cast(by_score, graph.types.compute, f"{name}.hidden.cast")
