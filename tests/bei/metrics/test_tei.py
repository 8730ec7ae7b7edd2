"""Metrics under text-embeddings-inference's names: its dashboards find them, with the values of ours."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bei.core import Limits
from bei.metrics.registry import Metrics, ModelMetrics
from bei.port import Lane
from tests.bei.metrics.test_registry import STATS

STAGES = ("duration", "tokenization_duration", "queue_duration", "inference_duration")
# Metrics of TEI 1.9 (router/src/prometheus.rs, router/src/http/server.rs, core/src), with types and labels.
OF_TEI = {
    "te_request_count": ("counter", {"method"}),
    "te_request_success": ("counter", {"method"}),
    "te_request_failure": ("counter", {"err"}),
    **{f"te_request_{stage}": ("histogram", set()) for stage in STAGES},
    "te_request_input_length": ("histogram", set()),
    **{f"te_{kind}_{name}": ("counter", set()) for kind in ("embed", "predict") for name in ("count", "success")},
    **{f"te_{kind}_{stage}": ("histogram", set()) for kind in ("embed", "predict") for stage in STAGES},
    "te_queue_size": ("gauge", set()),
    "te_batch_next_size": ("histogram", set()),
    "te_batch_next_tokens": ("histogram", set()),
}


@pytest.fixture
def metrics() -> Metrics:
    """Of a server with two embedders and a reranker, after some traffic."""
    metrics = Metrics()
    metrics.model_routes = frozenset({"/embed", "/rerank"})
    for name, is_embedder, factor in (("a", True, 1), ("b", True, 2), ("c", False, 4)):
        model = ModelMetrics(metrics, name, is_embedder=is_embedder)
        model.watch(lambda: STATS, Limits(512, 16, 512))
        model.inferred(10 * factor, factor)
        lane: Lane
        for lane in ("interactive", "bulk"):
            model.tokenized(lane, 5 * factor, 0.001)
            model.input_answers(lane, 5 * factor, 0.5)
        waits: list[tuple[Lane, float]] = [("bulk", 0.125) for _ in range(10 * factor)]
        model.batch([4] * 10 * factor, engine_s=0.25, predicted_s=0.25, waits=waits)
    for status, num_inputs in (
        (200, 1),
        (200, 1),
        (200, 8),
        (429, 1),
        (503, 3),
        (413, 0),
        (499, 2),
        (504, 1),
        (422, 0),
        (424, 1),
    ):
        metrics.request("/embed", status, 0.75, "a", "bulk", num_inputs)
    metrics.request("/tokenize", 200, 0.5, "a", "bulk", 1)  # asks no engine
    metrics.request("/health", 200, 0.5, None, None, 0)
    return metrics


def te_lines(metrics: Metrics) -> dict[str, float]:
    """Samples as they are written: name and labels -> value."""
    text = metrics.render().decode()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[:3] == "te_"}


def test_every_name_of_tei_s_is_there_with_its_type_and_labels(metrics: Metrics) -> None:
    text = metrics.render().decode()
    types = dict(re.findall(r"^# TYPE (te_\w+) (\w+)$", text, re.M))
    assert types == {name: kind for name, (kind, _) in OF_TEI.items()}
    for name, (kind, labels) in OF_TEI.items():
        suffixes = ("_bucket", "_count", "_sum") if kind == "histogram" else ("",)
        for suffix in suffixes:
            found = re.findall(rf"^{name}{suffix}({{.*}})? [\d.e+]+$", text, re.M)
            assert found, name
            wanted = labels | {"le"} if suffix == "_bucket" else labels
            assert {frozenset(re.findall(r'(\w+)="', one)) for one in found} == {frozenset(wanted)}, name


def test_requests_are_counted_by_tei_s_words(metrics: Metrics) -> None:
    found = te_lines(metrics)
    assert {name: value for name, value in found.items() if name.startswith(("te_request_c", "te_request_s"))} == {
        'te_request_count{method="single"}': 5,  # two answered, 429, 504, 424
        'te_request_count{method="batch"}': 3,  # one answered, 503, 499
        'te_request_success{method="single"}': 2,
        'te_request_success{method="batch"}': 1,
    }
    assert {name: value for name, value in found.items() if "failure" in name} == {
        'te_request_failure{err="validation"}': 1,
        'te_request_failure{err="batch_size"}': 1,
        'te_request_failure{err="overloaded"}': 1,
        'te_request_failure{err="dropped"}': 2,
        'te_request_failure{err="inference"}': 2,
    }
    assert (found["te_request_duration_count"], found["te_request_duration_sum"]) == (3, 2.25)


def test_inputs_of_embedders_and_of_the_others_are_summed_over_models_and_lanes(metrics: Metrics) -> None:
    found = te_lines(metrics)
    assert (found["te_embed_count"], found["te_embed_success"]) == (33, 30)
    assert (found["te_predict_count"], found["te_predict_success"]) == (44, 40)
    for kind, inputs in (("embed", 30), ("predict", 40), ("request", 70)):
        assert found[f"te_{kind}_tokenization_duration_sum"] == pytest.approx(inputs * 0.001)
        assert found[f"te_{kind}_queue_duration_count"] == inputs
        assert found[f"te_{kind}_inference_duration_sum"] == inputs * 0.25
        assert found[f'te_{kind}_inference_duration_bucket{{le="0.1"}}'] == 0
        assert found[f'te_{kind}_inference_duration_bucket{{le="0.25"}}'] == inputs
    assert found["te_embed_duration_sum"] == 30 * 0.5
    assert found["te_queue_size"] == 3 * sum(lane.num_sequences for lane in STATS.lanes.values())
    assert (found["te_batch_next_size_count"], found["te_batch_next_size_sum"]) == (3, 70)
    assert (found["te_batch_next_tokens_sum"], found["te_request_input_length_sum"]) == (280, 280)
    assert found["te_request_input_length_count"] == 70


def test_buckets_grow_up_to_all_of_them(metrics: Metrics) -> None:
    for family in text_string_to_metric_families(metrics.render().decode()):
        if family.type == "histogram" and family.name.startswith("te_"):
            buckets = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
            count = next(sample.value for sample in family.samples if sample.name.endswith("_count"))
            assert buckets == sorted(buckets)
            assert buckets[-1] == count


def test_a_server_that_only_predicts_has_no_names_of_embedding() -> None:
    metrics = Metrics()
    ModelMetrics(metrics, "c", is_embedder=False)
    found = te_lines(metrics)
    assert "te_predict_count" in found
    assert not any(name.startswith("te_embed") for name in found)
