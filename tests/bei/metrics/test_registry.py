"""The metrics: every name once, labelled by model."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from bei.core import Limits
from bei.metrics.registry import Metrics, ModelMetrics
from bei.port import Lane, LaneStats, PortStats

LIMITS = Limits(max_num_tokens=64, max_batch_size=8, max_seq_len=16)
STATS = PortStats(
    lanes={"interactive": LaneStats(1, 10, 0.125), "bulk": LaneStats(5, 50, 0.5)},
    num_running=3,
    running_s=0.0,
    slowdown=1.0,
    interactive_share=0.0,
    is_alive=True,
    is_stalled=False,
    is_busy=True,
    last_step_s=0.0,
    step_cap_s=0.04,
    overtaking=1.0,
    device="a CPU",
    num_streams=1,
    unshared=None,
)


def stats() -> PortStats:
    return STATS


def _others() -> PortStats:
    return STATS


def _seven(lane: Lane) -> float:
    return 7.0


def _eight(lane: Lane) -> float:
    return 8.0


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """(name, label values...) -> value."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_gateways_find_what_waits_and_what_runs_under_vllm_s_names() -> None:
    metrics = Metrics()
    ModelMetrics(metrics, "first").watch(stats, LIMITS)
    ModelMetrics(metrics, "second").watch(stats, LIMITS)
    found = samples(metrics)
    for model in ("first", "second"):
        assert found["vllm:num_requests_waiting", model] == 6
        assert found["vllm:num_requests_running", model] == found["bei_running_sequences", model] == 3


def test_a_swap_that_is_refused_takes_its_gauges_back() -> None:
    metrics = Metrics()
    model = ModelMetrics(metrics, "first")
    model.watch(stats, LIMITS)
    model.watch_waits(_seven)
    before = {name: value for name, value in samples(metrics).items() if name[0].startswith("bei_")}
    model.watch(_others, replace(LIMITS, max_batch_size=LIMITS.max_batch_size + 1))
    model.watch_waits(_eight)
    assert samples(metrics)["bei_drain_seconds", "bulk", "first"] == 8
    model.forget(_others)
    model.forget_waits(_eight)
    assert before.items() <= samples(metrics).items()
    assert before["bei_drain_seconds", "bulk", "first"] == 7


def test_every_event_of_a_model_is_counted_under_its_name() -> None:
    metrics = Metrics()
    first, second = ModelMetrics(metrics, "first"), ModelMetrics(metrics, "second")
    first.accepted(3)
    second.accepted(1)
    first.truncated(2)
    first.inferred(5, 0)
    first.inferred(0, 2)
    first.tokenized("bulk", 3, 0.5)
    first.input_answers("interactive", 2, 0.25)
    first.watch(lambda: STATS, LIMITS)
    first.watch_waits(lambda lane: STATS.lanes[lane].cost_s * 2)
    waits: list[tuple[Lane, float]] = [("bulk", 0.001), ("bulk", 0.002), ("bulk", 0.5), ("bulk", 1.5)]
    first.batch([12, 7, 7, 7, 7], engine_s=0.02, predicted_s=0.01, waits=[*waits, ("interactive", 0.1)])
    first.shared(in_flight=2, cached=3)
    first.expired(4)
    first.batch_failed("exception")
    first.engine_restarted()
    values = samples(metrics)
    assert (values["bei_inputs_total", "first"], values["bei_inputs_total", "second"]) == (3, 1)
    assert values["bei_inputs_truncated_total", "first"] == 2
    for lane, waiting in STATS.lanes.items():
        found = [values[f"bei_queue_{what}", lane, "first"] for what in ("sequences", "tokens", "cost_seconds")]
        assert found == list(waiting)
        assert values["bei_drain_seconds", lane, "first"] == waiting.cost_s * 2
    assert values["bei_step_cap_seconds", "first"] == STATS.step_cap_s
    assert values["bei_batch_sequences_limit", "first"] == LIMITS.max_batch_size
    assert values["bei_batch_tokens_limit", "first"] == LIMITS.max_num_tokens
    assert (
        values["bei_inputs_inferred_total", "first", "answered"],
        values["bei_inputs_inferred_total", "first", "failed"],
    ) == (5, 2)
    assert values["bei_tokenization_seconds_sum", "bulk", "first"] == 1.5
    assert values["bei_input_seconds_count", "interactive", "first"] == 2
    assert values["bei_inference_seconds_count", "bulk", "first"] == 4
    assert values["bei_inference_seconds_sum", "interactive", "first"] == 0.02
    assert (values["bei_sequence_tokens_count", "first"], values["bei_sequence_tokens_sum", "first"]) == (5, 40)
    assert values["bei_engine_predicted_seconds_total", "first"] == 0.01
    assert values["bei_tokens_total", "first"] == 40
    assert (values["bei_batch_sequences_sum", "first"], values["bei_batch_tokens_sum", "first"]) == (5, 40)
    assert values["bei_attention_slots_total", "first"] == 60
    assert values["bei_step_cost_ratio_sum", "first"] == 2
    assert values["bei_engine_seconds_sum", "first"] == 0.02
    assert values["bei_queue_seconds_count", "bulk", "first"] == 4
    assert values["bei_queue_seconds_count", "interactive", "first"] == 1
    assert values["bei_queue_seconds_count", "bulk", "second"] == 0
    assert values["bei_sequences_shared_total", "flight", "first"] == 2
    assert values["bei_sequences_shared_total", "cache", "first"] == 3
    assert values["bei_sequences_expired_total", "first"] == 4
    assert values["bei_batch_failures_total", "exception", "first"] == 1
    assert values["bei_engine_restarts_total", "first"] == 1


