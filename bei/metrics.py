"""Every metric name in one place (Prometheus). docs/reference.md lists them; a test holds the two together."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from bei.port import LANES, Lane, PortStats
from bei.recent import RecentRequests, RecentSteps

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_RATIOS = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
_TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class Metrics:
    """All collectors of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.recent = RecentRequests()

        def histogram(name: str, text: str, labels: Seq[str], buckets: Seq[float]) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

        lane = ["model", "lane"]
        self.requests = Counter(
            "bei_requests", "HTTP requests answered, by route and status", ["route", "status"], registry=self.registry
        )
        self.request_seconds = histogram(
            "bei_request_seconds", "From the request's headers to its answer", ["route"], _SECONDS
        )
        self._by_route: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self.key_requests = Counter(
            "bei_key_requests",
            "HTTP requests with an API key, by its name and status",
            ["key", "status"],
            registry=self.registry,
        )
        self._by_key: dict[tuple[str, int], Counter] = {}
        self.inputs = Counter("bei_inputs", "Inputs accepted", ["model"], registry=self.registry)
        self.truncated = Counter(
            "bei_inputs_truncated",
            "Inputs cut to what the model, its side or the request takes",
            ["model"],
            registry=self.registry,
        )
        self.tokens = Counter("bei_tokens", "Tokens the engine has run", ["model"], registry=self.registry)
        self.queue_sequences = Gauge("bei_queue_sequences", "Sequences waiting", lane, registry=self.registry)
        self.queue_tokens = Gauge("bei_queue_tokens", "Tokens waiting", lane, registry=self.registry)
        self.queue_cost = Gauge(
            "bei_queue_cost_seconds",
            "Predicted engine seconds of waiting work",
            lane,
            registry=self.registry,
        )
        self.step_cap = Gauge(
            "bei_step_cap_seconds",
            "The longest step of bulk work beside interactive work",
            ["model"],
            registry=self.registry,
        )
        self.queue_seconds = histogram("bei_queue_seconds", "Wait of a sequence for its step", lane, _SECONDS)
        self.engine_seconds = histogram("bei_engine_seconds", "Run of a step", ["model"], _SECONDS)
        self.step_cost_ratio = histogram(
            "bei_step_cost_ratio", "Seconds of a step over what was predicted", ["model"], _RATIOS
        )
        self.batch_sequences = histogram("bei_batch_sequences", "Sequences of a step", ["model"], _SIZES)
        self.batch_tokens = histogram("bei_batch_tokens", "Tokens of a step", ["model"], _TOKENS)
        self.slots = Counter(
            "bei_attention_slots",
            "Sequences of a step times its longest",
            ["model"],
            registry=self.registry,
        )
        self.shared = Counter(
            "bei_sequences_shared",
            "Sequences that were not computed: equal to one in flight, or in the cache",
            ["model", "from"],
            registry=self.registry,
        )
        self.expired = Counter(
            "bei_sequences_expired",
            "Sequences dropped at their deadline",
            ["model"],
            registry=self.registry,
        )
        self.batch_failures = Counter(
            "bei_batch_failures", "Runs of the engine that failed, by kind", ["model", "kind"], registry=self.registry
        )
        self.engine_restarts = Counter(
            "bei_engine_restarts", "Engines given up because a step did not end", ["model"], registry=self.registry
        )

    def request(self, route: str, status: int, seconds: float, lane: Lane | None = None) -> None:
        """An HTTP request was answered; ``lane`` None: it had none. On the event loop."""
        self.recent.add(lane, status, seconds)
        collectors = self._by_route.get((route, status))
        if collectors is None:  # finding a label costs as much as counting
            collectors = self.requests.labels(route, str(status)), self.request_seconds.labels(route)
            self._by_route[route, status] = collectors
        collectors[0].inc()
        collectors[1].observe(seconds)

    def key_request(self, label: str, status: int) -> None:
        """An HTTP request with the API key of the name ``label`` was answered."""
        counter = self._by_key.get((label, status))
        if counter is None:
            counter = self._by_key[label, status] = self.key_requests.labels(label, str(status))
        counter.inc()

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)


class ModelMetrics:
    """The collectors of one model, label already bound."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.recent = RecentSteps()
        self._metrics = metrics
        self._model = model
        self._inputs = metrics.inputs.labels(model)
        self._truncated = metrics.truncated.labels(model)
        self._tokens = metrics.tokens.labels(model)
        self._queue_seconds = {lane: metrics.queue_seconds.labels(model, lane) for lane in LANES}
        self._engine_seconds = metrics.engine_seconds.labels(model)
        self._step_cost_ratio = metrics.step_cost_ratio.labels(model)
        self._batch_sequences = metrics.batch_sequences.labels(model)
        self._batch_tokens = metrics.batch_tokens.labels(model)
        self._slots = metrics.slots.labels(model)
        self._in_flight = metrics.shared.labels(model, "flight")
        self._cached = metrics.shared.labels(model, "cache")
        self._expired = metrics.expired.labels(model)
        self._restarts = metrics.engine_restarts.labels(model)

    def accepted(self, num_inputs: int) -> None:
        """A request was admitted."""
        self._inputs.inc(num_inputs)

    def truncated(self, num_inputs: int) -> None:
        """Inputs were cut."""
        self._truncated.inc(num_inputs)

    def watch(self, stats: Callable[[], PortStats] | None) -> None:
        """Read the gauges from ``stats`` whenever they are scraped; None: they are 0 from now on."""

        def reader(lane: Lane, field: int) -> Callable[[], float]:
            return lambda: float(stats().lanes[lane][field]) if stats is not None else 0.0

        gauges = (self._metrics.queue_sequences, self._metrics.queue_tokens, self._metrics.queue_cost)
        for lane in LANES:
            for field, gauge in enumerate(gauges):
                gauge.labels(self._model, lane).set_function(reader(lane, field))
        step_cap = self._metrics.step_cap.labels(self._model)
        step_cap.set_function(lambda: stats().step_cap_s if stats is not None else 0.0)

    def shared(self, in_flight: int, cached: int) -> None:
        """Sequences will be answered by another's computation."""
        if in_flight:
            self._in_flight.inc(in_flight)
        if cached:
            self._cached.inc(cached)

    def expired(self, num_sequences: int) -> None:
        """Sequences were dropped."""
        self._expired.inc(num_sequences)

    def batch_failed(self, kind: str) -> None:
        """A run of the engine failed."""
        self._metrics.batch_failures.labels(self._model, kind).inc()

    def engine_restarted(self) -> None:
        """An engine was given up."""
        self._restarts.inc()

    def batch(
        self, *, num_tokens: int, longest: int, engine_s: float, predicted_s: float, waits: Seq[tuple[Lane, float]]
    ) -> None:
        """A step has run; ``waits`` are its sequences' lanes and waits in seconds."""
        self.recent.add(len(waits), num_tokens, longest * len(waits), engine_s)
        self._tokens.inc(num_tokens)
        self._slots.inc(longest * len(waits))
        self._engine_seconds.observe(engine_s)
        self._step_cost_ratio.observe(engine_s / predicted_s if predicted_s > 0 else 0.0)
        self._batch_sequences.observe(len(waits))
        self._batch_tokens.observe(num_tokens)
        for lane, wait_s in waits:
            self._queue_seconds[lane].observe(wait_s)
