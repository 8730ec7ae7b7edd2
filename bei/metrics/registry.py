"""All Prometheus metrics of this server by name. docs/reference.md lists them; a test compares both.

Gauges of the engine ports are in ``bei.metrics.engine_gauges``, text-embeddings-inference's names in
``bei.metrics.tei``. In a server of several processes each has its own Metrics, aggregated by ``bei.metrics.aggregate``.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from typing import Literal, NamedTuple, TypeAlias, get_args

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from bei.core import Limits
from bei.metrics.aggregate import Snapshot, merge_snapshots, metrics_of, snapshot_of
from bei.metrics.collectors import Count, Counter, Histogram, Series
from bei.metrics.engine_gauges import PortGauges, WaitS
from bei.metrics.last_minute import RecentRequests, RecentSteps
from bei.metrics.tei import AnsweredRequests, te_exposition
from bei.metrics.vllm import vllm_families
from bei.port import LANES, Lane, LaneStats, PortStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Results of a check for a new artifact of a served model.
SwapResult: TypeAlias = Literal["swapped", "unchanged", "refused"]

_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
_RATIOS = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
# Metrics that are also exposed under text-embeddings-inference's names (bei.metrics.tei).
_SIZES = tuple(2**power for power in range(13))
_TOKENS = tuple(2**power for power in range(21))
_LENGTHS = tuple(2**power for power in range(18))

_FAILURES = ("exception", "non_finite", "engine_died")

# The process label of a server with a single process.
ONLY_PROCESS = "server"


class _Request(NamedTuple):
    """Labels of requests. ``model`` and ``lane`` are empty if none was asked; ``method`` is TEI's term."""

    route: str
    status: int
    model: str
    lane: str
    method: str


