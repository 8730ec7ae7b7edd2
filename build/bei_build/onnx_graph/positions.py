"""Effects of positions on attention: rotations of queries and keys, masks and biases of the scores.

Values that depend on positions alone are emitted once per graph and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from bei.engine.grid_windows import Windows
from bei_build.onnx_graph.writer import Dim, GraphWriter
from bei_build.spec.dtypes import DType, FloatArray
from bei_build.spec.parts import AttentionSpec, DisentangledSpec, RopeSpec
from bei_build.spec.position_tables import (
    alibi_slopes,
    columns_of_axes,
    disentangled_rows,
    rotation_angles,
    turns_long_texts,
)

RELATIVE_BIAS = "relative_bias.table"  # [2 * max_seq_len - 1, heads]


class Rotations:
    """Rotary positions of packed queries and keys. Tables end at ``max_seq_len``, the longest sequence."""

    def __init__(self, graph: GraphWriter, max_seq_len: int) -> None:
        self._graph = graph
        self._max_seq_len = max_seq_len
        self._tables: dict[RopeSpec, tuple[str, str]] = {}

    def emit(self, value: str, spec: RopeSpec, head_dim: int, name: str) -> str:
        """Rotate ``value`` [T, heads, head_dim]: (a, b) -> (a cos - b sin, b cos + a sin) for the two rotary halves."""
        graph = self._graph
        cos, sin = self._tables.get(spec) or self._emit_tables(spec)
        half, rest = spec.rotary_dim // 2, head_dim - spec.rotary_dim
        sizes = [half, half] + [rest] * (rest > 0)
        first, second, *untouched = graph.split(value, sizes, f"{name}.halves", axis=2)

        def product(part: str, table: str, kind: str) -> str:
            return graph.op("Mul", [part, table], f"{name}.{kind}")

        turned = [
            graph.op("Sub", [product(first, cos, "a_cos"), product(second, sin, "b_sin")], f"{name}.a"),
            graph.op("Add", [product(second, cos, "b_cos"), product(first, sin, "a_sin")], f"{name}.b"),
        ]
        return graph.op("Concat", [*turned, *untouched], name, axis=2)

    def _emit_tables(self, spec: RopeSpec) -> tuple[str, str]:
        """Cosines and sines of every token, [T, 1, rotary_dim / 2], in the compute type."""
        graph, name = self._graph, f"rope.{len(self._tables)}"
        angles = rotation_angles(spec, self._max_seq_len)
        found = {
            kind: (function(angles) * spec.factor).astype(np.float32)
            for kind, function in (("cos", np.cos), ("sin", np.sin))
        }
        of_tokens = self._of_axes(spec, found, name) if spec.axes else self._of_places(spec, found, name)
        tables = []
        for kind, of_token in of_tokens.items():
            per_head = graph.op("Unsqueeze", [of_token, graph.constant([1])], f"{name}.{kind}.per_head")
            tables.append(graph.cast(per_head, graph.types.compute, f"{name}.{kind}"))
        self._tables[spec] = (tables[0], tables[1])
        return self._tables[spec]

    def _of_places(self, spec: RopeSpec, tables: Mapping[str, FloatArray], name: str) -> dict[str, str]:
        """The rows of ``tables`` at each token's place in its sequence."""
        graph = self._graph
        rows = graph.input("position_ids", DType.INT32, ["T"])
        if turns_long_texts(spec, self._max_seq_len):
            lengths = graph.input("token_seq_lens", DType.INT32, ["T"])
            is_long = graph.op("Greater", [lengths, graph.constant(spec.long_from, np.int32)], f"{name}.is_long")
            below = graph.op("Add", [rows, graph.constant(self._max_seq_len, np.int32)], f"{name}.below")
            rows = graph.op("Where", [is_long, below, rows], f"{name}.rows")
        return {
            kind: graph.op(
                "Gather", [graph.fp32(f"{name}.{kind}.table", table), rows], f"{name}.{kind}.of_token", axis=0
            )
            for kind, table in tables.items()
        }

    def _of_axes(self, spec: RopeSpec, tables: Mapping[str, FloatArray], name: str) -> dict[str, str]:
        """The rows of ``tables``, each column at the token's place on its axis."""
        graph, axes = self._graph, columns_of_axes(spec)
        order = np.argsort([column for columns in axes.values() for column in columns])
        found = {}
        for kind, table in tables.items():
            parts = []
            for axis, columns in axes.items():
                own = graph.fp32(f"{name}.{kind}.{axis}.table", np.ascontiguousarray(table[:, columns]))
                rows = graph.input(axis, DType.INT32, ["T"])
                parts.append(graph.op("Gather", [own, rows], f"{name}.{kind}.{axis}", axis=0))
            joined = graph.op("Concat", parts, f"{name}.{kind}.joined", axis=1)
            found[kind] = joined
            if (np.diff(order) != 1).any():
                found[kind] = graph.op("Gather", [joined, graph.constant(order)], f"{name}.{kind}.of_token", axis=1)
        return found


