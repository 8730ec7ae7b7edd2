"""The fuzz itself: it finds what it is for, every target reads its seeds, and a few inputs break nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import faulty
from tests.fuzz.runner import run
from tests.fuzz.targets import TARGETS
from tests.fuzz.trial import NUM_FIRST, try_one

FAULTY = "tests.fuzz.faulty"


@pytest.mark.parametrize(
    ("target", "what"),
    [
        ("foreign", "ZeroDivisionError: division by zero"),
        ("severe", "_SevereError: it broke off"),
        ("unprintable", "a message that cannot be printed"),
        ("crash", "the process ended with SIGSEGV"),
        ("leave", "the process ended with code 7"),
        ("hang", "no end after 1 s"),
    ],
)
def test_a_broken_rule_is_found_and_the_inputs_behind_it_are_tried(target: str, what: str) -> None:
    num_inputs = 4 if target in ("crash", "leave", "hang") else 8  # a process that begins anew counts from 0
    outcome = run(target, num_inputs, 0, hang_s=1.0, table=FAULTY)
    (found,) = outcome.findings
    assert what in found.what
    assert found.number == faulty.BROKEN
    assert outcome.num_inputs == num_inputs
    assert outcome.num_refused >= num_inputs - 1


def test_a_process_that_ended_is_started_again_behind_its_input() -> None:
    outcome = run("leave", 10, 0, table=FAULTY)
    assert [found.number for found in outcome.findings] == [3, 7]  # its fourth input each
    assert outcome.num_refused == 8


def test_an_input_that_takes_all_memory_is_found() -> None:
    outcome = run("allocate", NUM_FIRST + 8, 0, table=FAULTY)
    (found,) = outcome.findings
    assert (found.what, found.number) == ("MemoryError: ", NUM_FIRST + faulty.BROKEN)


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    outcome = run("good", 300, 0, table=FAULTY)
    assert outcome.findings == []
    assert (outcome.num_inputs, outcome.num_refused) == (300, 300)


def test_a_target_that_cannot_begin_is_no_success() -> None:
    with pytest.raises(RuntimeError, match="no seed"):
        run("unready", 8, 0, table=FAULTY)


# Of those that import PyTorch, or start a command.
FEW = {
    "TLS": 10,
    "tokenizer settings": 10,
    "sentencepiece": 5,
    "whole checkpoint": 10,
    "config.json": 20,
    "gliner_config.json": 20,
}


@pytest.mark.parametrize("target", TARGETS)
def test_some_inputs_of_every_target_are_refused_and_none_breaks_a_rule(target: str, tmp_path: Path) -> None:
    trial = TARGETS[target].make(tmp_path)
    results = [try_one(trial, 0, number) for number in range(FEW.get(target, 40))]
    assert [found for _, found in results if found is not None] == []
    if target != "cost cache":  # which counts as missing
        assert any(was_refused for was_refused, _ in results)
    assert not all(was_refused for was_refused, _ in results)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_many_inputs_of_every_target(target: str) -> None:
    assert run(target, 20 * TARGETS[target].share, 1).findings == []
