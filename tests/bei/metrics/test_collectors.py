"""Counters, and histograms of many values at once: the same text as prometheus_client's, except creation times."""

from __future__ import annotations

import threading

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from bei.metrics.collectors import Counter, Histogram

BOUNDS = (0.5, 1.0, 2.5, 16)


def lines(registry: CollectorRegistry) -> list[str]:
    text = generate_latest(registry).decode()
    return [line for line in text.splitlines() if "_created" not in line]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0.0, 0.5, 0.75, 1.0, 2.5, 3.0, 16.0, 17.0]))))
def test_histograms_are_written_as_prometheus_client_writes_them(values: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    one = Histogram("x_seconds", "Of x", ["name"], BOUNDS, ours)
    other = prometheus_client.Histogram("x_seconds", "Of x", ["name"], buckets=BOUNDS, registry=theirs)
    for name, value in values:
        one.labels(name).observe(value)
        other.labels(name).observe(value)
    assert lines(ours) == lines(theirs)


@given(st.lists(st.integers(0, 20), max_size=50))
def test_many_at_once_are_as_many_one_by_one(values: list[int]) -> None:
    one_by_one, at_once, weighted = (Histogram("x", "", [], BOUNDS, CollectorRegistry()).labels() for _ in range(3))
    for value in values:
        one_by_one.observe(value)
    at_once.observe_all(values)
    for value in set(values):
        weighted.observe(value, values.count(value))
    assert one_by_one.state() == at_once.state() == weighted.state()


def test_no_value_of_threads_is_lost() -> None:
    series = Histogram("x", "", [], BOUNDS, CollectorRegistry()).labels()

    def work() -> None:
        for _ in range(2_000):
            series.observe(1.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert series.state() == ([0, 8_000, 8_000, 8_000, 8_000], 8_000.0)


def test_a_name_is_given_once() -> None:
    registry = CollectorRegistry()
    Histogram("x", "", [], BOUNDS, registry)
    with pytest.raises(ValueError, match="x_sum"):
        prometheus_client.Gauge("x_sum", "", registry=registry)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0, 1, 7, 0.25]))))
def test_counters_are_written_as_prometheus_client_writes_them(values: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    one = Counter("x", "Of x", ["name"], ours)
    other = prometheus_client.Counter("x", "Of x", ["name"], registry=theirs)
    for name, amount in values:
        one.labels(name).inc(amount)
        other.labels(name).inc(amount)
    assert lines(ours) == lines(theirs)


def test_a_label_that_was_asked_for_is_there_before_it_counts() -> None:
    registry = CollectorRegistry()
    Counter("x", "Of x", ["name"], registry).labels("a")
    assert 'x_total{name="a"} 0.0' in generate_latest(registry).decode()


def test_no_count_of_threads_is_lost() -> None:
    count = Counter("x", "", [], CollectorRegistry()).labels()

    def work() -> None:
        for _ in range(2_000):
            count.inc()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count.value == 8_000
