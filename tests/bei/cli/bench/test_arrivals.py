"""Loads from their flags, and their division among workers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bei.cli.bench.arrivals import LoadPlan, WorkerShare, check_words, load_of
from bei.errors import ConfigError

DEFAULTS = {"rate": None, "concurrency": None, "inputs": "1", "words": "20"}


def test_a_load_is_a_name_and_settings_over_the_flags() -> None:
    load = load_of("bulk: concurrency=4, inputs=32,words=lognormal:58:0.85,lane=bulk,max-connections=7", DEFAULTS)
    assert load == LoadPlan(
        "bulk", concurrency=4, inputs="32", words="lognormal:58:0.85", lane="bulk", max_connections=7
    )
    assert load_of("one", DEFAULTS) == LoadPlan("one")
    assert load_of("one:rate=2.5", {**DEFAULTS, "concurrency": 3}) == LoadPlan("one", rate=2.5)
    assert load_of("one:inputs=2", {**DEFAULTS, "concurrency": 3}) == LoadPlan("one", concurrency=3, inputs="2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x:rate", "KEY=VALUE"),
        ("x:speed=3", "one of the keys rate, concurrency"),
        ("x:rate=1,rate=2", "twice"),
        ("x:rate=fast", "rate must be a number"),
        ("x:rate=0", "above 0"),
        ("x:rate=nan", "above 0"),
        ("x:concurrency=0", "from 1 to"),
        ("x:rate=1,concurrency=1", "give one"),
        ("x:arrivals=never", "poisson or constant"),
        ("x:lane=fast", "interactive or bulk"),
        ("x:words=0", "Load x: words"),
        ("a name:rate=1", "letters"),
        (":rate=1", "letters"),
    ],
)
def test_what_is_no_load_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_of(text, DEFAULTS)


def test_generated_texts_must_be_long_enough_to_differ() -> None:
    check_words(LoadPlan("x", words="3", query_words="lognormal:2:1"))
    for load in (LoadPlan("x", words="2"), LoadPlan("x", query_words="uniform:1:9")):
        with pytest.raises(ConfigError, match="at least 3 words"):
            check_words(load)


@given(count=st.integers(0, 500), num_workers=st.integers(1, 16))
def test_workers_share_connections_evenly(count: int, num_workers: int) -> None:
    shares = [WorkerShare(worker, num_workers).of(count) for worker in range(num_workers)]
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1


@given(rate=st.floats(1, 500), num_workers=st.integers(1, 5))
def test_constant_arrivals_are_evenly_spaced_however_many_workers_make_them(rate: float, num_workers: int) -> None:
    load = LoadPlan("x", rate=rate, arrivals="constant")
    due = sorted(at for worker in range(num_workers) for at in WorkerShare(worker, num_workers).arrivals(load, 2.0, 0))
    np.testing.assert_allclose(due, np.arange(len(due)) / rate)
    assert len(due) == pytest.approx(rate * 2, abs=1)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_poisson_arrivals_are_of_the_rate_and_know_nothing_of_each_other(num_workers: int) -> None:
    load = LoadPlan("x", rate=50.0)
    due = np.sort([at for w in range(num_workers) for at in WorkerShare(w, num_workers).arrivals(load, 100.0, 3)])
    assert 4_700 < len(due) < 5_300
    gaps = np.diff(due)
    assert 0.93 < gaps.std() / gaps.mean() < 1.07  # exponential
    assert due[0] > 0
    assert due[-1] < 100
    again = list(WorkerShare(0, num_workers).arrivals(load, 100.0, 3))
    assert again == list(WorkerShare(0, num_workers).arrivals(load, 100.0, 3))
    assert again != list(WorkerShare(0, num_workers).arrivals(load, 100.0, 4))


def test_loads_are_named_for_people() -> None:
    assert LoadPlan("x", concurrency=4, inputs="32").shape == "closed loop, 4 at once; 32 inputs of 20 words"
    assert LoadPlan("x", rate=2.5, lane="bulk").shape.startswith("open loop, 2.5 requests/s, poisson;")
    assert LoadPlan("x").is_swept