class Metrics:
    """All collectors of one process, in a registry of its own.

    ``model_routes``: routes that use an engine; only these count under TEI's names. ``steps``: the engine steps of the
    last minute by model.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.recent = RecentRequests()
        self.model_routes: frozenset[str] = frozenset()
        self.embedders: set[str] = set()
        self.steps: dict[str, RecentSteps] = {}

        def histogram(name: str, text: str, labels: Seq[str], buckets: Seq[float]) -> Histogram:
            return Histogram(name, text, labels, buckets, self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, self.registry)

        lane = ["model", "lane"]
        self.requests = counter("bei_requests", "HTTP requests answered, by route and status", "route", "status")
        self.request_seconds = histogram(
            "bei_request_seconds",
            "From the request's headers to the end of its answer",
            ["route", "status", *lane],
            _SECONDS,
        )
        self._by_request: dict[_Request, tuple[Count, Series]] = {}
        self._answered: Tally[_Request] = Tally()
        self.key_requests = counter(
            "bei_key_requests", "HTTP requests with an API key, by its name and status", "key", "status"
        )
        self._by_key: dict[tuple[str, int], Count] = {}
        self.inputs = counter("bei_inputs", "Inputs accepted", "model")
        self.inferred = counter(
            "bei_inputs_inferred", "Inputs whose inference has ended, by outcome", "model", "outcome"
        )
        self.truncated = counter(
            "bei_inputs_truncated", "Inputs cut to what the model, its side or the request takes", "model"
        )
        self.tokens = counter("bei_tokens", "Tokens the engine has run", "model")
        self.tokens_shared = counter(
            "bei_tokens_shared", "Tokens that were not computed: a sequence of the step begins with the same", "model"
        )
        self.gauges = PortGauges(self.registry)
        self.input_seconds = histogram(
            "bei_input_seconds", "From a request's acceptance to the answer to an input", lane, _SECONDS
        )
        self.tokenization_seconds = histogram(
            "bei_tokenization_seconds", "From a request's acceptance until an input is tokenized", lane, _SECONDS
        )
        self.queue_seconds = histogram("bei_queue_seconds", "Wait of a sequence for its step", lane, _SECONDS)
        self.inference_seconds = histogram("bei_inference_seconds", "Run time of a sequence's step", lane, _SECONDS)
        self.engine_seconds = histogram("bei_engine_seconds", "Run time of a step", ["model"], _SECONDS)
        self.predicted_seconds = counter(
            "bei_engine_predicted_seconds", "Predicted run times of steps, summed up", "model"
        )
        self.step_cost_ratio = histogram(
            "bei_step_cost_ratio", "Seconds of a step over what was predicted", ["model"], _RATIOS
        )
        self.batch_sequences = histogram("bei_batch_sequences", "Sequences of a step", ["model"], _SIZES)
        self.batch_tokens = histogram("bei_batch_tokens", "Tokens of a step", ["model"], _TOKENS)
        self.sequence_tokens = histogram("bei_sequence_tokens", "Tokens of a sequence of a step", ["model"], _LENGTHS)
        self.slots = counter("bei_attention_slots", "Sequences of a step times its longest", "model")
        self.shared = counter(
            "bei_sequences_shared",
            "Sequences that were not computed: equal to one in flight, or in the cache",
            *("model", "from"),
        )
        self.expired = counter("bei_sequences_expired", "Sequences dropped at their deadline", "model")
        self.batch_failures = counter("bei_batch_failures", "Runs of the engine that failed, by kind", "model", "kind")
        self.engine_restarts = counter("bei_engine_restarts", "Engines given up because a step did not end", "model")
        ProcessCollector(registry=self.registry)
        self.swaps = counter("bei_swaps", "Artifacts examined on SIGHUP, by outcome", "model", "result")
        self.artifact_info = Gauge(
            "bei_artifact_info",
            "1 for the artifact that is served, by its digest",
            ["model", "digest"],
            registry=self.registry,
        )
        self.artifact_start = Gauge(
            "bei_artifact_start_time_seconds",
            "When the artifact began to be served, in seconds since the epoch",
            ["model"],
            registry=self.registry,
        )
        self._digests: dict[str, str] = {}
        self.process_restarts = counter(
            "bei_process_restarts", "Processes of the server that have died and were started again", "process"
        )
        self.process_hangs = counter(
            "bei_process_hangs", "Processes of the server that hung and were ended, to be started again", "process"
        )

    def request(
        self, route: str, status: int, seconds: float, model: str | None, lane: Lane | None, num_inputs: int
    ) -> None:
        """Count an answered HTTP request with ``num_inputs`` for ``model``. Called on the event loop only."""
        self.recent.add(lane, status, seconds)
        method = "batch" if num_inputs > 1 else "single" if num_inputs else ""
        request = _Request(route, status, model or "", lane or "", method)
        collectors = self._by_request.get(request)
        if collectors is None:  # a label lookup costs as much as counting
            labels = (route, str(status), request.model, request.lane)
            collectors = self.requests.labels(*labels[:2]), self.request_seconds.labels(*labels)
            self._by_request[request] = collectors
        collectors[0].inc()
        collectors[1].observe(seconds)
        self._answered[request] += 1

    def key_request(self, label: str, status: int) -> None:
        """Count an answered HTTP request with the API key called ``label``."""
        counter = self._by_key.get((label, status))
        if counter is None:
            counter = self._by_key[label, status] = self.key_requests.labels(label, str(status))
        counter.inc()

    def artifact(self, model: str, digest: str) -> None:
        """Report that ``model`` is now served from the artifact with this digest."""
        former = self._digests.get(model)
        if former is not None:
            self.artifact_info.remove(model, former)
        self._digests[model] = digest
        self.artifact_info.labels(model, digest).set(1)
        self.artifact_start.labels(model).set_to_current_time()
        for result in get_args(SwapResult):
            self.swaps.labels(model, result)  # counters start at 0, so that rates show the first swap

    def swap(self, model: str, result: SwapResult) -> None:
        """Count a check for a new artifact of ``model``."""
        self.swaps.labels(model, result).inc()

    def render(self) -> bytes:
        """The exposition text of a server with a single process."""
        families = list(self.registry.collect())
        return self._rendered(families, self._answered_of_models(), self.embedders, (ONLY_PROCESS,), ())

    def snapshot(self) -> bytes:
        """This process's metrics for other processes. Thread-safe."""
        return snapshot_of(self.registry.collect(), self._answered_of_models(), sorted(self.embedders)).encode()

    def render_server(self, answers: Mapping[str, bytes], processes: Iterable[str], silent: Iterable[str]) -> bytes:
        """The exposition text of a server from its processes' snapshots, including this one's. ``processes`` responded,
        ``silent`` ones did not."""
        found: Snapshot = merge_snapshots(answers.values())
        return self._rendered(metrics_of(found.families), found.answered, {*found.embedders}, processes, silent)

    def restarted(self, process: str) -> None:
        """Count a restart of a process that died."""
        self.process_restarts.labels(process).inc()

    def hung(self, process: str) -> None:
        """Count a process that hung and was ended."""
        self.process_hangs.labels(process).inc()

    def _answered_of_models(self) -> list[AnsweredRequests]:
        return [
            AnsweredRequests(request.method, request.status, count)
            for request, count in list(self._answered.items())
            if request.route in self.model_routes
        ]

    def _rendered(
        self,
        families: list[Metric],
        answered: Iterable[AnsweredRequests],
        embedders: AbstractSet[str],
        processes: Iterable[str],
        silent: Iterable[str],
    ) -> bytes:
        text = "1: these figures include the process; 0: it has not answered"
        up = GaugeMetricFamily("bei_process_up", text, labels=["process"])
        for names, value in ((processes, 1.0), (silent, 0.0)):
            for name in names:
                up.add_metric([name], value)
        te = te_exposition(families, answered, self.model_routes, embedders)
        return generate_latest(_Collected([*families, up, *vllm_families(families)])) + te.encode()


