"""What a process that has ended leaves to the next one: the inputs that it ran, and no others."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.core import Encoding, Limits, PackedBatch
from bei.multiprocess.shared_memory import crash_ledger as ledgers
from bei.multiprocess.shared_memory.crash_ledger import GUILTY, Ledger
from tests.support.engines import ids

LIMITS = Limits(max_num_tokens=32, max_batch_size=8, max_seq_len=16)

a_batch = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4), min_size=1, max_size=8, unique_by=tuple)


def batch_of(*sequences: Sequence[int]) -> PackedBatch:
    return PackedBatch.from_encodings([Encoding(ids(*sequence)) for sequence in sequences])


def next_process(made: Ledger) -> Ledger:
    """As the process before it has ended, wherever it was."""
    return Ledger.attach(os.dup(made.fileno()))


def num_ended(ledger: Ledger, batch: PackedBatch, name: str = "tiny") -> list[int]:
    region = ledger.region(name, LIMITS, 1)
    return [ledger.num_ended(digest) for digest in region.digests(batch)]


@pytest.fixture
def made() -> Iterator[Ledger]:
    ledger = Ledger.create()
    yield ledger
    ledger.close()


@given(running=a_batch, over=a_batch, other=a_batch)
def test_only_what_ran_at_the_end_is_suspected(
    running: list[list[int]], over: list[list[int]], other: list[list[int]]
) -> None:
    made = Ledger.create()
    first = next_process(made)
    assert not first.has_found_steps
    region = first.region("tiny", LIMITS, 2)
    region.slots[0].begin(batch_of(*over))
    region.slots[0].end()
    region.slots[1].begin(batch_of(*over))  # a longer step before leaves nothing of it behind
    region.slots[1].begin(batch_of(*running))
    second = next_process(made)
    assert second.has_found_steps
    for sequence in [*running, *over, *other]:
        assert num_ended(second, batch_of(sequence)) == [int(sequence in running)]
    assert num_ended(second, batch_of(*running), "another model") == [0] * len(running)
    for ledger in (first, second, made):
        ledger.close()


def test_ends_are_counted_over_processes_until_the_input_was_run(made: Ledger) -> None:
    for count in (1, 2, 3):
        ledger = next_process(made)
        for name, sequence in (("tiny", [7]), ("other", [8])):
            region = ledger.region(name, LIMITS, 1)
            region.slots[0].begin(batch_of(sequence))
        ledger = next_process(made)
        assert num_ended(ledger, batch_of([7])) == [count]
        assert num_ended(ledger, batch_of([8]), "other") == [count]
    (digest,) = ledger.region("tiny", LIMITS, 1).digests(batch_of([7]))
    ledger.acquit(digest)
    ledger.acquit(digest)
    for now in (ledger, next_process(made)):
        assert num_ended(now, batch_of([7])) == [0]
        assert num_ended(now, batch_of([8]), "other") == [3]
    assert not now.has_found_steps


def test_nothing_is_suspected_for_ever(made: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    for _ in range(GUILTY):
        next_process(made).region("tiny", LIMITS, 1).slots[0].begin(batch_of([1]))
    ledger = next_process(made)
    ledger.region("tiny", LIMITS, 1).slots[0].begin(batch_of([2]))
    ledger = next_process(made)
    now_s += ledgers._GUILTY_S
    assert num_ended(ledger, batch_of([1], [2])) == [GUILTY, 1]
    now_s += 0.001
    assert num_ended(ledger, batch_of([1], [2])) == [0, 1]
    now_s = 1000.0 + ledgers._SUSPECTED_S + 0.001
    assert ledger.has_suspects
    assert num_ended(ledger, batch_of([1], [2])) == [0, 0]
    assert not ledger.has_suspects


def test_of_too_many_suspects_the_latest_are_kept(made: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "_MOST_SUSPECTS", 3)
    for first in (1, 3):
        next_process(made).region("tiny", LIMITS, 1).slots[0].begin(batch_of([first], [first + 1]))
    for ledger in (next_process(made), next_process(made)):
        found = num_ended(ledger, batch_of([1], [2], [3], [4]))
        assert found[2:] == [1, 1]
        assert sorted(found[:2]) == [0, 1]


def test_regions_that_are_given_back_are_used_again(made: Ledger) -> None:
    ledger = next_process(made)
    region = ledger.region("tiny", LIMITS, 2)
    num_bytes = os.fstat(made.fileno()).st_size
    ledger.give_back(region)
    again = ledger.region("other", LIMITS, 2)
    assert os.fstat(made.fileno()).st_size == num_bytes
    again.slots[1].begin(batch_of([1], [2]))
    another = ledger.region("tiny", LIMITS, 2)
    assert os.fstat(made.fileno()).st_size > num_bytes
    another.slots[0].begin(batch_of([3]))
    found = next_process(made)
    assert num_ended(found, batch_of([1], [2], [3])) == [0, 0, 1]
    assert num_ended(found, batch_of([1], [2], [3]), "other") == [1, 1, 0]


def test_a_process_that_ends_while_it_opens_an_engine_leaves_what_runs_on_the_others(made: Ledger) -> None:
    ledger = next_process(made)
    ledger.region("tiny", LIMITS, 1).slots[0].begin(batch_of([1]))
    os.ftruncate(made.fileno(), os.fstat(made.fileno()).st_size + 4096)
    assert num_ended(next_process(made), batch_of([1])) == [1]


def test_other_memory_is_refused() -> None:
    descriptor = os.memfd_create("other")
    os.ftruncate(descriptor, 1 << 20)
    with pytest.raises(ValueError, match="not the memory in which steps are noted"):
        Ledger.attach(descriptor)
    os.close(descriptor)
