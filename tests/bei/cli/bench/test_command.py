"""``bei bench`` as users call it, against small servers: counts are exact, files are written, faults are one line.

Nothing here depends on how fast the machine is, but for what says so.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from bei.cli import main
from bei.cli.bench.result import BenchResult, read_result
from bei.cli.bench.workers import LoadWorkers
from tests.bei.cli.bench.small_server import Asked, SmallServer, good
from tests.bei.cli.test_main import fails_with
from tests.support.tls_certificates import make_authority, make_certificate

Bench = Callable[..., BenchResult]
SHORT = ("--duration", "1", "--warmup", "0.2", "--timeout", "60")


@pytest.fixture
def server() -> Iterator[SmallServer]:
    with SmallServer() as server:
        yield server


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bench:
    """``bench(*arguments, code=0)``: the result that was written."""
    root = str(Path(__file__).parents[4])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((root, os.environ.get("PYTHONPATH", ""))))

    def run(*arguments: str, code: int = 0) -> BenchResult:
        out = tmp_path / "result"
        words = ["bench", *arguments, "--out", str(out)]
        if code:
            with pytest.raises(SystemExit) as caught:
                main.main(words)
            assert caught.value.code == code
        else:
            main.main(words)
        assert f"written: {out}.json" in capsys.readouterr().out
        assert (tmp_path / "result.html").read_text().startswith("<!DOCTYPE html>")
        return read_result(tmp_path / "result.json")

    return run


def test_an_open_loop_sends_as_many_requests_as_it_should_from_all_its_workers(
    server: SmallServer, bench: Bench
) -> None:
    result = bench(server.url, "--rate", "50", "--arrivals", "constant", "--workers", "2", *SHORT)
    (load,) = result.points[0].loads
    assert (load.num_due, load.latency.count, load.failures) == (50, 50, {})
    assert len(server.posts) == 1 + 10 + 50  # the probe, the warm-up, the window
    texts = [asked.body["input"] for asked in server.posts]
    assert len(set(texts)) == len(texts)
    assert all(len(text.split()) == 20 for text in texts)
    assert {asked.path for asked in server.posts} == {"/v1/embeddings"}
    assert {asked.body["model"] for asked in server.posts} == {"m"}
    assert len(result.points[0].cpu_shares) == 2
    assert result.servers[0].software == "small"
    assert result.servers[0].is_local


def test_latencies_are_those_that_the_server_itself_measures(bench: Bench) -> None:
    """The server waits 20 to 120 ms by its own clock, which is the independent measurement."""

    async def waits(asked: Asked) -> None:
        await asyncio.sleep(0.02 + hash(asked.body["input"]) % 1000 / 1e4)

    with SmallServer(waits=waits) as server:
        # A closed loop: where the machine stands still, it is a few of many that take longer.
        result = bench(server.url, "--concurrency", "4", "--duration", "2", "--warmup", "0", "--timeout", "60")
        own = [asked.took_s * 1e3 for asked in server.posts[1:]]  # the first is the probe
    latency = result.points[0].loads[0].latency
    assert latency.count == len(own)
    # The client's overhead is bounded, and it is never faster than the server.
    for each, found in ((50, latency.p50), (75, latency.p75)):
        assert found is not None
        truth = float(np.percentile(own, each, method="inverted_cdf"))
        assert truth * 0.97 <= found <= truth + 40


def test_two_loads_at_once_have_their_own_shapes_lanes_and_figures(server: SmallServer, bench: Bench) -> None:
    loads = (
        "--load",
        "one:rate=20,arrivals=constant,lane=interactive",
        "--load",
        "bulk:concurrency=2,inputs=8,words=5",
    )
    result = bench(server.url, *loads, *SHORT)
    one, bulk = result.points[0].loads
    assert (one.name, one.num_due, bulk.name) == ("one", 20, "bulk")
    assert bulk.inputs_per_s == pytest.approx(8 * bulk.requests_per_s, abs=0.01)
    lanes = {(asked.headers.get("x-bei-lane"), type(asked.body["input"])) for asked in server.posts}
    assert lanes == {("interactive", str), (None, list)}
    assert max(len(asked.body["input"]) for asked in server.posts if isinstance(asked.body["input"], list)) == 8


def test_a_sweep_of_two_servers_takes_turns_and_sends_both_the_same_texts(server: SmallServer, bench: Bench) -> None:
    with SmallServer() as other:
        result = bench(
            f"a={server.url}", f"b={other.url}", "--rates", "20,10", "--arrivals", "constant", "--workers", "1", *SHORT
        )
        texts = [sorted(asked.body["input"] for asked in each.posts) for each in (server, other)]
    assert texts[0] == texts[1]
    assert [(point.server, point.rate) for point in result.points] == [("a", 10), ("b", 10), ("a", 20), ("b", 20)]
    assert [point.loads[0].num_due for point in result.points] == [10, 10, 20, 20]


def test_failures_are_counted_by_kind_and_an_exit_code_for_them_is_asked_for(bench: Bench) -> None:
    kinds = iter(["good", *["good", "full", "empty", "good"] * 15])
    answers: dict[str, tuple[int, object]] = {"full": (429, "come back"), "empty": (200, {"data": []})}

    def respond(asked: Asked) -> tuple[int, object]:
        return answers.get(next(kinds)) or good(asked)

    with SmallServer(respond=respond) as server:
        result = bench(
            server.url,
            "--rate",
            "40",
            "--arrivals",
            "constant",
            "--fail-on-errors",
            "--warmup",
            "0",
            *SHORT[:2],
            code=1,
        )
    (load,) = result.points[0].loads
    assert load.failures == {"429": 10, "wrong body": 10}
    assert (load.num_due, load.latency.count) == (40, 20)
    assert load.errors == ["429 come back", "wrong body: 0 vectors for 1 inputs"]
    assert "20 of 40 requests failed" in result.warnings[0]


def test_ctrl_c_ends_a_run_early_and_what_was_measured_is_written(
    server: SmallServer, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadWorkers, "_messages", _interrupted_once(LoadWorkers._messages, server))
    begin_s = time.monotonic()
    result = bench(server.url, "--concurrency", "2", "--duration", "3000", "--warmup", "0", code=130)
    assert time.monotonic() - begin_s < 600
    assert result.interrupted
    assert "ended early" in result.warnings[0]
    (load,) = result.points[0].loads
    assert load.latency.count > 0
    assert 0 < result.points[0].measured_s < 600
    assert load.num_failed == load.failures.get("unanswered", 0) <= 2


def _interrupted_once(messages: Callable[..., object], server: SmallServer) -> Callable[..., object]:
    """Ctrl-C, once the server has answered a while."""
    done = threading.Event()

    def interrupting(fleet: LoadWorkers, timeout_s: float | None) -> object:
        if len(server.posts) > 20 and not done.is_set():
            done.set()
            raise KeyboardInterrupt
        return messages(fleet, timeout_s)

    return interrupting


def test_metrics_of_a_bei_server_are_read_meanwhile(bench: Bench) -> None:
    info = {"certificate": {"passed": True}, "target": "cpu", "version": "9.9", "max_batch_tokens": 16384}
    routes = {
        "/v1/models": {"data": [{"id": "m"}]},
        "/info": info,
        "/metrics": 'bei_batch_tokens_sum{model="m"} 5\nbei_batch_tokens_count{model="m"} 1\n',
    }
    with SmallServer(routes=routes) as server:
        result = bench(server.url, "--concurrency", "1", "--duration", "3", "--warmup", "0")
        assert result.points[0].samples
        assert result.servers[0].info == info
        assert result.servers[0].software == "bei 9.9"
        result = bench(server.url, "--concurrency", "1", *SHORT, "--no-scrape")
        assert result.points[0].samples is None


def test_keys_are_sent_and_kept_nowhere(
    server: SmallServer, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "sk-very-secret")
    bench(server.url, "--rate", "10", *SHORT, "--api-key-env", "A_KEY", "--header", "X-Team: s3cret-team")
    assert {asked.headers["authorization"] for asked in server.asked} == {"bearer sk-very-secret"}
    assert {asked.headers["x-team"] for asked in server.asked} == {"s3cret-team"}
    for path in tmp_path.iterdir():
        assert "secret" not in path.read_text()
        assert "s3cret" not in path.read_text()


def test_https_is_spoken_and_who_answers_is_checked(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = make_authority(tmp_path)
    pair = make_certificate(tmp_path, "server", authority)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.cert, pair.key)
    with SmallServer(tls=context) as server:
        inputs = ("--inputs", "200")  # answers of more than one TLS record
        result = bench(
            server.url, "--rate", "20", "--arrivals", "constant", *inputs, *SHORT, "--tls-ca", str(authority.cert)
        )
        assert result.points[0].loads[0].latency.count == 20
        assert "--tls-ca" in fails_with(capsys, "bench", server.url, *SHORT)


# Measurements that cannot be made: one line and exit code 2.


def test_a_server_that_is_not_there_or_answers_something_else_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with SmallServer() as server:
        port = server.port
    assert "Nothing answers at" in fails_with(capsys, "bench", f"http://127.0.0.1:{port}", "--model", "m")
    for respond, message in (
        (lambda asked: (401, {}), "--api-key-env"),
        (lambda asked: (404, {}), "right --dialect"),
        (lambda asked: (422, {"error": "no such thing"}), "no such thing"),
        (lambda asked: (200, {"data": []}), "0 vectors for 1 inputs"),
        (lambda asked: (200, ""), "the body is empty"),
    ):
        with SmallServer(respond=respond) as server:
            assert message in fails_with(capsys, "bench", server.url, *SHORT)
    with SmallServer(routes={"/v1/models": {"data": [{"id": "a"}, {"id": "b"}]}}) as server:
        assert "--model names one of a, b" in fails_with(capsys, "bench", server.url)
    with SmallServer(routes={}) as server:
        assert "name one with --model" in fails_with(capsys, "bench", server.url)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ftp://a"], "http://HOST:PORT"),
        (["http://a", "--rate", "3", "--concurrency", "2"], "give one"),
        (["http://a", "--rates", "3", "--concurrency", "2"], "leave out"),
        (["http://a", "--rates", "3,3"], "different numbers"),
        (["http://a", "--rates", "x"], "different numbers"),
        (["http://a", "--load", "x:inputs=3"], "neither a rate nor a concurrency"),
        (["http://a", "--load", "x:rate=3", "--load", "x:rate=4"], "a name of its own"),
        (["http://a", "--rates", "3", "--load", "x:rate=3"], "exactly one"),
        (["http://a", "--duration", "0"], "--duration"),
        (["http://a", "--warmup", "-1"], "--warmup"),
        (["http://a", "--timeout", "nan"], "--timeout"),
        (["http://a", "--workers", "0"], "--workers"),
        (["http://a", "--repeat-texts", "0"], "--repeat-texts"),
        (["http://a", "--path", "x"], "slash"),
        (["http://a", "http://b", "--model", "x", "--model", "y", "--model", "z"], "--model"),
        (["a=http://a", "a=http://b"], "names of their own"),
        (["http://a", "--words", "2"], "at least 3 words"),
        (["http://a", "--tls-key", "x"], "--tls-cert"),
        (["https://a", "--tls-ca", "/missing"], "--tls-ca /missing cannot be read: No such file"),
        (["http://a", "--texts", "/missing"], "no texts|cannot be read"),
        (["http://a", "--texts", __file__, "--words", "50"], "words and query_words are for random texts"),
        (["http://a", "--out", "/missing/x"], "no folder"),
        (["http://a", "--api-key-env", "NOT_THERE"], "no API key"),
        (["http://a", "--header", "Authorization: x"], "--api-key-env"),
        (["compare", "/missing.json", "/missing.json"], "not there"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = fails_with(capsys, "bench", *arguments)
    assert any(part in line for part in message.split("|")), line


def test_two_runs_are_compared(
    server: SmallServer, bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench(server.url, "--rate", "10", *SHORT)
    a, b, html = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.html"
    a.write_bytes((tmp_path / "result.json").read_bytes())
    bench(server.url, "--rate", "10", *SHORT)
    b.write_bytes((tmp_path / "result.json").read_bytes())
    main.main(["bench", "compare", str(a), str(b), "--html", str(html)])
    assert "B / A" in capsys.readouterr().out
    assert html.is_file()
    content = json.loads(b.read_text())
    content["setup"]["dialect"] = "tei"
    b.write_text(json.dumps(content))
    assert "dialect" in fails_with(capsys, "bench", "compare", str(a), str(b))


def test_without_hdrhistogram_a_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "hdrh.histogram", None)
    assert "pip install 'bei[bench]'" in fails_with(capsys, "bench", "http://a")
