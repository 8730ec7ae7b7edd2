"""Every metric name in one place (Prometheus). docs/reference.md lists them; a test holds the two together."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class Metrics:
    """All collectors of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def histogram(name: str, text: str, labels: Seq[str], buckets: Seq[float]) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

        self.requests = Counter(
            "bei_requests", "HTTP requests answered, by route and status", ["route", "status"], registry=self.registry
        )
        self.request_seconds = histogram(
            "bei_request_seconds", "From the request's headers to its answer", ["route"], _SECONDS
        )
        self.inputs = Counter("bei_inputs", "Inputs accepted", ["model"], registry=self.registry)
        self.truncated = Counter(
            "bei_inputs_truncated",
            "Inputs cut to what the model, its side or the request takes",
            ["model"],
            registry=self.registry,
        )
        self.tokens = Counter("bei_tokens", "Tokens the engine has run", ["model"], registry=self.registry)
        self.queue_sequences = Gauge("bei_queue_sequences", "Sequences waiting", ["model"], registry=self.registry)
        self.queue_tokens = Gauge("bei_queue_tokens", "Tokens waiting", ["model"], registry=self.registry)
        self.queue_seconds = histogram("bei_queue_seconds", "Wait of a sequence for its batch", ["model"], _SECONDS)
        self.engine_seconds = histogram("bei_engine_seconds", "Run of a batch", ["model"], _SECONDS)
        self.batch_sequences = histogram("bei_batch_sequences", "Sequences of a batch", ["model"], _SIZES)
        self.batch_tokens = histogram("bei_batch_tokens", "Tokens of a batch", ["model"], _TOKENS)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)


class ModelMetrics:
    """The collectors of one model, label already bound."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._inputs = metrics.inputs.labels(model)
        self._truncated = metrics.truncated.labels(model)
        self._tokens = metrics.tokens.labels(model)
        self._queue_sequences = metrics.queue_sequences.labels(model)
        self._queue_tokens = metrics.queue_tokens.labels(model)
        self._queue_seconds = metrics.queue_seconds.labels(model)
        self._engine_seconds = metrics.engine_seconds.labels(model)
        self._batch_sequences = metrics.batch_sequences.labels(model)
        self._batch_tokens = metrics.batch_tokens.labels(model)

    def accepted(self, num_inputs: int) -> None:
        """A request was admitted."""
        self._inputs.inc(num_inputs)

    def truncated(self, num_inputs: int) -> None:
        """Inputs were cut."""
        self._truncated.inc(num_inputs)

    def queue(self, num_sequences: int, num_tokens: int) -> None:
        """The queue has changed."""
        self._queue_sequences.set(num_sequences)
        self._queue_tokens.set(num_tokens)

    def batch(self, size: int, num_tokens: int, engine_s: float, waits_s: Seq[float]) -> None:
        """A batch has run."""
        self._tokens.inc(num_tokens)
        self._engine_seconds.observe(engine_s)
        self._batch_sequences.observe(size)
        self._batch_tokens.observe(num_tokens)
        for wait_s in waits_s:
            self._queue_seconds.observe(wait_s)
