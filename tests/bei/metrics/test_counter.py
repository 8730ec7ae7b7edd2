"""Cheap counters: the same text as prometheus_client's, except creation times."""

from __future__ import annotations

import threading

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from bei.metrics.counter import Counter


def lines(registry: CollectorRegistry) -> list[str]:
    text = generate_latest(registry).decode()
    return [line for line in text.splitlines() if "_created" not in line]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0, 1, 7, 0.25]))))
def test_what_is_written_is_what_prometheus_client_writes(values: list[tuple[str, float]]) -> None:
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


def test_threads_lose_nothing() -> None:
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
