"""What a process that has ended leaves to the next one: the inputs that it ran, and no others."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.core import Encoding, PackedBatch
from bei.multiprocess.remote import recorded_engine
from bei.multiprocess.remote.recorded_engine import GUILTY, StepRecords, digests_of, salt_of
from tests.support.engines import ids

a_batch = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4), min_size=1, max_size=8, unique_by=tuple)


def batch_of(*sequences: Sequence[int]) -> PackedBatch:
    return PackedBatch.from_encodings([Encoding(ids(*sequence)) for sequence in sequences])


def next_process(made: StepRecords) -> StepRecords:
    """As the process before it has ended, wherever it was."""
    return StepRecords.attach(os.dup(made.fileno()))


def num_ended(records: StepRecords, batch: PackedBatch, name: str = "tiny") -> list[int]:
    return [records.num_ended(digest) for digest in digests_of(batch, salt_of(name))]


def begin(records: StepRecords, *sequences: Sequence[int], name: str = "tiny") -> int:
    """Its slot."""
    return records.begin(batch_of(*sequences), salt_of(name))


@pytest.fixture
def made() -> Iterator[StepRecords]:
    records = StepRecords.create()
    yield records
    records.close()


@given(running=a_batch, over=a_batch, other=a_batch)
def test_only_what_ran_at_the_end_is_suspected(
    running: list[list[int]], over: list[list[int]], other: list[list[int]]
) -> None:
    made = StepRecords.create()
    first = next_process(made)
    assert not first.has_found_steps
    slot = begin(first, *over)  # a longer step before leaves nothing of it behind
    first.end(slot)
    assert begin(first, *running) == slot
    second = next_process(made)
    assert second.has_found_steps
    for sequence in [*running, *over, *other]:
        assert num_ended(second, batch_of(sequence)) == [int(sequence in running)]
    assert num_ended(second, batch_of(*running), "another model") == [0] * len(running)
    for records in (first, second, made):
        records.close()


def test_ends_are_counted_over_processes_until_the_input_was_run(made: StepRecords) -> None:
    for count in (1, 2, 3):
        records = next_process(made)
        begin(records, [7])
        begin(records, [8], name="other")
        records = next_process(made)
        assert num_ended(records, batch_of([7])) == [count]
        assert num_ended(records, batch_of([8]), "other") == [count]
    (digest,) = digests_of(batch_of([7]), salt_of("tiny"))
    records.acquit(digest)
    records.acquit(digest)
    for now in (records, next_process(made)):
        assert num_ended(now, batch_of([7])) == [0]
        assert num_ended(now, batch_of([8]), "other") == [3]
    assert not now.has_found_steps


def test_an_input_that_ran_in_two_steps_at_once_has_ended_one_process(made: StepRecords) -> None:
    records = next_process(made)
    begin(records, [7], [8])
    begin(records, [7])
    assert num_ended(next_process(made), batch_of([7], [8])) == [1, 1]


def test_nothing_is_suspected_for_ever(made: StepRecords, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    for _ in range(GUILTY):
        begin(next_process(made), [1])
    begin(next_process(made), [2])
    records = next_process(made)
    now_s += recorded_engine._GUILTY_S
    assert num_ended(records, batch_of([1], [2])) == [GUILTY, 1]
    now_s += 0.001
    assert num_ended(records, batch_of([1], [2])) == [0, 1]
    now_s = 1000.0 + recorded_engine._SUSPECTED_S + 0.001
    assert records.has_suspects
    assert num_ended(records, batch_of([1], [2])) == [0, 0]
    assert not records.has_suspects


def test_of_too_many_suspects_the_latest_are_kept(made: StepRecords, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_engine, "_MOST_SUSPECTS", 3)
    for first in (1, 3):
        begin(next_process(made), [first], [first + 1])
    for records in (next_process(made), next_process(made)):
        found = num_ended(records, batch_of([1], [2], [3], [4]))
        assert found[2:] == [1, 1]
        assert sorted(found[:2]) == [0, 1]


def test_slots_are_used_again(made: StepRecords) -> None:
    records = next_process(made)
    slot = begin(records, [5])
    size = os.fstat(made.fileno()).st_size
    records.end(slot)
    assert begin(records, [1], name="other") == slot
    assert os.fstat(made.fileno()).st_size < size + 1000
    begin(records, [3])
    found = next_process(made)
    assert num_ended(found, batch_of([1], [3])) == [0, 1]
    assert num_ended(found, batch_of([1], [3]), "other") == [1, 0]


def test_suspects_that_were_half_written_are_forgotten_and_what_ran_is_not(made: StepRecords) -> None:
    begin(next_process(made), [1])
    begin(next_process(made), [2])
    os.pwrite(made.fileno(), b"\xff" * 64, 8)
    assert num_ended(next_process(made), batch_of([1], [2])) == [0, 1]


@pytest.mark.parametrize("later", [1_000, 100_000])
def test_a_step_that_needs_more_memory_than_those_before_is_recorded_whole(later: int, made: StepRecords) -> None:
    records, long = next_process(made), [*range(later)]
    records.end(begin(records, [5]))
    records.end(begin(records, long))
    records.end(begin(records, [5]))
    assert not next_process(made).has_found_steps
    begin(records, [6], long)
    assert num_ended(next_process(made), batch_of([5], [6], long)) == [0, 1, 1]


def test_without_memory_for_its_record_a_step_fails_and_holds_up_no_other(
    made: StepRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is not there would end the process as it is written to."""

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    records, long = next_process(made), [*range(5_000)]
    records.end(begin(records, [5]))
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                begin(records, long)
        slot = begin(records, [5])  # in what is there
        with pytest.raises(OSError, match="No space left"):
            begin(records, [7])
    records.end(slot)
    assert records._num_running == 0  # or a step alone would wait for ever
    records.begin(batch_of(long), salt_of("tiny"), alone=True)
    assert num_ended(next_process(made), batch_of([5], [7], long)) == [0, 0, 1]