def test_the_gauges_of_a_closed_model_are_0() -> None:
    metrics = Metrics()
    model = ModelMetrics(metrics, "first")
    model.watch(stats, LIMITS)
    model.forget(stats)
    values = samples(metrics)
    assert (values["bei_queue_tokens", "bulk", "first"], values["bei_step_cap_seconds", "first"]) == (0, 0)


def test_of_two_towers_the_longer_capped_step_is_told() -> None:
    """It was the text tower's alone, where the images' steps are longer."""
    metrics = Metrics()
    model = ModelMetrics(metrics, "first")
    model.watch(lambda: STATS._replace(step_cap_s=0.2), LIMITS)
    model.watch(stats, LIMITS)
    assert samples(metrics)["bei_step_cap_seconds", "first"] == 0.2


def test_what_waits_for_two_engines_of_one_model_is_summed_up_while_it_is_swapped() -> None:
    metrics = Metrics()
    former, new = ModelMetrics(metrics, "first"), ModelMetrics(metrics, "first")
    former.watch(stats, LIMITS)
    new.watch(lambda: STATS, LIMITS)
    values = samples(metrics)
    assert values["bei_queue_tokens", "bulk", "first"] == 2 * STATS.lanes["bulk"].num_tokens
    assert values["bei_step_cap_seconds", "first"] == STATS.step_cap_s
    former.forget(stats)
    assert samples(metrics)["bei_queue_tokens", "bulk", "first"] == STATS.lanes["bulk"].num_tokens


def test_only_the_artifact_that_is_served_now_is_named() -> None:
    metrics = Metrics()
    for digest in ("a" * 64, "b" * 64):
        metrics.artifact("first", digest)
    metrics.swap("first", "swapped")
    values = samples(metrics)
    assert {key[1:] for key in values if key[0] == "bei_artifact_info"} == {("b" * 64, "first")}
    results = {result: values["bei_swaps_total", "first", result] for result in ("swapped", "unchanged", "refused")}
    assert results == {"swapped": 1, "unchanged": 0, "refused": 0}
    assert values["bei_artifact_start_time_seconds", "first"] > 1e9


def test_a_port_is_asked_once_a_scrape() -> None:
    metrics, asked = Metrics(), 0

    def stats() -> PortStats:
        nonlocal asked
        asked += 1
        return STATS

    ModelMetrics(metrics, "first").watch(stats, LIMITS)
    metrics.render()
    assert asked == 1


def test_the_process_is_measured() -> None:
    values = samples(Metrics())
    assert values["process_resident_memory_bytes",] > 1_000_000
    assert values["process_cpu_seconds_total",] > 0


def test_two_servers_in_one_process_do_not_share_metrics() -> None:
    first, second = Metrics(), Metrics()
    first.requests.labels("/x", "200").inc()
    assert samples(first)["bei_requests_total", "/x", "200"] == 1
    assert not any(name.startswith("bei_requests_total") for name, *_ in samples(second))
