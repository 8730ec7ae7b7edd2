"""Columns of schemas: each leads to its label in its instance, or to its part's count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.core import PackedBatch
from bei.engine.packing import graph_inputs
from bei.engine.schema_columns import NAMES, count_columns, count_slots
from bei.engine.words import LABEL, OTHER, WORD, part_type

PER_COUNT = 3
# Of a sequence its parts, each with its instances and its labels; none: it has no schema.
_SEQUENCES = st.lists(st.lists(st.tuples(st.integers(1, 19), st.integers(1, 5)), max_size=4), min_size=1, max_size=5)


def batch_of(sequences: list[list[tuple[int, int]]]) -> PackedBatch:
    """The text of each is two words behind its parts."""
    types, lengths = list[int](), list[int]()
    for parts in sequences:
        own = [kind for most, count in parts for kind in (OTHER, part_type(most), OTHER, *[LABEL, OTHER] * count)]
        types += [*own, OTHER, WORD, WORD]
        lengths.append(len(own) + 3)
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    return PackedBatch(np.ones(len(types), np.int32), cu_seqlens, np.array(types, np.int32))


@given(sequences=_SEQUENCES)
def test_each_column_is_of_its_label_and_instance_or_of_its_count(sequences: list[list[tuple[int, int]]]) -> None:
    batch = batch_of(sequences)
    types = batch.token_type_ids
    assert types is not None
    name = count_slots(PER_COUNT)
    found = graph_inputs(batch, [*sorted(NAMES), name, "seq_lens"])
    num_labels, num_repeated = len(found["label_tokens"]), len(found["repeated_labels"])
    for place, parts in enumerate(sequences):
        start, stop = batch.cu_seqlens[place : place + 2]
        tokens = np.arange(start, stop)
        own = tokens[types[start:stop] % 4 == 3]
        labels = iter(tokens[types[start:stop] % 4 == LABEL].tolist())
        expected: list[tuple[str, int, int]] = []
        for token, (most, count) in zip(own.tolist(), parts, strict=True):
            expected += [("count", token, index) for index in range(PER_COUNT)]
            asked = [next(labels) for _ in range(count)]
            expected += [("label", label, instance) for instance in range(most) for label in asked]
        for column, wanted in enumerate(expected or [("label", int(start), 0)]):
            counted = int(found[name][place, column])
            if counted:
                part, index = divmod(counted - 1, PER_COUNT)
                assert ("count", found["part_tokens"][part], index) == wanted
                continue
            slot = int(found["column_slots"][place, column])
            label, row = int(found["column_labels"][slot]), int(found["column_rows"][slot])
            instance = 0
            if row >= num_labels:
                instance, repeated = divmod(row - num_labels, num_repeated)
                instance = int(found["further_instances"][instance])
                assert found["repeated_labels"][repeated] == label
            else:
                assert row == label
            assert ("label", found["label_tokens"][label], instance) == wanted
            group, rank = divmod(int(found["column_places"][slot]), found["group_columns"].shape[1])
            assert found["group_columns"][group, rank] == slot


@given(sequences=_SEQUENCES)
def test_a_group_holds_the_labels_of_one_part_in_one_instance(sequences: list[list[tuple[int, int]]]) -> None:
    batch = batch_of(sequences)
    found = graph_inputs(batch, [*sorted(NAMES), count_slots(PER_COUNT), "seq_lens"])
    sizes = [count for parts in sequences for most, count in parts or [(1, 1)] for _ in range(most)]
    place = 0
    for group, count in enumerate(sizes):
        columns = found["group_columns"][group]
        assert columns[:count].tolist() == list(range(place, place + count))
        assert set(columns[count:]) <= {place + count - 1}
        place += count


def test_without_token_types_the_first_token_of_a_sequence_is_its_only_label() -> None:
    batch = PackedBatch(np.ones(5, np.int32), np.array([0, 2, 5], np.int32))
    found = graph_inputs(batch, [*sorted(NAMES), count_slots(PER_COUNT), "seq_lens"])
    assert found["label_tokens"][:2].tolist() == [0, 2]
    assert found["column_slots"][:2, 0].tolist() == [0, 1]
    assert not found[count_slots(PER_COUNT)].any()


@pytest.mark.parametrize(("width", "columns"), [(1, 20), (8, 3), (12, 2), (20, 1), (64, 1)])
def test_counts_have_as_many_columns_as_they_fill(width: int, columns: int) -> None:
    assert count_columns(20, width) == columns
