"""The arena: whatever is taken and given back, nothing overlaps, the bound is kept, everything is free in the end."""

from __future__ import annotations

import threading
import time

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bei.core import EngineInfo, Limits
from bei.multiprocess.shared_memory.arena import Arena, FreeRanges, bound_of
from bei.multiprocess.shared_memory.segment import place_of

_SEGMENT = 16 << 10
_BOUND = 5 * _SEGMENT
_sizes = st.integers(1, 3 * _SEGMENT)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 10)), max_size=60))
def test_free_ranges_never_give_a_byte_twice_and_join_again(steps: list[tuple[int, int]]) -> None:
    """Each step takes so many bytes, or, where there is no room, gives back one of the ranges that were taken."""
    ranges = FreeRanges(128)
    taken: list[tuple[int, int]] = []
    for size, which in steps:
        start = ranges.take(size)
        if start is not None:
            assert 0 <= start <= 128 - size
            assert all(start + size <= other or other + width <= start for other, width in taken)
            taken.append((start, size))
        elif taken:
            ranges.give(*taken.pop(which % len(taken)))
    assert ranges.is_whole == (not taken)
    for start, size in taken:
        ranges.give(start, size)
    assert ranges.is_whole
    assert ranges.take(128) == 0


class ArenaLaws(RuleBasedStateMachine):
    """Blocks are filled with a number of their own: who writes into another's is found."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(_BOUND, _SEGMENT)
        self.blocks: dict[int, npt.NDArray[np.uint8]] = {}
        self.number = 0
        self.now_s = time.monotonic()

    @rule(size=_sizes)
    def take(self, size: int) -> None:
        block = self.arena.block(size)
        if block is not None:
            assert block.shape == (size,)
            self.number = (self.number + 1) % 256
            block[:] = self.number
            self.blocks[self.number] = block

    @rule(which=st.integers(0, 20), keeps_a_view=st.booleans())
    def give(self, which: int, keeps_a_view: bool) -> None:
        if self.blocks:
            number = list(self.blocks)[which % len(self.blocks)]
            block = self.blocks.pop(number)
            if keeps_a_view:  # all of the block is kept for it
                self.blocks[number] = block[len(block) // 2 :].view(np.int8).view(np.uint8)

    @rule()
    def time_passes(self) -> None:
        self.now_s += 4.0
        self.arena.trim(self.now_s)

    @invariant()
    def nothing_overlaps(self) -> None:
        for number, block in self.blocks.items():
            assert (block == number).all()
            assert place_of(block) is not None

    @invariant()
    def the_bound_is_kept(self) -> None:
        assert self.arena.num_bytes <= _BOUND

    def teardown(self) -> None:
        """Everything comes back, and is given back to the system."""
        self.blocks.clear()
        self.arena.trim(self.now_s)
        whole = self.arena.block(_BOUND)
        assert whole is not None
        del whole
        self.arena.trim(self.now_s)
        self.arena.trim(self.now_s + 3600)
        assert self.arena.num_bytes == 0


TestArenaLaws = ArenaLaws.TestCase
TestArenaLaws.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_what_is_larger_than_a_segment_gets_one_of_its_size() -> None:
    arena = Arena(_BOUND, _SEGMENT)
    block = arena.block(3 * _SEGMENT)
    assert block is not None
    assert arena.num_bytes == 3 * _SEGMENT


def test_what_is_larger_than_the_bound_is_refused_at_once() -> None:
    began_s = time.monotonic()
    assert Arena(_BOUND, _SEGMENT).block(_BOUND + 1, wait_s=30.0) is None
    assert time.monotonic() - began_s < 10


def test_a_full_arena_waits_for_what_comes_back_and_not_for_ever() -> None:
    arena = Arena(_SEGMENT, _SEGMENT)
    held = [arena.block(_SEGMENT)]
    assert arena.block(1, wait_s=0.01) is None
    timer = threading.Timer(0.02, held.clear)
    timer.start()
    assert arena.block(_SEGMENT, wait_s=30.0) is not None


def test_the_bound_holds_some_of_the_largest_steps() -> None:
    limits = Limits(max_num_tokens=16_384, max_batch_size=256, max_seq_len=8192)
    tokens = EngineInfo("fake", "fp32", "none", limits, {"token": 1024, "embedding": 8}, frozenset({"token"}))
    assert bound_of(tokens) == 4 * (16_384 * 1024 * 4 + 256 * 8 * 4)
    assert bound_of(EngineInfo("fake", "fp32", "none", limits, {"embedding": 8})) == 256 << 20
