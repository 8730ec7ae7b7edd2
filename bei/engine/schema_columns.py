"""Labels of schemas, as inputs of graphs that score spans for them (GLiNER2).

A schema has parts. Token types mark a part's own token (``PART``, with the number of instances that are asked for) and
its labels behind it. A sequence's columns are, part by part, those of the part's count, then the labels of its first
instance, of its second, and so on. A sequence without a schema (measurements, canaries) has one column, of its first
token.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bei.core import Int32Array, PackedBatch
from bei.engine.words import LABEL, PART, Bucket, instances_of, kinds_of

COUNT_SLOTS = "count_slots_"
NAMES = frozenset(
    {
        *("label_tokens", "repeated_labels", "further_instances", "part_tokens"),
        *("column_rows", "column_labels", "group_columns", "column_places", "column_slots"),
    }
)


def count_slots(width: int) -> str:
    """The name in ``graph_inputs`` of the slots of counts, where a part's count has ``width`` columns.

    The width is a part of the name, so that the graph carries it.
    """
    return f"{COUNT_SLOTS}{width}"


def count_columns(num_counts: int, max_width: int) -> int:
    """Columns of ``max_width`` numbers that hold the scores of ``num_counts`` counts."""
    return -(-num_counts // max_width)


class _Parts(NamedTuple):
    """Of all parts of a batch: their tokens, sequences, numbers of instances, and whether they have a count; and the
    tokens of all labels with the parts of these."""

    tokens: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.int64]
    instances: npt.NDArray[np.int64]
    counted: npt.NDArray[np.bool_]
    labels: npt.NDArray[np.int64]
    part_of: npt.NDArray[np.int64]


def schema_inputs(batch: PackedBatch, names: Collection[str], num_rows: int, bucket: Bucket) -> dict[str, Int32Array]:
    """With bucketed numbers of N labels, R labels of several instances, I further instances, G parts, A groups (a part
    in an instance) of up to M labels, Q labels in instances, and C columns of a sequence, int32:

    - ``label_tokens`` [N], ``part_tokens`` [G]: packed positions.
    - ``repeated_labels`` [R]: places among the N labels. ``further_instances`` [I]: 1, 2, 3, ...
    - ``column_rows`` [Q]: the row of a label in an instance among N rows of the first and I * R further ones;
      ``column_labels`` [Q]: the place of the label among N.
    - ``group_columns`` [A, M]: the places among Q of a group's labels; behind the last one, repeated.
    - ``column_places`` [Q]: the place of each in a flat [A * M].
    - ``column_slots`` [B', C]: the place among Q of each column of a sequence; 0 of columns of counts. Behind the last
      one, repeated.
    - ``count_slots_P`` [B', C]: for columns of counts 1 more than the place in a flat [G * P]; 0 for labels.
    """
    parts = _parts(batch)
    counts = np.bincount(parts.part_of, minlength=len(parts.tokens))
    is_repeated = parts.instances[parts.part_of] > 1
    repeated = np.flatnonzero(is_repeated)
    num_labels, num_repeated = bucket(len(parts.labels)), bucket(max(1, len(repeated)))
    further = np.arange(1, max(2, int(parts.instances.max())), dtype=np.int32)

    groups = np.repeat(np.arange(len(counts)), parts.instances)  # the part of each group
    instances = _ranks(parts.instances)
    sizes = counts[groups]
    of_groups = np.repeat(np.arange(len(groups)), sizes)
    ranks = _ranks(sizes)
    first_labels = np.cumsum(counts) - counts
    labels = first_labels[groups[of_groups]] + ranks
    instance = instances[of_groups]
    places = np.cumsum(is_repeated) - 1  # of labels among the repeated ones
    rows = np.where(instance == 0, labels, num_labels + (instance - 1) * num_repeated + places[labels])

    most = bucket(int(counts.max()))
    num_groups, num_columns = bucket(len(groups)), bucket(len(labels))
    firsts = np.cumsum(sizes) - sizes
    group_columns = np.zeros((num_groups, most), np.int32)
    group_columns[: len(groups)] = firsts[:, None] + np.minimum(np.arange(most), sizes[:, None] - 1)

    name = next(name for name in names if name.startswith(COUNT_SLOTS))
    per_count = int(name.removeprefix(COUNT_SLOTS))
    column_slots, counted_slots = _slots(parts, counts * parts.instances, per_count, num_rows, bucket)
    return {
        "label_tokens": _filled(parts.labels, num_labels),
        "part_tokens": _filled(parts.tokens, bucket(len(parts.tokens))),
        "repeated_labels": _filled(repeated, num_repeated),
        "further_instances": further,
        "column_rows": _filled(rows, num_columns),
        "column_labels": _filled(labels, num_columns),
        "group_columns": group_columns,
        "column_places": _filled(of_groups * most + ranks, num_columns),
        "column_slots": column_slots,
        name: counted_slots,
    }


def _parts(batch: PackedBatch) -> _Parts:
    starts, lengths = batch.cu_seqlens[:-1].astype(np.int64), np.diff(batch.cu_seqlens)
    types = batch.token_type_ids
    if types is None:
        every = np.arange(len(starts))
        ones = np.ones(len(starts), np.int64)
        return _Parts(starts, every, ones, np.zeros(len(starts), np.bool_), starts, every)
    sequences = np.repeat(np.arange(len(starts)), lengths)
    kinds = kinds_of(types)
    own = np.flatnonzero(kinds == PART)
    bare = np.delete(starts, sequences[own])  # sequences without a schema
    tokens = np.sort(np.concatenate([own, bare]))
    labels = np.sort(np.concatenate([np.flatnonzero(kinds == LABEL), bare]))
    counted = kinds[tokens] == PART
    instances = np.where(counted, np.maximum(1, instances_of(types[tokens])), 1)
    part_of = np.searchsorted(tokens, labels, side="right") - 1
    return _Parts(tokens, sequences[tokens], instances.astype(np.int64), counted, labels, part_of)


def _slots(
    parts: _Parts, widths: npt.NDArray[np.int64], per_count: int, num_rows: int, bucket: Bucket
) -> tuple[Int32Array, Int32Array]:
    """``column_slots`` and ``count_slots_P``. ``widths``: columns of each part beside those of its count."""
    of_counts = per_count * parts.counted
    starts = np.cumsum(of_counts + widths) - (of_counts + widths)
    total = int((of_counts + widths).sum())
    columns, counted = np.zeros((2, total), np.int32)
    columns[np.repeat(starts + of_counts, widths) + _ranks(widths)] = np.arange(widths.sum())
    own = np.repeat(starts, of_counts) + _ranks(of_counts)
    counted[own] = 1 + np.repeat(np.arange(len(starts)) * per_count, of_counts) + _ranks(of_counts)
    lengths = np.bincount(parts.sequences, of_counts + widths, num_rows).astype(np.int64)
    firsts = np.cumsum(lengths) - lengths
    places = np.arange(bucket(int(lengths.max())))
    found = firsts[:, None] + np.minimum(places, np.maximum(lengths - 1, 0)[:, None])
    found = np.minimum(found, total - 1)  # of rows without a sequence
    return columns[found], counted[found]


def _ranks(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0, 1, ... for each of ``counts``, one after the other."""
    ends = np.cumsum(counts)
    ranks: npt.NDArray[np.int64] = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return ranks


def _filled(values: npt.NDArray[np.int64], size: int) -> Int32Array:
    found = np.zeros(size, np.int32)
    found[: len(values)] = values
    return found