class ScoreBiases:
    """Masks and biases of the padded scores [B, heads, S, S], and the distances they are computed from."""

    def __init__(self, graph: GraphWriter, max_seq_len: int, *, partial_keys: bool) -> None:
        self._graph = graph
        self._max_seq_len = max_seq_len
        self._slots = "key_mask" if partial_keys else "slot_mask"
        self._shared: dict[object, str] = {}
        # Added for invisible keys; finite, so that no row of a softmax can be NaN.
        self._masked = -6e4 if graph.types.compute is DType.FP16 else -1e9

    def additive(self, spec: AttentionSpec, relative_bias: npt.NDArray[np.float32] | None) -> str:
        """All masks and biases as one additive tensor that broadcasts to the scores, empty slots included."""
        return self._once(
            ("additive", _key(spec)), lambda: self._combine(self._empty_slots(spec.image_windows), spec, relative_bias)
        )

    def without_empty_slots(self, spec: AttentionSpec, relative_bias: npt.NDArray[np.float32] | None) -> str:
        """Masks and biases without empty slots, which the attention op masks itself; boolean (True: visible) if
        possible."""
        if spec.alibi or relative_bias is not None:
            return self._once(("by position", _key(spec)), lambda: self._combine(None, spec, relative_bias))
        return self._once(("visible", spec.causal, spec.window), lambda: self._visible_4d(spec))

    def near_a_key(self, window: int) -> str:
        """BOOL [T, 1]: True if a token has a key in its ``window``. Keys are the first tokens of a sequence: for tokens
        after them the last key is the nearest."""
        return self._once(("near a key", window), lambda: self._emit_near_a_key(window))

    def distances(self, *, negated: bool = False) -> str:
        """Key position less query position, INT32 [S, S] (``negated``: query less key)."""
        return self._once(("distances", negated), lambda: self._emit_distances(negated))

    def disentangled_rows(self, spec: DisentangledSpec, *, by_key: bool) -> str:
        """The row of DeBERTa's table for each pair of slots, INT32 [query, key], or ``by_key`` [key, query]."""
        return self._once(("rows", spec, by_key), lambda: self._emit_rows(spec, by_key))

    def reached_rows(self, spec: DisentangledSpec, *, by_key: bool) -> str:
        """The same among the rows that some pair of slots has, as ``reached`` gives them."""
        return self._once(("reached rows", spec, by_key), lambda: self._emit_reached_rows(spec, by_key))

    def reached(self, table: str, spec: DisentangledSpec, name: str) -> str:
        """The rows of DeBERTa's ``table`` [heads, head_dim, rows] that some pair of slots has: few, of short texts."""
        bounds = [self._bound(spec, "Min", 0), self._bound(spec, "Max", 1)]
        return self._graph.op("Slice", [table, *bounds, self._graph.constant([2], np.int32)], name)

    def _bound(self, spec: DisentangledSpec, kind: str, more: int) -> str:
        """The least row of all pairs of slots, or one past the largest, INT32 [1]."""
        graph, name = self._graph, f"relative.{kind.lower()}"

        def emit() -> str:
            rows = self.disentangled_rows(spec, by_key=False)
            found = graph.op(f"Reduce{kind}", [rows, graph.constant([0, 1])], f"{name}.row", keepdims=0)
            counted = graph.op("Add", [found, graph.constant(more, np.int32)], f"{name}.bound")
            return graph.op("Reshape", [counted, graph.constant([1])], name)

        return self._once(("bound", spec, kind), emit)

    def _emit_reached_rows(self, spec: DisentangledSpec, by_key: bool) -> str:
        rows = self.disentangled_rows(spec, by_key=by_key)
        return self._graph.op("Sub", [rows, self._bound(spec, "Min", 0)], f"{rows}.reached")

    def _emit_near_a_key(self, window: int) -> str:
        graph, name = self._graph, f"near_a_key.{window}"
        positions = graph.input("position_ids", DType.INT32, ["T"])
        behind = graph.op("Sub", [positions, graph.input("token_key_lens", DType.INT32, ["T"])], f"{name}.behind")
        near = graph.op("Less", [behind, graph.constant(window, np.int32)], f"{name}.packed")
        return graph.op("Unsqueeze", [near, graph.constant([1])], name)

    def _emit_rows(self, spec: DisentangledSpec, by_key: bool) -> str:
        rows = disentangled_rows(spec, self._max_seq_len)
        table = self._graph.constant(rows, np.int32)
        name = "relative.by_key" if by_key else "relative.by_query"
        return self._by_distance(table, len(rows), self.distances(negated=not by_key), name)

    def _combine(self, slots: str | None, spec: AttentionSpec, relative_bias: npt.NDArray[np.float32] | None) -> str:
        graph, total, name = self._graph, slots, f"mask.{len(self._shared)}"
        if relative_bias is not None:
            total = self._sum(total, self._once("relative", lambda: self._relative(relative_bias)), f"{name}.relative")
        if spec.alibi:
            total = self._sum(total, self._once("alibi", lambda: self._alibi(spec.num_heads)), f"{name}.alibi")
        if spec.causal or spec.window is not None:
            zero, masked = self._number(0.0), self._number(self._masked)
            hidden = graph.op("Where", [self._visible(spec), zero, masked], f"{name}.hidden")
            total = hidden if total is None else graph.op("Min", [total, hidden], f"{name}.visible")
        assert total is not None
        return total

    def _sum(self, total: str | None, term: str, name: str) -> str:
        return term if total is None else self._graph.op("Add", [total, term], name)

    def _empty_slots(self, windows: Windows | None) -> str:
        return self._once(("empty slots", windows), lambda: self._emit_empty_slots(windows))

    def _emit_empty_slots(self, windows: Windows | None) -> str:
        """[B, 1, 1, S], or [W, 1, 1, V] of ``windows``: 0 where a slot holds a visible key."""
        graph, name = self._graph, "windows.mask" if windows else "mask"
        one, scale = graph.constant(1.0, np.float32), graph.constant(-self._masked, np.float32)
        dims: list[Dim] = ["W", "V"] if windows else ["B", "S"]
        slots = graph.input(windows.slot_mask if windows else self._slots, DType.FP32, dims)
        additive = graph.op("Mul", [graph.op("Sub", [slots, one], f"{name}.shifted"), scale], f"{name}.additive")
        return graph.cast(
            graph.op("Unsqueeze", [additive, graph.constant([1, 2])], f"{name}.slots"),
            graph.types.compute,
            f"{name}.bias",
        )

    def _visible(self, spec: AttentionSpec) -> str:
        """BOOL [S, S]: True if the query (row) may attend to the key (column)."""
        return self._once(("visible 2d", spec.causal, spec.window), lambda: self._emit_visible(spec))

    def _emit_visible(self, spec: AttentionSpec) -> str:
        graph, name = self._graph, f"visible.{'causal' if spec.causal else 'both'}.{spec.window}"
        parts = []
        if spec.causal:
            parts.append(graph.op("LessOrEqual", [self.distances(), graph.constant(0, np.int32)], f"{name}.not_later"))
        if spec.window is not None:
            away = graph.op("Abs", [self.distances()], f"{name}.away")
            parts.append(graph.op("LessOrEqual", [away, graph.constant(spec.window, np.int32)], f"{name}.near"))
        if not parts:  # all are visible, beside layers with a window
            away = graph.op("Abs", [self.distances()], f"{name}.away")
            parts.append(graph.op("GreaterOrEqual", [away, graph.constant(0, np.int32)], f"{name}.any"))
        return parts[0] if len(parts) == 1 else graph.op("And", parts, name)

    def _visible_4d(self, spec: AttentionSpec) -> str:
        visible = self._visible(spec)
        return self._graph.op("Unsqueeze", [visible, self._graph.constant([0, 1])], f"{visible}.4d")

    def _relative(self, table: npt.NDArray[np.float32]) -> str:
        """[1, heads, S, S] from ``table`` [rows, heads], one row per distance."""
        graph = self._graph
        stored = graph.vector(RELATIVE_BIAS, table)
        rows = self._by_distance(stored, len(table), self.distances(), "relative_bias.rows")
        by_head = graph.op("Transpose", [rows], "relative_bias.by_head", perm=[2, 0, 1])
        return graph.op("Unsqueeze", [by_head, graph.constant([0])], "relative_bias")

    def _alibi(self, num_heads: int) -> str:
        """[1, heads, S, S], multiplied in FP32: BF16 counts to 256."""
        graph = self._graph
        slopes = graph.fp32("alibi.slopes", -alibi_slopes(num_heads)[None, :, None, None])
        away = graph.cast(graph.op("Abs", [self.distances()], "alibi.away"), DType.FP32, "alibi.distance")
        return graph.cast(graph.op("Mul", [slopes, away], "alibi.fp32"), graph.types.compute, "alibi")

    def _by_distance(self, table: str, num_rows: int, distances: str, name: str) -> str:
        """The rows of ``table``, ``num_rows`` in all, at ``distances`` [S, S]; its middle row is distance 0, and its
        ends also serve farther distances."""
        graph, reach = self._graph, num_rows // 2
        shifted = graph.op("Add", [distances, graph.constant(reach, np.int32)], f"{name}.shifted")
        least, most = graph.constant(0, np.int32), graph.constant(num_rows - 1, np.int32)  # S has filler beyond it
        clipped = graph.op("Min", [graph.op("Max", [shifted, least], f"{name}.least"), most], f"{name}.clipped")
        return graph.op("Gather", [table, clipped], name, axis=0)

    def _emit_distances(self, negated: bool) -> str:
        graph = self._graph
        slots = graph.input("slot_ids", DType.INT32, ["S"])
        row = self._once("row", lambda: graph.op("Unsqueeze", [slots, graph.constant([0])], "slots.row"))
        column = self._once("column", lambda: graph.op("Unsqueeze", [slots, graph.constant([1])], "slots.column"))
        return graph.op("Sub", [column, row] if negated else [row, column], f"distances{'.negated' * negated}")

    def _number(self, value: float) -> str:
        return self._graph.constant(value, self._graph.types.compute.numpy)

    def _once(self, key: object, emit: Callable[[], str]) -> str:
        if key not in self._shared:
            self._shared[key] = emit()
        return self._shared[key]


