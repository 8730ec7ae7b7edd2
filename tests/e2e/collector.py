"""An OpenTelemetry collector for a test's length: OTLP over HTTP, read with the classes of opentelemetry-proto."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.e2e.process import wait_until

PATH = "/v1/traces"


class Request(NamedTuple):
    """An export, as it came and as it reads."""

    body: bytes
    headers: dict[str, str]
    content: ExportTraceServiceRequest


class Collector:
    """Listens at ``url`` on a port that the system chooses. Use as a context manager."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        received = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                is_good = self.path == PATH and self.headers["content-type"] == "application/x-protobuf"
                if is_good:
                    headers = {name.lower(): value for name, value in self.headers.items()}
                    received.append(Request(body, headers, ExportTraceServiceRequest.FromString(body)))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200 if is_good else 400)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def spans(self) -> list[Span]:
        """All that have come."""
        return [
            span
            for request in self.requests
            for of_resource in request.content.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]

    def trace(self, request_id: str) -> tuple[Span, list[Span]]:
        """The span of a request and those below it, in the order of their times; waits for them."""

        def root() -> Span | None:
            return next(
                (span for span in self.spans if values(span.attributes).get("bei.request_id") == request_id), None
            )

        wait_until(lambda: root() is not None, f"the trace of request {request_id}")
        found = root()
        assert found is not None  # a request's spans are exported in the order of their ends, so it is the last one
        below = [span for span in self.spans if span.parent_span_id == found.span_id]
        return found, sorted(below, key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))


def values(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    """By name."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value") or "string_value") for one in attributes}