class _Collected:
    """A collector of families that were already collected."""

    def __init__(self, families: Seq[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class ModelMetrics:
    """The collectors of one model, with its label bound. ``is_embedder``: TEI's names call its work "embed"."""

    def __init__(self, metrics: Metrics, model: str, *, is_embedder: bool = True) -> None:
        self.recent = metrics.steps.setdefault(model, RecentSteps())  # kept when its artifact is swapped
        self._gauges = metrics.gauges.of(model)
        if is_embedder:
            metrics.embedders.add(model)
        self._inputs = metrics.inputs.labels(model)
        self._inferred = metrics.inferred.labels(model, "answered")
        self._failed = metrics.inferred.labels(model, "failed")
        self._truncated = metrics.truncated.labels(model)
        self._tokens = metrics.tokens.labels(model)
        self._tokens_shared = metrics.tokens_shared.labels(model)

        def of_lanes(histogram: Histogram) -> dict[Lane, Series]:
            return {lane: histogram.labels(model, lane) for lane in LANES}

        self._input_seconds = of_lanes(metrics.input_seconds)
        self._tokenization_seconds = of_lanes(metrics.tokenization_seconds)
        self._queue_seconds = of_lanes(metrics.queue_seconds)
        self._inference_seconds = of_lanes(metrics.inference_seconds)
        self._engine_seconds = metrics.engine_seconds.labels(model)
        self._predicted_seconds = metrics.predicted_seconds.labels(model)
        self._step_cost_ratio = metrics.step_cost_ratio.labels(model)
        self._batch_sequences = metrics.batch_sequences.labels(model)
        self._batch_tokens = metrics.batch_tokens.labels(model)
        self._sequence_tokens = metrics.sequence_tokens.labels(model)
        self._slots = metrics.slots.labels(model)
        self._in_flight = metrics.shared.labels(model, "flight")
        self._cached = metrics.shared.labels(model, "cache")
        self._expired = metrics.expired.labels(model)
        self._failures = {kind: metrics.batch_failures.labels(model, kind) for kind in _FAILURES}
        self._restarts = metrics.engine_restarts.labels(model)

    def accepted(self, num_inputs: int) -> None:
        self._inputs.inc(num_inputs)

    def truncated(self, num_inputs: int) -> None:
        self._truncated.inc(num_inputs)

    def inferred(self, num_answered: int, num_failed: int) -> None:
        """Count inputs whose inference has ended, with an answer or not."""
        if num_answered:
            self._inferred.inc(num_answered)
        if num_failed:
            self._failed.inc(num_failed)

    def tokenized(self, lane: Lane, num_inputs: int, seconds: float) -> None:
        """Observe the time from a request's acceptance to the tokenization of inputs."""
        self._tokenization_seconds[lane].observe(seconds, num_inputs)

    def input_answers(self, lane: Lane, num_inputs: int, seconds: float) -> None:
        """Observe the time from a request's acceptance to the answers of inputs."""
        self._input_seconds[lane].observe(seconds, num_inputs)

    def watch(self, stats: Callable[[], PortStats], limits: Limits) -> None:
        """Read gauges from ``stats`` at scrape time. ``limits``: those of a step."""
        self._gauges.ports = (*self._gauges.ports, (stats, limits))

    def forget(self, stats: Callable[[], PortStats]) -> None:
        """Stop reading gauges from ``stats``."""
        self._gauges.ports = tuple(port for port in self._gauges.ports if port[0] != stats)

    def watch_held(self, lanes: Callable[[], Mapping[Lane, LaneStats]]) -> None:
        """Read what is held back from both engines of a model from ``lanes`` at scrape time."""
        self._gauges.held = (*self._gauges.held, lanes)

    def forget_held(self, lanes: Callable[[], Mapping[Lane, LaneStats]]) -> None:
        """Stop reading it from there."""
        self._gauges.held = tuple(other for other in self._gauges.held if other != lanes)

    def watch_waits(self, wait_s: WaitS) -> None:
        """Read the predicted wait of a new request from ``wait_s`` at scrape time."""
        self._gauges.waits = (*self._gauges.waits, wait_s)

    def forget_waits(self, wait_s: WaitS) -> None:
        """Stop reading it from there."""
        self._gauges.waits = tuple(other for other in self._gauges.waits if other != wait_s)

    def shared(self, in_flight: int, cached: int) -> None:
        """Count sequences that share another sequence's computation."""
        if in_flight:
            self._in_flight.inc(in_flight)
        if cached:
            self._cached.inc(cached)

    def expired(self, num_sequences: int) -> None:
        self._expired.inc(num_sequences)

    def batch_failed(self, kind: str) -> None:
        self._failures[kind].inc()

    def engine_restarted(self) -> None:
        """Count an engine that was replaced."""
        self._restarts.inc()

    def batch(
        self,
        lengths: Seq[int],
        *,
        engine_s: float,
        predicted_s: float,
        waits: Iterable[tuple[Lane, float]],
        num_shared: int = 0,
    ) -> None:
        """Observe a step over sequences of ``lengths`` tokens, of which ``num_shared`` were not computed; ``waits``:
        their lanes and waits in seconds."""
        num_tokens, num_slots = sum(lengths), max(lengths) * len(lengths)
        self.recent.add(len(lengths), num_tokens, num_slots, engine_s)
        self._tokens.inc(num_tokens)
        if num_shared:
            self._tokens_shared.inc(num_shared)
        self._slots.inc(num_slots)
        self._engine_seconds.observe(engine_s)
        self._predicted_seconds.inc(predicted_s)
        self._step_cost_ratio.observe(engine_s / predicted_s if predicted_s > 0 else 0.0)
        self._batch_sequences.observe(len(lengths))
        self._batch_tokens.observe(num_tokens)
        self._sequence_tokens.observe_all(lengths)
        by_lane: dict[Lane, list[float]] = {}
        for lane, wait_s in waits:
            by_lane.setdefault(lane, []).append(wait_s)
        for lane, waits_s in by_lane.items():
            self._queue_seconds[lane].observe_all(waits_s)
            self._inference_seconds[lane].observe(engine_s, len(waits_s))