def is_reordered(spec: AttentionSpec) -> bool:
    """True if components of queries and keys are not stored as the halves that rotate."""
    return spec.rope is not None and (spec.rope.interleaved or spec.rope.num_parts > 1)


def rows_for_halves(rows: npt.NDArray[np.float32], spec: AttentionSpec) -> npt.NDArray[np.float32]:
    """Rows of a projection [heads * head_dim, ...] reordered for rotation by halves, where neighbours rotate together,
    or parts of a head by halves of their own; or the weights of the norm behind it [head_dim].

    Scores stay the same, because queries and keys have the same order.
    """
    rope = spec.rope
    assert rope is not None
    order = np.arange(spec.head_dim)
    turned = order[: rope.rotary_dim]
    if rope.interleaved:
        assert spec.qk_norm is None, "its weights would have to be put in order too"
        turned = turned.reshape(-1, 2).T.ravel()
    else:
        turned = turned.reshape(rope.num_parts, 2, -1).transpose(1, 0, 2).ravel()
    order = np.concatenate([turned, order[rope.rotary_dim :]])
    by_head = rows.reshape(-1, spec.head_dim, *rows.shape[1:])
    ordered: npt.NDArray[np.float32] = by_head[:, order].reshape(rows.shape)
    return ordered


def _key(spec: AttentionSpec) -> tuple[object, ...]:
    return spec.causal, spec.window, spec.alibi, spec.relative_bias, spec.image_windows
