"""Whether requests are traced, and what their spans are. tests/e2e/test_tracing.py has a collector."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio, Sampler
from opentelemetry.trace import SpanKind, StatusCode

from bei.config.settings import ServeConfig
from bei.engine.fake import FakeEngine
from bei.errors import ConfigError, MissingDependencyError
from bei.server.telemetry.otel_settings import tracing_of
from bei.server.telemetry.spans import Tracing
from tests.bei.server.app import ROUTE, App
from tests.bei.server.conftest import MakeApp
from tests.bei.server.telemetry.test_server_timing import durations
from tests.support.artifacts import LIMITS, token_ids
from tests.support.engines import PickyEngine

COLLECTOR = "http://127.0.0.1:4318"
SECRET = "s3cr3t-0123456789abcdef"
TEXT = "the cat has a private thought"
PARENT = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
STAGES = ["receive", "parse", "tokenization", "queue", "inference", "render", "send"]

TracedApp = Callable[..., tuple[App, InMemorySpanExporter]]


@pytest.fixture
def traced(make_app: MakeApp) -> TracedApp:
    """``traced(engine, sampler=..., **settings)``: an application, and what it exports."""

    def make(
        engine: FakeEngine | None = None, sampler: Sampler | None = None, **settings: Any
    ) -> tuple[App, InMemorySpanExporter]:
        exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        tracing = Tracing(provider, SimpleSpanProcessor(exporter))
        return make_app(engine or FakeEngine(LIMITS), tracing=tracing, **settings), exporter

    return make


def ask(app: App, path: str = ROUTE, method: str = "POST", body: Any = None, **headers: str) -> httpx.Response:
    content = None if body is None else json.dumps(body).encode()
    response: httpx.Response = app.run(app.client.request(method, path, headers=headers, content=content))
    return response


def split(exporter: InMemorySpanExporter) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """The only root, and the spans below it."""
    spans = exporter.get_finished_spans()
    (root,) = (span for span in spans if span.kind is SpanKind.SERVER)
    return root, [span for span in spans if span is not root]


def length_us(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1000


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_request_is_a_span_and_its_stages_are_those_of_server_timing(traced: TracedApp) -> None:
    app, exporter = traced(server_timing=True)
    response = ask(app, body={"input": ["cat", "the world"]}, **{"X-Request-Id": "mine"})
    root, stages = split(exporter)
    assert root.name == f"POST {ROUTE}"
    assert [span.name for span in stages] == STAGES
    found = durations(response)
    assert {span.name: length_us(span) for span in stages[:-1]} == {
        name: pytest.approx(ms * 1000) for name, ms in found.items() if name != "total"
    }
    assert sum(map(length_us, stages)) == pytest.approx(length_us(root))
    assert sum(map(length_us, stages[:-1])) == pytest.approx(found["total"] * 1000)
    ends = [root.start_time, *(span.end_time for span in stages)]
    assert [span.start_time for span in stages] == ends[:-1]  # end to end
    assert ends[-1] == root.end_time
    context = root.get_span_context()
    assert context is not None
    for span in stages:
        assert span.parent is not None
        assert (span.parent.trace_id, span.parent.span_id) == (context.trace_id, context.span_id)
    num_tokens = sum(len(token_ids(text)) for text in ("cat", "the world"))
    assert attributes(root) == {
        **{"http.request.method": "POST", "http.route": ROUTE, "url.scheme": "http"},
        **{"network.protocol.version": "1.1", "http.response.status_code": 200, "bei.request_id": "mine"},
        **{"bei.model": "tiny", "bei.lane": "interactive", "bei.inputs": 2, "bei.tokens": num_tokens},
    }
    assert root.status.status_code is StatusCode.UNSET


def test_a_caller_s_trace_is_continued(traced: TracedApp) -> None:
    app, exporter = traced()
    trace, parent = PARENT
    ask(app, body={"input": "cat"}, Traceparent=f"00-{trace}-{parent}-01", Tracestate="a=b")
    root, _ = split(exporter)
    context = root.get_span_context()
    assert context is not None
    assert root.parent is not None
    assert (f"{context.trace_id:032x}", f"{root.parent.span_id:016x}") == PARENT
    assert root.parent.is_remote
    assert context.trace_state.get("a") == "b"


@pytest.mark.parametrize("header", ["", "nonsense", f"00-{'0' * 32}-{PARENT[1]}-01", "00-" + "x" * 600, "\xff"])
def test_a_traceparent_that_is_none_begins_a_new_trace(traced: TracedApp, header: str) -> None:
    app, exporter = traced()
    response = ask(app, body={"input": "cat"}, **{"Traceparent": header.encode("latin-1")})  # type: ignore[arg-type]
    assert response.status_code == 200
    assert split(exporter)[0].parent is None


def test_the_caller_and_else_the_ratio_decide_what_is_sampled(traced: TracedApp) -> None:
    app, exporter = traced(sampler=ParentBasedTraceIdRatio(0.0))
    trace, parent = PARENT
    ask(app, body={"input": "cat"})
    ask(app, body={"input": "cat"}, Traceparent=f"00-{trace}-{parent}-00")
    assert not exporter.get_finished_spans()
    ask(app, body={"input": "cat"}, Traceparent=f"00-{trace}-{parent}-01")
    assert len(exporter.get_finished_spans()) == 1 + len(STAGES)


def test_errors_are_traced_as_far_as_they_came(traced: TracedApp) -> None:
    app, exporter = traced(PickyEngine(LIMITS, lambda _: True), api_keys=(f"search:{SECRET}",))
    for headers, body, status, stages, model in (
        ({}, {"input": "cat"}, 401, ["send"], None),
        ({"X-Api-Key": SECRET}, {"input": []}, 400, ["receive", "parse", "send"], None),
        ({"X-Api-Key": SECRET}, {"input": "cat"}, 500, STAGES, "tiny"),
    ):
        exporter.clear()
        assert ask(app, body=body, **headers).status_code == status
        root, found = split(exporter)
        assert [span.name for span in found] == stages
        assert attributes(root)["http.response.status_code"] == status
        assert attributes(root).get("bei.model") == model
        assert attributes(root).get("error.type") == ("500" if status == 500 else None)
        assert (root.status.status_code is StatusCode.ERROR) == (status == 500)


def test_no_span_has_a_text_or_a_key_or_a_path(traced: TracedApp, caplog: pytest.LogCaptureFixture) -> None:
    app, exporter = traced(api_keys=(f"search:{SECRET}",))
    good = {"X-Api-Key": SECRET}
    ask(app, body={"input": TEXT}, **good)
    ask(app, body={"input": TEXT, "model": TEXT}, **good)
    ask(app, body={"input": TEXT}, **{"X-Api-Key": f"{SECRET}-wrong", "X-Request-Id": TEXT})
    ask(app, f"/v1/models/{TEXT}", "GET", **good)
    ask(app, f"/{TEXT}?text={TEXT}", "THOUGHT", {"input": TEXT}, **good)
    ask(app, "/tei/embed", body={"inputs": [TEXT, 3]}, **good)
    trace, parent = PARENT
    for name, value in (("Tracestate", TEXT), ("Baggage", TEXT), ("Baggage", f"{TEXT}=1"), ("Traceparent", TEXT * 20)):
        ask(app, body={"input": TEXT}, **{**good, "Traceparent": f"00-{trace}-{parent}-01", name: value})
    assert "thought" not in caplog.text
    spans = exporter.get_finished_spans()
    assert len([span for span in spans if span.kind is SpanKind.SERVER]) == 10
    shown = "".join(span.to_json() for span in spans)
    assert not re.search(r"thought|private|s3cr3t|search", shown, re.I)
    assert "HTTP" in [span.name for span in spans]  # of a method that is none
    assert "GET /v1/models/{name:path}" in [span.name for span in spans]


def test_what_monitors_read_is_not_traced(traced: TracedApp) -> None:
    app, exporter = traced()
    for path in ("/health", "/ready", "/metrics", "/stats", "/tei/health", "/nim/v1/health/live"):
        assert ask(app, path, "GET").status_code == 200
    assert not [span.name for span in exporter.get_finished_spans()]


def test_a_failing_library_costs_nobody_an_answer(traced: TracedApp, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Sampler):
        def should_sample(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("broken")

        def get_description(self) -> str:
            return ""

    app, _ = traced(sampler=Broken())
    for _ in range(3):
        assert ask(app, body={"input": "cat"}).status_code == 200
    assert [record.message for record in caplog.records].count("a request could not be traced") == 1


# Settings and variables.


@pytest.fixture
def closing() -> Iterator[Callable[[Tracing | None], None]]:
    """Close it at the end of the test."""
    made: list[Tracing] = []

    def add(tracing: Tracing | None) -> None:
        assert tracing is not None
        made.append(tracing)

    yield add
    for tracing in made:
        tracing.close()


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR, "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR, "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_SAMPLER": "always_on"},
    ],
)
def test_nobody_is_traced_unasked(env: Mapping[str, str]) -> None:
    assert tracing_of(ServeConfig(), env) is None


@pytest.mark.parametrize(
    ("endpoint", "env", "url"),
    [
        (COLLECTOR, {}, f"{COLLECTOR}/v1/traces"),
        (f"{COLLECTOR}/", {}, f"{COLLECTOR}/v1/traces"),
        (f"{COLLECTOR}/v1/traces", {}, f"{COLLECTOR}/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": f"{COLLECTOR}/x"}, f"{COLLECTOR}/x/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{COLLECTOR}/x"}, f"{COLLECTOR}/x"),
        (COLLECTOR, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://other:4318/x"}, f"{COLLECTOR}/v1/traces"),
        (None, {"OTEL_TRACES_EXPORTER": "otlp"}, "http://localhost:4318/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://me:s3cr3t@h:1"}, "http://h:1/v1/traces"),
    ],
)
def test_the_setting_or_a_variable_says_where_traces_go(
    endpoint: str | None,
    env: dict[str, str],
    url: str,
    caplog: pytest.LogCaptureFixture,
    closing: Callable[[Tracing | None], None],
) -> None:
    caplog.set_level(logging.INFO, "bei.server.telemetry.otel_settings")
    closing(tracing_of(ServeConfig(otlp_endpoint=endpoint), {**env, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}))
    source = "otlp_endpoint" if endpoint else next(iter(env))
    assert caplog.messages == [f"traces go to {url.removeprefix('http://')} ({source})"]


@pytest.mark.parametrize(
    ("settings", "env", "message"),
    [
        *(
            ({"otlp_endpoint": url}, {}, "otlp_endpoint must be a URL")
            for url in ("localhost:4318", "grpc://h:4317", "http://", "http://h:x", "http://[::1")
        ),
        ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector"}, "OTEL_EXPORTER_OTLP_ENDPOINT must be a URL"),
        ({"otlp_endpoint": COLLECTOR}, {"OTEL_SDK_DISABLED": "true"}, "OTEL_SDK_DISABLED forbids"),
        ({"otlp_endpoint": COLLECTOR}, {"OTEL_TRACES_EXPORTER": "none"}, "OTEL_TRACES_EXPORTER forbids"),
        ({}, {"OTEL_TRACES_EXPORTER": "zipkin"}, "sends traces by otlp"),
        (
            {"otlp_endpoint": COLLECTOR},
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'",
        ),
        (
            {"otlp_endpoint": COLLECTOR},
            {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"},
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is 'http/json'",
        ),
        ({"trace_sample_ratio": 0.5}, {}, "trace_sample_ratio is for traces"),
    ],
)
def test_what_cannot_be_honoured_is_refused(settings: dict[str, Any], env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tracing_of(ServeConfig(**settings), env)


def test_wrong_sizes_of_batches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "0")
    with pytest.raises(ConfigError, match="max_queue_size"):
        tracing_of(ServeConfig(otlp_endpoint=COLLECTOR), {})


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(MissingDependencyError, match=re.escape("pip install 'bei[otel]'")) as raised:
        tracing_of(ServeConfig(), {"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR})
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in str(raised.value)


@pytest.mark.parametrize("ratio", [-0.1, 1.1])
def test_a_ratio_is_a_share(ratio: float) -> None:
    with pytest.raises(ConfigError, match="trace_sample_ratio"):
        ServeConfig(trace_sample_ratio=ratio)
