"""A server and a collector: the trace of a request, as far as the wire, and what becomes of a server without one."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from bei import __version__
from bei.artifact.manifest import Artifact
from tests.e2e import process
from tests.e2e.collector import Collector, values
from tests.e2e.process import DEADLINE_S, ROOT, Server, serve

SECRET = "s3cr3t-0123456789abcdef"
TEXT = "a private thought of a client"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

# A module of this name is found before the packages are: as if they were not installed.
NOT_INSTALLED = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in ("opentelemetry.sdk", "opentelemetry.exporter"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(tiny: Artifact, env: Mapping[str, str], home: Path, collector: Collector) -> Iterator[Server]:
    """A server that sends its traces to ``collector``, and has a key."""
    variables = {
        **{"BEI_API_KEYS": f"search:{SECRET}", "OTEL_BSP_SCHEDULE_DELAY": "50"},
        **{"OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test", "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip"},
        **{"OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=mine"},
    }
    flags = ["--otlp-endpoint", collector.url, "--server-timing"]
    with serve([tiny.path, *flags], {**env, **variables}, home) as server:
        yield server


def ask(server: Server, request_id: str, given: object, **headers: str) -> httpx.Response:
    headers = {"X-Api-Key": SECRET, "X-Request-Id": request_id, **headers}
    return httpx.post(f"{server.url}/v1/embeddings", json={"input": given}, headers=headers, timeout=DEADLINE_S)


def check_times(root: Span, stages: list[Span], response: httpx.Response) -> None:
    """The stages lie end to end in the request, and those before the sending are those of Server-Timing."""
    ends = [root.start_time_unix_nano, *(span.end_time_unix_nano for span in stages)]
    assert [span.start_time_unix_nano for span in stages] == ends[:-1]
    assert ends[-1] == root.end_time_unix_nano
    assert stages[-1].name == "send"
    header = {name: float(ms) for name, ms in re.findall(r"(\w+);dur=([\d.]+)", response.headers["server-timing"])}
    sums: dict[str, int] = {}
    for span in stages[:-1]:
        sums[span.name] = sums.get(span.name, 0) + span.end_time_unix_nano - span.start_time_unix_nano
    assert {name: ns / 1e6 for name, ns in sums.items()} == {
        name: pytest.approx(ms) for name, ms in header.items() if name != "total"
    }
    assert sum(sums.values()) / 1e6 == pytest.approx(header["total"])


def test_a_request_s_trace_has_every_stage_and_its_times_add_up(traced: Server, collector: Collector) -> None:
    before_ns = time.time_ns()
    response = ask(traced, "first", TEXT, Traceparent=f"00-{TRACE}-{PARENT}-01")
    after_ns = time.time_ns()
    assert response.status_code == 200
    root, stages = collector.trace("first")
    assert [span.name for span in stages] == [
        *("receive", "parse", "tokenization", "queue", "inference", "render", "send")
    ]
    check_times(root, stages, response)
    assert before_ns <= root.start_time_unix_nano <= after_ns
    assert (root.name, root.kind) == ("POST /v1/embeddings", Span.SPAN_KIND_SERVER)
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert {span.trace_id.hex() for span in stages} == {TRACE}
    assert {span.kind for span in stages} == {Span.SPAN_KIND_INTERNAL}
    said = values(root.attributes)
    assert said["http.response.status_code"] == 200
    assert (said["bei.model"], said["bei.lane"], said["bei.inputs"]) == ("tiny", "interactive", 1)
    assert said["bei.tokens"] == response.json()["usage"]["prompt_tokens"]


def test_many_steps_of_one_request_lie_end_to_end_too(traced: Server, collector: Collector) -> None:
    texts = [f"{number} " + "and so on " * (number % 60) for number in range(400)]
    response = ask(traced, "many", texts)
    assert response.status_code == 200
    root, stages = collector.trace("many")
    check_times(root, stages, response)
    assert values(root.attributes)["bei.lane"] == "bulk"
    assert max(span.end_time_unix_nano - span.start_time_unix_nano for span in stages if span.name == "inference") > 0


def test_errors_have_their_times_too(traced: Server, collector: Collector) -> None:
    refused = ask(traced, "empty", [])
    assert refused.status_code == 400
    root, stages = collector.trace("empty")
    check_times(root, stages, refused)
    assert [span.name for span in stages] == ["receive", "parse", "send"]
    assert root.status.code == Status.STATUS_CODE_UNSET  # the client's fault
    stranger = ask(traced, "stranger", TEXT, **{"X-Api-Key": "wrong"})
    assert stranger.status_code == 401
    assert stranger.headers["server-timing"].startswith("total;dur=")
    root, stages = collector.trace("stranger")
    assert [span.name for span in stages] == ["send"]


def test_what_the_collector_gets_names_the_service_and_no_text(traced: Server, collector: Collector) -> None:
    ask(traced, "last", [TEXT, TEXT])
    collector.trace("last")
    for request in collector.requests:
        assert request.headers["x-tenant"] == "mine"
        (of_resource,) = request.content.resource_spans
        resource = values(of_resource.resource.attributes)
        assert (resource["service.name"], resource["service.version"]) == ("bei", __version__)
        assert resource["deployment.environment.name"] == "test"
        assert not any(secret in request.body for secret in (b"thought", b"s3cr3t", b"search", b"wrong"))


def test_what_is_left_is_sent_at_the_end_and_only_what_is_sampled(
    tiny: Artifact, env: Mapping[str, str], home: Path, collector: Collector
) -> None:
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_SERVICE_NAME": "search",
        "BEI_TRACE_SAMPLE_RATIO": "0",
    }
    with serve([tiny.path], {**env, **variables}, home) as server:
        assert ask(server, "unsampled", "a").status_code == 200
        assert ask(server, "sampled", "a", Traceparent=f"00-{TRACE}-{PARENT}-01").status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait_exit() == 0
    ids = {values(span.attributes).get("bei.request_id") for span in collector.spans}
    assert "sampled" in ids
    assert "unsampled" not in ids
    (of_resource,) = collector.requests[-1].content.resource_spans
    assert values(of_resource.resource.attributes)["service.name"] == "search"


@pytest.mark.slow
def test_a_collector_that_is_gone_costs_nobody_anything(tiny: Artifact, env: Mapping[str, str], home: Path) -> None:
    with socket.socket() as taken:  # nobody listens there
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with serve([tiny.path, "--otlp-endpoint", url], {**env, "OTEL_BSP_SCHEDULE_DELAY": "50"}, home) as server:
            assert all(ask(server, str(number), "a").status_code == 200 for number in range(20))
            server.wait_for_log("export")
            began_s = time.monotonic()
            server.send_signal(signal.SIGTERM)
            assert server.wait_exit() == 0
            assert time.monotonic() - began_s < 15
            assert not any("Traceback" in line for line in server.log)


def test_a_server_that_cannot_trace_as_it_is_to_does_not_start(
    tiny: Artifact, env: Mapping[str, str], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOT_INSTALLED)
    path = os.pathsep.join((str(tmp_path), str(ROOT), str(ROOT / "build")))
    for variables, words in (
        ({"PYTHONPATH": path, "BEI_OTLP_ENDPOINT": "http://h:1"}, ["otlp_endpoint", "pip install 'bei[otel]'"]),
        ({"OTEL_PROPAGATORS": "unheard-of", "BEI_OTLP_ENDPOINT": "http://h:1"}, ["OTEL_PROPAGATORS", "unheard-of"]),
    ):
        ended = process.run(["serve", tiny.path, "--port", "0"], {**env, **variables}, tmp_path)
        assert ended.returncode == 2, ended.stderr
        (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
        assert all(word in line for word in words)
        assert "Traceback" not in ended.stderr
