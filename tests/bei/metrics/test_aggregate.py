"""Aggregated metrics of several processes equal those of one process, and no counter decreases."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from bei.metrics.aggregate import GAUGES, Snapshot, counts_of_ended, merge_snapshots
from bei.metrics.registry import Metrics, ModelMetrics
from bei.port import LANES
from tests.bei.metrics.test_registry import LIMITS, STATS
from tests.support.scraped import scraped

ROUTES = ("/embed", "/health")
# Of the process that is asked, or of the moment.
OF_THE_MOMENT = re.compile("process_|bei_process_up")


def new_metrics() -> Metrics:
    metrics = Metrics()
    metrics.model_routes = frozenset(ROUTES[:1])
    return metrics


def happen(metrics: Metrics, event: tuple[Any, ...]) -> None:
    what, model, lane, number = event
    of_model = ModelMetrics(metrics, model, is_embedder=model == "a")
    if what == "request":
        metrics.request(ROUTES[number % 2], 200 + 229 * (number % 3 == 0), number / 8, model, lane, number)
        metrics.key_request(model, 200)
    elif what == "inputs":
        of_model.accepted(number)
        of_model.inferred(number, 1)
        of_model.tokenized(lane, number, number / 4)
    else:
        of_model.batch([number, 1], engine_s=number / 16, predicted_s=0.5, waits=[(lane, number / 2)])
        of_model.shared(number, 1)


EVENTS = st.tuples(
    st.sampled_from(["request", "inputs", "step"]), st.sampled_from("ab"), st.sampled_from(LANES), st.integers(1, 40)
)


def samples(text: bytes) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if not OF_THE_MOMENT.match(sample.name)
    }


def enumerate_names(answers: tuple[bytes, ...]) -> list[tuple[str, bytes]]:
    return [(f"front-{index}", answer) for index, answer in enumerate(answers)]


def counted(*answers: bytes) -> dict[tuple[Any, ...], float]:
    """Every sample of what ``answers`` say together, but gauges."""
    return {
        sample[:2]: sample[2]
        for family in merge_snapshots(answers).families
        if family.name not in GAUGES and not family.name.startswith("process_")
        for sample in family.samples
    }


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 2), EVENTS), max_size=20))
def test_processes_say_together_what_one_would_have_counted(events: list[tuple[int, tuple[Any, ...]]]) -> None:
    alone, parts = new_metrics(), [new_metrics() for _ in range(3)]
    for process, event in events:
        happen(alone, event)
        happen(parts[process], event)
    first, second, third = (part.snapshot() for part in parts)
    found = counted(first, second, third)
    assert found == counted(alone.snapshot())
    assert {*merge_snapshots([first, second, third]).answered} == {*merge_snapshots([alone.snapshot()]).answered}
    # However they are grouped, ended or not.
    assert counted(counts_of_ended([counts_of_ended([third]), second]), first) == found


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["dies", "is silent", "works"]), EVENTS), max_size=12))
def test_no_counter_falls_whoever_dies_or_does_not_answer(steps: list[tuple[int, str, tuple[Any, ...]]]) -> None:
    """As the supervisor does it: of each process either its answer counts or what was kept of it, once."""
    living, gone = [new_metrics(), new_metrics()], counts_of_ended([])
    kept = [metrics.snapshot() for metrics in living]
    before: dict[tuple[Any, ...], float] = {}
    for process, what, event in steps:
        happen(living[process], event)
        if what == "dies":  # what it had counted since it was asked last is lost
            gone = counts_of_ended([gone, kept[process]])
            living[process] = new_metrics()
        fresh = {index: metrics.snapshot() for index, metrics in enumerate(living)}
        last = []
        if what == "is silent":
            last = [kept[process]]
            del fresh[process]
        now = counted(*fresh.values(), counts_of_ended([gone, *last]))
        assert all(now.get(name, -1.0) >= value for name, value in before.items())
        before = now
        kept = [fresh.get(index, one) for index, one in enumerate(kept)]


def test_text_embeddings_inference_s_names_are_made_of_the_sums() -> None:
    alone, parts = new_metrics(), [new_metrics(), new_metrics()]
    for number in range(12):
        event = (("request", "inputs", "step")[number % 3], "ab"[number % 2], LANES[number // 6], number + 1)
        happen(alone, event)
        happen(parts[number % 2], event)
    text = parts[0].render_server(dict(enumerate_names(tuple(part.snapshot() for part in parts))), (), ())
    found = samples(text)
    assert {name: value for name, value in found.items() if name[0].startswith("te_")}
    assert found == samples(alone.render())


def test_gauges_are_put_together_by_their_rules() -> None:
    first, second, engine = new_metrics(), new_metrics(), new_metrics()
    for number, metrics in enumerate((first, second)):
        model = ModelMetrics(metrics, "a")
        model.watch(lambda: STATS, LIMITS)
        model.watch_waits(lambda lane, number=number: 1.5 + number)  # type: ignore[misc]
    first.artifact("a", "1" * 64)
    second.artifact("a", "2" * 64)  # the first has not yet swapped it
    second.artifact_start.labels("a").set(5e9)
    text = first.render_server(dict(enumerate_names((first.snapshot(), second.snapshot(), engine.snapshot()))), (), ())
    found = samples(text)
    assert found["bei_queue_tokens", "a", "bulk"] == STATS.lanes["bulk"].num_tokens  # of one queue, which both know
    assert found["bei_drain_seconds", "a", "bulk"] == 2.5
    assert found["bei_batch_tokens_limit", "a"] == LIMITS.max_num_tokens
    assert {name[1] for name in found if name[0] == "bei_artifact_info"} == {"1" * 64, "2" * 64}
    assert found["bei_artifact_start_time_seconds", "a"] < 2e9
    alone = {family.name: family.samples[0].value for family in engine.registry.collect() if family.samples}
    families = text_string_to_metric_families(text.decode())
    summed = {family.name: family.samples[0].value for family in families if family.samples}
    assert summed["process_resident_memory_bytes"] > 2.5 * alone["process_resident_memory_bytes"]
    assert summed["process_max_fds"] == 3 * alone["process_max_fds"]
    assert summed["process_start_time_seconds"] == alone["process_start_time_seconds"]


def test_of_a_process_that_has_ended_no_gauge_counts() -> None:
    metrics = new_metrics()
    metrics.artifact("a", "1" * 64)
    kept = counts_of_ended([metrics.snapshot()])
    assert {family.kind for family in merge_snapshots([kept]).families} == {"counter", "histogram"}
    assert "process_cpu_seconds" in {family.name for family in merge_snapshots([kept]).families}


def test_there_is_a_rule_for_every_gauge_and_no_other() -> None:
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", scraped(), re.M))
    gauges = {name for name, kind in kinds.items() if kind == "gauge"}
    assert gauges - {"bei_process_up", "te_queue_size"} == GAUGES.keys()  # which are made afterwards
    assert set(kinds.values()) == {"counter", "histogram", "gauge"}


def test_nothing_together_is_nothing() -> None:
    assert merge_snapshots([]) == Snapshot([])


def test_who_has_answered_and_who_has_not_is_said() -> None:
    metrics = new_metrics()
    text = metrics.render_server({"front-0": metrics.snapshot()}, ["front-0"], ["front-1"]).decode()
    assert 'bei_process_up{process="front-0"} 1.0' in text
    assert 'bei_process_up{process="front-1"} 0.0' in text
    assert 'bei_process_up{process="server"} 1.0' in metrics.render().decode()
