"""Traces of requests, by OpenTelemetry: a span for each request, and one below it for each of its stages.

Spans are made when a request has been answered, from the times taken on its way (``bei.metrics.request_stages``): no
span is open meanwhile. They hold no text, key, path or address of a client. Only this module imports the library, and
only servers that send traces import it.

Names and attributes: opentelemetry.io/docs/specs/semconv/http/http-spans.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence as Seq
from typing import TypeAlias

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.propagators.textmap import Getter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, StatusCode
from starlette.types import Scope

from bei.metrics.request_stages import Stage, microseconds
from bei.server.scope import SCOPE_REQUEST_ID
from bei.server.telemetry.request_record import UNMATCHED, RequestRecord
from bei.version import __version__

log = logging.getLogger(__name__)

Headers: TypeAlias = Seq[tuple[bytes, bytes]]

# What follows the stages: from the answer's headers to its last byte.
SEND = "send"

# A method that is none of HTTP's is a text of the client's.
_METHODS = frozenset(("CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"))
_OTHER = "_OTHER"

# Of the library, what reads callers' headers: it would warn of each that is wrong, with the header's text, which is a
# client's.
_READERS = ("opentelemetry.baggage", "opentelemetry.propagators", "opentelemetry.trace")

# A collector that takes nothing any more must not keep a server that has stopped.
_CLOSE_S = 5.0


def tracing_to(url: str, ratio: float | None) -> Tracing:
    """Sends to ``url``. ``ratio`` None: the sampler is the environment's. Raises ValueError, RuntimeError."""
    said = OTELResourceDetector().detect().attributes
    own = {"service.name": "bei", "service.version": __version__}
    provider = TracerProvider(
        sampler=None if ratio is None else ParentBasedTraceIdRatio(ratio),
        resource=Resource.create({name: value for name, value in own.items() if name not in said}),
        shutdown_on_exit=False,
    )
    return Tracing(provider, BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))


class _HeaderGetter(Getter[Headers]):
    """Reads the headers of an ASGI scope."""

    def get(self, carrier: Headers, key: str) -> list[str] | None:
        name = key.lower().encode()
        return [value.decode("latin-1") for found, value in carrier if found == name] or None

    def keys(self, carrier: Headers) -> list[str]:
        return [name.decode("latin-1") for name, _ in carrier]


_GETTER = _HeaderGetter()


class Tracing:
    """Makes the spans of requests, for ``processor``, which ``provider`` gets. A caller's traceparent is continued; the
    sampler decides which are kept."""

    def __init__(self, provider: TracerProvider, processor: SpanProcessor) -> None:
        for name in _READERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        provider.add_span_processor(processor)
        self._provider = provider
        self._processor = processor
        self._scope = InstrumentationScope("bei", __version__)
        self._tracer = provider.get_tracer("bei", __version__)
        self._has_failed = False

    def end(self, record: RequestRecord, scope: Scope, seconds: float) -> None:
        """A request was answered, ``seconds`` after its headers. Never raises: no trace is worth an answer."""
        try:
            self._end(record, scope, seconds)
        except Exception:  # a border
            if not self._has_failed:  # once: it would be so of every request
                log.exception("a request could not be traced")
            self._has_failed = True

    def close(self) -> None:
        """Send what is left, and wait for that for a few seconds at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="bei-traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def _end(self, record: RequestRecord, scope: Scope, seconds: float) -> None:
        timing, route, status = record.timing, record.route, record.status
        assert timing is not None  # a server that traces takes the times of all requests
        method = scope["method"] if scope["method"] in _METHODS else _OTHER
        has_route = route != UNMATCHED
        attributes: dict[str, str | int] = {
            "http.request.method": method,
            "url.scheme": scope["scheme"],
            "network.protocol.version": scope["http_version"],
            "http.response.status_code": status,
            "bei.request_id": scope[SCOPE_REQUEST_ID],
        }
        if has_route:
            attributes["http.route"] = route
        if status >= 500:
            attributes["error.type"] = str(status)
        if record.model is not None:
            attributes |= {"bei.model": record.model, "bei.inputs": record.num_inputs}
        if record.lane is not None and timing.accepted_s is not None:
            attributes |= {"bei.lane": record.lane, "bei.tokens": timing.num_tokens}
        # As the two clocks stand now: the system's may have been set meanwhile.
        begun_ns = time.time_ns() - time.monotonic_ns() + round(timing.begun_s * 1e9)
        verb = "HTTP" if method == _OTHER else method
        root = self._tracer.start_span(
            f"{verb} {route}" if has_route else verb,
            context=extract(scope["headers"], getter=_GETTER),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=begun_ns,
        )
        if not root.is_recording():
            return
        if status >= 500:
            root.set_status(StatusCode.ERROR)
        ended_us = microseconds(seconds)
        stages = timing.stages
        if timing.answered_s is not None:
            stages = [*stages, Stage(SEND, microseconds(timing.answered_s - timing.begun_s), ended_us)]
        parent = root.get_span_context()
        for stage in stages:
            self._processor.on_end(self._span_of(stage, parent, begun_ns))
        root.end(begun_ns + ended_us * 1000)

    def _span_of(self, stage: Stage, parent: SpanContext, begun_ns: int) -> ReadableSpan:
        """As it is when it has ended: a tracer's span, which has a lock and limits to be written with, costs six times
        as much."""
        span_id = self._provider.id_generator.generate_span_id()
        return ReadableSpan(
            stage.name,
            SpanContext(parent.trace_id, span_id, False, parent.trace_flags, parent.trace_state),
            parent,
            self._provider.resource,
            start_time=begun_ns + stage.begun_us * 1000,
            end_time=begun_ns + stage.ended_us * 1000,
            instrumentation_scope=self._scope,
        )
