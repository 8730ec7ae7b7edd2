"""The memory that processes share: cells, places of names, and locks that outlive nobody."""

from __future__ import annotations

import os
import signal
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.errors import ConfigError
from bei.multiprocess.shared_memory import limits_page as module
from bei.multiprocess.shared_memory.limits_page import ANSWER_BYTES, BODY_BYTES, NUM_OPEN, OF_MODEL
from tests.bei.multiprocess.pages import Other, pages
from tests.support.engines import DEADLINE_S


def test_each_front_end_reads_what_the_others_have_written() -> None:
    with pages(3) as (_, *fronts):
        for cell, front in enumerate(fronts):
            front.write(BODY_BYTES, 10**cell)
            front.write(NUM_OPEN, -(2**62))
        assert [front.of_others(BODY_BYTES) for front in fronts] == [[10, 100], [1, 100], [1, 10]]
        assert [front.read(BODY_BYTES) for front in fronts] == [1, 10, 100]
        assert fronts[0].of_others(NUM_OPEN) == [-(2**62)] * 2
        assert fronts[0].of_others(ANSWER_BYTES) == [0, 0]


def test_of_a_dead_front_end_nothing_is_left_and_of_the_others_everything() -> None:
    with pages(3) as (supervisor, *fronts):
        words = [*range(8 + 2 * OF_MODEL)]
        for front in fronts:
            for word in words:
                front.write(word, 7)
        supervisor.clear(1)
        for word in words:
            assert supervisor.of_others(word) == [7, 0, 7]


_NAMES = st.tuples(st.integers(0, 2), st.sampled_from("abcdefgh"), st.sampled_from(["requests", "tokens"]))


@given(st.lists(_NAMES, max_size=30))
def test_a_name_has_one_place_whoever_asks_and_no_two_names_have_the_same(asked: list[tuple[int, str, str]]) -> None:
    with pages(3) as (_, *fronts):
        found: dict[tuple[str, str], set[int]] = {}
        for front, name, what in asked:
            found.setdefault((name, what), set()).add(fronts[front].word_of_bucket(name, what))
        assert all(len(places) == 1 for places in found.values())
        assert len(set.union(set(), *found.values())) == len(found)


def test_more_names_than_there_are_places_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pages(1) as (_, front):
        monkeypatch.setattr(module, "_MOST_BUCKETS", 2)
        front.word_of_bucket("a", "requests")
        front.word_of_bucket("a", "tokens")
        with pytest.raises(ConfigError, match="restart the server"):
            front.word_of_bucket("b", "tokens")


def test_only_pages_that_are_used_take_memory() -> None:
    with pages(8) as (supervisor, *fronts):
        for number in range(50):
            fronts[0].word_of_bucket(str(number), "requests")
        assert os.fstat(supervisor.fileno()).st_size > 30_000_000
        assert os.fstat(supervisor.fileno()).st_blocks * 512 < 1_000_000


def test_a_word_is_read_whole_while_another_process_writes_it() -> None:
    writes = f"say('')\nwhile True:\n    page.write({BODY_BYTES}, -1)\n    page.write({BODY_BYTES}, 0)\n"
    with pages(2) as (_, front, _), Other(front, writes, cell=1) as other:
        other.hear()
        until_s, seen = time.monotonic() + 0.3, set[int]()
        while time.monotonic() < until_s or (len(seen) < 2 and time.monotonic() < until_s + DEADLINE_S):
            seen.update(front.of_others(BODY_BYTES))
        assert seen == {-1, 0}


LOCKS = "say(page.lock(10_000))\nwait()\npage.unlock(10_000)\nsay('free')\nwait()\n"


def test_a_lock_keeps_out_processes_that_have_the_same_descriptor_until_it_is_given_back() -> None:
    with pages(1) as (_, front), Other(front, LOCKS) as other:
        assert other.hear() == "True"
        assert not front.lock(10_000)
        assert front.lock(10_001)  # another word's
        other.go_on()
        other.hear()
        assert front.lock(10_000)


def test_a_process_that_is_killed_keeps_no_lock() -> None:
    with pages(1) as (_, front), Other(front, LOCKS) as other:
        other.hear()
        assert not front.lock(10_000)
        other.kill()
        assert front.lock(10_000)


def test_where_a_process_that_does_not_run_has_the_names_a_new_one_is_refused() -> None:
    with pages(1) as (_, front), Other(front, "page.lock(page._first_bucket)\nsay('')\nwait()\n") as other:
        other.hear()
        other.process.send_signal(signal.SIGSTOP)
        with pytest.raises(ConfigError, match="does not run: restart"):
            front.word_of_bucket("a", "requests")
