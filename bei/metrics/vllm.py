"""Metrics under vLLM's names, by which gateways schedule (Gateway API Inference Extension, "Model Server Protocol").

References: github.com/kubernetes-sigs/gateway-api-inference-extension, docs/proposals/003-model-server-protocol;
vLLM's ``vllm/v1/metrics/loggers.py``. vLLM counts an input of an embedding request as a request, as these do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

_MADE_OF = {
    "vllm:num_requests_waiting": ("bei_queue_sequences", "Sequences waiting"),
    "vllm:num_requests_running": ("bei_running_sequences", "Sequences of running steps"),
}


def vllm_families(families: Iterable[Metric]) -> Iterator[Metric]:
    """Gauges by model, made of our own ``families``."""
    of = {family.name: family for family in families}
    for name, (own, text) in _MADE_OF.items():
        counts: Counter[str] = Counter()
        for sample in of[own].samples:
            counts[sample.labels["model"]] += int(sample.value)
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        for model, count in counts.items():
            family.add_metric([model], count)
        yield family
