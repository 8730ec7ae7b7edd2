"""Metrics under text-embeddings-inference's names, so that existing dashboards, alerts and autoscalers keep working.

They are computed at scrape time from this server's own families. Names, types, labels and units are TEI's (its
``router/src/http/server.rs``, ``core/src/infer.rs``, ``core/src/queue.rs``): counters without ``_total``, seconds, no
label for the model. There are three differences: the stages of ``te_request_*`` are those of inputs, as in
``te_embed_*``, where TEI takes the mean over the inputs of a request; ``te_batch_next_*`` has no 0 for a look at an
empty queue; and ``te_request_failure`` counts by status: its ``batch_size`` is a body that is too large, where TEI's is
too many inputs, and it knows neither ``tokenization`` nor ``model_type``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple, TypeAlias

from prometheus_client.core import Metric

_METHODS = ("single", "batch")
_FAILURES = ("validation", "batch_size", "overloaded", "dropped", "inference")
_OF_STATUS = {413: "batch_size", 424: "inference", 429: "overloaded", 499: "dropped", 504: "dropped"}

# Times of inputs: the end of TEI's name, and our family.
_STAGES = {
    "duration": "bei_input_seconds",
    "tokenization_duration": "bei_tokenization_seconds",
    "queue_duration": "bei_queue_seconds",
    "inference_duration": "bei_inference_seconds",
}

Labels: TypeAlias = Mapping[str, str]
# The end of a sample's name, and its label, if it has one.
Key: TypeAlias = tuple[str, tuple[str, str] | None]


class AnsweredRequests(NamedTuple):
    """The number of requests to a model answered with ``status``. ``method``: TEI's term for one or several inputs;
    empty if the request was refused before its inputs were known."""

    method: str
    status: int
    num_requests: int


def te_exposition(
    families: Iterable[Metric],
    answered: Iterable[AnsweredRequests],
    routes: AbstractSet[str],
    embedders: AbstractSet[str],
) -> str:
    """Exposition text of our ``families`` under TEI's names. ``routes``: those that use a model. ``embedders``: models
    that embed; all others predict."""
    of = {family.name: family for family in families}
    models = {sample.labels["model"] for sample in of["bei_inputs"].samples}
    text = [
        *_requests(answered),
        *_histogram(
            "te_request_duration",
            of["bei_request_seconds"],
            lambda labels: labels["status"] == "200" and labels["route"] in routes,
        ),
        *_histogram("te_request_input_length", of["bei_sequence_tokens"]),
    ]
    for end in ("tokenization_duration", "queue_duration", "inference_duration"):
        text += _histogram(f"te_request_{end}", of[_STAGES[end]])
    for kind, names in (("embed", models & embedders), ("predict", models - embedders)):
        if names:
            text += _inputs(kind, of, names)
    text += _family("te_queue_size", "gauge", "bei_queue_sequences", _summed(of["bei_queue_sequences"]))
    text += _histogram("te_batch_next_size", of["bei_batch_sequences"])
    text += _histogram("te_batch_next_tokens", of["bei_batch_tokens"])
    return "".join(text)


def _requests(answered: Iterable[AnsweredRequests]) -> Iterator[str]:
    counts, successes, failures = (Counter(dict.fromkeys(names, 0)) for names in (_METHODS, _METHODS, _FAILURES))
    for method, status, number in answered:
        if method:
            counts[method] += number
        if status >= 400:
            failures[_OF_STATUS.get(status, "inference" if status >= 500 else "validation")] += number
        elif method:
            successes[method] += number
    for name, label, values in (
        ("count", "method", counts),
        ("success", "method", successes),
        ("failure", "err", failures),
    ):
        found: dict[Key, float] = {("", (label, value)): number for value, number in values.items()}
        yield from _family(f"te_request_{name}", "counter", "bei_requests_total", found)


def _inputs(kind: str, of: Mapping[str, Metric], models: AbstractSet[str]) -> Iterator[str]:
    def keep(labels: Labels) -> bool:
        return labels["model"] in models

    ours = "bei_inputs_inferred_total"
    ended = [sample for sample in of["bei_inputs_inferred"].samples if sample.name == ours and keep(sample.labels)]
    answered = sum(sample.value for sample in ended if sample.labels["outcome"] == "answered")
    for name, total in (("count", sum(sample.value for sample in ended)), ("success", answered)):
        yield from _family(f"te_{kind}_{name}", "counter", ours, {("", None): total})
    for end, family in _STAGES.items():
        yield from _histogram(f"te_{kind}_{end}", of[family], keep)


def _histogram(name: str, ours: Metric, keep: Callable[[Labels], bool] = lambda _: True) -> Iterator[str]:
    return _family(name, "histogram", ours.name, _summed(ours, keep))


def _summed(ours: Metric, keep: Callable[[Labels], bool] = lambda _: True) -> dict[Key, float]:
    """Sums over the series that ``keep`` selects: a value for each bucket, the count and the sum."""
    sums: dict[Key, float] = {}
    for sample in ours.samples:
        if keep(sample.labels):
            bound = sample.labels.get("le")
            key = sample.name[len(ours.name) :], None if bound is None else ("le", bound)
            sums[key] = sums.get(key, 0.0) + sample.value
    return sums


def _family(name: str, kind: str, ours: str, values: Mapping[Key, float]) -> Iterator[str]:
    """The lines of a family. prometheus_client's writer would add _total to the names of counters."""
    yield f"# HELP {name} text-embeddings-inference's name, made of {ours}\n# TYPE {name} {kind}\n"
    for (suffix, label), value in values.items():
        braced = "" if label is None else f'{{{label[0]}="{label[1]}"}}'
        yield f"{name}{suffix}{braced} {float(value)!r}\n"
