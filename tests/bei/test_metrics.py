"""The metrics: every name once, labelled by model."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from bei.metrics import Metrics, ModelMetrics


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """(name, label values...) -> value."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_every_event_of_a_model_is_counted_under_its_name() -> None:
    metrics = Metrics()
    first, second = ModelMetrics(metrics, "first"), ModelMetrics(metrics, "second")
    first.accepted(3)
    second.accepted(1)
    first.truncated(2)
    first.queue(num_sequences=5, num_tokens=50)
    first.batch(size=4, num_tokens=40, engine_s=0.02, waits_s=[0.001, 0.002, 0.5, 1.5])
    values = samples(metrics)
    assert (values["bei_inputs_total", "first"], values["bei_inputs_total", "second"]) == (3, 1)
    assert values["bei_inputs_truncated_total", "first"] == 2
    assert (values["bei_queue_sequences", "first"], values["bei_queue_tokens", "first"]) == (5, 50)
    assert values["bei_tokens_total", "first"] == 40
    assert (values["bei_batch_sequences_sum", "first"], values["bei_batch_tokens_sum", "first"]) == (4, 40)
    assert values["bei_engine_seconds_sum", "first"] == 0.02
    assert values["bei_queue_seconds_count", "first"] == 4
    assert values["bei_queue_seconds_bucket", "0.5", "first"] == 3
    assert values["bei_queue_seconds_count", "second"] == 0


def test_two_servers_in_one_process_do_not_share_metrics() -> None:
    first, second = Metrics(), Metrics()
    first.requests.labels("/x", "200").inc()
    assert samples(first)["bei_requests_total", "/x", "200"] == 1
    assert not any(name.startswith("bei_requests_total") for name, *_ in samples(second))
