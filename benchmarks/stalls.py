"""What the largest legal requests do to everybody else: the slowest /health while each is served, and memory.

The server is a process of its own with models of every kind whose engine costs nothing (tests/e2e/wide_server.py), so
what stalls or swells is the server. A thread asks for /health every 5 ms on a connection of its own; the request is
sent, and its answer read and dropped, by another process. Memory is the server's: RSS before, the peak (VmHWM, reset
before each case) and two seconds after the answer.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import write
from benchmarks.plots import BLUE, GREY, RED, bars, panels, save
from benchmarks.server import ROOT, free_port, tied
from tests.e2e.wide_server import save_models

_EVERY_S = 0.005
_AFTER_S = 2.0
_MB = 1_000_000
# Answers of 2.4 GB are asked for.
_FLAGS = ("--answer-limit", "3000000000", "--answer-memory", "3000000000", "--compress-answers")


class Case(NamedTuple):
    """A request: its path, what makes its body, and its headers."""

    path: str
    body: Callable[[], dict[str, Any]]
    headers: Mapping[str, str] = {}


def texts(count: int, num_words: int) -> list[str]:
    """Distinct texts."""
    return [f"abcd {index} " + "able " * (num_words - 2) for index in range(count)]


# "able" is one token of the wide tokenizer, the number one to five.
CASES: dict[str, Case] = {
    "nothing": Case("/health", dict),
    "/tokenize, a text of 7 MB": Case("/tokenize", lambda: {"inputs": "a " * 3_500_000, "model": "embedder"}),
    "/tokenize, a prompt of 7.9 MB": Case("/tokenize", lambda: {"prompt": "a " * 3_950_000, "model": "embedder"}),
    "/embed_all, 2,048 texts of 256 tokens": Case("/embed_all", lambda: {"inputs": texts(2048, 250)}),
    "/embed_all, 200 texts of 256 tokens": Case("/embed_all", lambda: {"inputs": texts(200, 250)}),
    "/predict_tokens, 2,048 texts of 256 tokens": Case(
        "/predict_tokens", lambda: {"inputs": [[text] for text in texts(2048, 250)]}
    ),
    "/predict_tokens, raw scores": Case(
        "/predict_tokens", lambda: {"inputs": [[text] for text in texts(2048, 250)], "raw_scores": True}
    ),
    "/v1/embeddings, 16,384 texts": Case("/v1/embeddings", lambda: {"input": texts(16384, 3), "model": "embedder"}),
    "/v1/embeddings, 16,384 texts, base64": Case(
        "/v1/embeddings", lambda: {"input": texts(16384, 3), "model": "embedder", "encoding_format": "base64"}
    ),
    "/embed, 8 MB of token ids": Case(
        "/embed", lambda: {"inputs": [[7000 + index % 20000] * 512 for index in range(2560)], "model": "embedder"}
    ),
    "/embed, a text of 8 MB, all escapes": Case("/embed", lambda: {"inputs": "\n" * 3_990_000 + "a"}),
    "/embed_sparse, 16,384 texts": Case("/embed_sparse", lambda: {"inputs": texts(16384, 3)}),
    "/classify, 4,096 texts, 1,000 labels": Case("/classify", lambda: {"input": texts(4096, 3), "model": "classifier"}),
    "/predict, 4,096 texts, 1,000 labels": Case(
        "/predict", lambda: {"inputs": [[text] for text in texts(4096, 3)], "model": "classifier"}
    ),
    "/rerank, a query of 300 kB, 1,000 documents": Case(
        "/rerank", lambda: {"query": "able " * 60_000, "texts": texts(1000, 50), "model": "reranker"}
    ),
    "/rerank, 7.9 MB of documents, returned": Case(
        "/v1/rerank", lambda: {"query": "word", "documents": texts(1000, 1570), "model": "reranker"}
    ),
    "/rerank, documents of 60 fields": Case(
        "/v1/rerank",
        lambda: {
            "query": "word",
            "documents": [{"text": "abcd", **{f"f{i}": i for i in range(60)}} for _ in range(10_000)],
            "model": "reranker",
        },
    ),
    "/v1/embeddings, 16,384 texts, MessagePack": Case(
        "/v1/embeddings",
        lambda: {"input": texts(16384, 3), "model": "embedder"},
        {"accept": "application/msgpack"},
    ),
    "/v1/embeddings, 16,384 texts, gzip": Case(
        "/v1/embeddings", lambda: {"input": texts(16384, 3), "model": "embedder"}, {"accept-encoding": "gzip"}
    ),
    "/v2/embed, 16,384 texts, four forms": Case(
        "/v2/embed",
        lambda: {
            "texts": texts(16384, 3),
            "model": "embedder",
            "input_type": "search_document",
            "embedding_types": ["float", "ubinary", "binary", "base64"],
        },
    ),
    "/pooling, 16,384 texts": Case("/pooling", lambda: {"input": texts(16384, 3), "model": "embedder"}),
    "/score, 16,383 pairs": Case("/score", lambda: {"text_1": "abcd", "text_2": texts(16383, 3), "model": "reranker"}),
    "/vertex, 16,384 instances": Case(
        "/vertex", lambda: {"instances": [{"inputs": text} for text in texts(16384, 3)], "model": "embedder"}
    ),
    "/decode, 60 lists of 65,536 ids": Case("/decode", lambda: {"ids": [[7] * 65_536] * 60, "model": "embedder"}),
    "/detokenize, 65,536 ids": Case("/detokenize", lambda: {"tokens": [7] * 65_536, "model": "embedder"}),
    "/embed, one list of 3.9 million ids": Case("/embed", lambda: {"inputs": [7] * 3_900_000, "model": "embedder"}),
    "/decode, one list of 3.9 million ids": Case("/decode", lambda: {"ids": [7] * 3_900_000, "model": "embedder"}),
    "/v1/embeddings, 2.6 million texts": Case(
        "/v1/embeddings", lambda: {"input": [""] * 2_600_000, "model": "embedder"}
    ),
    "/rerank, 2.6 million documents": Case(
        "/v1/rerank", lambda: {"query": "word", "documents": [""] * 2_600_000, "model": "reranker"}
    ),
}
# What a server with 2 GB of address space is asked; what its limits refuse is refused, the others are answered.
SMALL = ["/tokenize, a text of 7 MB", "/embed_all, 2,048 texts of 256 tokens", "/embed_all, 200 texts of 256 tokens"]
SMALL += ["/predict_tokens, raw scores", "/predict_tokens, 2,048 texts of 256 tokens", "/v1/embeddings, 16,384 texts"]


@contextmanager
def serving(paths: list[Path], *flags: str, memory: int = 0) -> Iterator[tuple[int, int]]:
    """Port and pid of a wide server."""
    port = free_port()
    limit = ["--memory", str(memory)] if memory else []
    command = [sys.executable, "-m", "tests.e2e.wide_server", *limit, *map(str, paths), "--port", str(port), *flags]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(tied(command), stderr=log, cwd=ROOT)
        try:
            _wait_ready(port, process)
            yield port, process.pid
        except BaseException:
            log.seek(0)
            print(log.read()[-3000:].decode(errors="replace"))
            raise
        finally:
            process.terminate()
            process.wait(60)


def _wait_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    give_up_s = time.monotonic() + 60
    while time.monotonic() < give_up_s and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("the server did not start")


class Poller(threading.Thread):
    """Asks for /health until ``stop``; ``waits_s`` are the times its answers took."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self._stop_asking = threading.Event()
        self.waits_s: list[float] = []
        self.start()

    def run(self) -> None:
        while not self._stop_asking.wait(_EVERY_S):
            started = time.perf_counter()
            self._connection.request("GET", "/health")
            response = self._connection.getresponse()
            response.read()
            assert response.status == 200
            self.waits_s.append(time.perf_counter() - started)
        self._connection.close()

    def stop(self) -> None:
        self._stop_asking.set()
        self.join()


def ask(port: int, path: str, body: bytes, headers: Mapping[str, str], answers: Any) -> None:
    """In a process of its own: the request, and its answer to the end. Puts status, bytes, seconds."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    started = time.perf_counter()
    connection.request("POST" if body else "GET", path, body or None, dict(headers))
    response = connection.getresponse()
    size, begin = 0, b""
    while piece := response.read(1 << 20):
        size += len(piece)
        begin = begin or piece[:200]
    answers.put((response.status, size, time.perf_counter() - started, begin.decode(errors="replace")))


def measured(port: int, pid: int, case: Case) -> dict[str, Any]:
    """One request beside the poller."""
    body = b"" if case.path == "/health" else json.dumps(case.body(), separators=(",", ":")).encode()
    before = _memory_mb(pid, "VmRSS")
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=ask, args=(port, case.path, body, case.headers, answers))
    child.start()
    poller = Poller(port)
    child.join()
    if not body:
        time.sleep(_AFTER_S)
    poller.stop()
    status, size, seconds, begin = answers.get()
    peak = _memory_mb(pid, "VmHWM")
    time.sleep(_AFTER_S)
    waits_ms = sorted(1000 * wait for wait in poller.waits_s)
    found = {
        "status": status,
        "request_mb": round(len(body) / _MB, 1),
        "answer_mb": round(size / _MB, 1),
        "seconds": round(seconds, 2),
        "slowest_health_ms": round(waits_ms[-1], 1),
        "health_ms_p99": round(waits_ms[int(0.99 * len(waits_ms))], 1),
        "num_health": len(waits_ms),
        "rss_before_mb": before,
        "rss_peak_mb": peak,
        "rss_after_mb": _memory_mb(pid, "VmRSS"),
        "allowed_mb": round(4 * size / _MB + 64, 1),
    }
    return found if status == 200 else {**found, "error": begin}


def _memory_mb(pid: int, name: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024 / _MB, 1)


def main() -> None:
    """All cases on one server, then some on a server with 2 GB of address space and the default limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--name", default="stalls")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"cases": {}, "2 GB of address space": {}}
    with tempfile.TemporaryDirectory() as folder:
        paths = save_models(Path(folder))
        with serving(paths, *_FLAGS) as (port, pid):
            for name in [name for _ in range(arguments.repetitions) for name in arguments.cases]:
                results["cases"].setdefault(name, []).append(measured(port, pid, CASES[name]))
                print(name, results["cases"][name][-1], flush=True)
        if set(SMALL) <= set(arguments.cases):
            with serving(paths, memory=2_000_000_000) as (port, pid):
                for name in SMALL:
                    results["2 GB of address space"][name] = measured(port, pid, CASES[name])
                    print("2 GB:", name, results["2 GB of address space"][name], flush=True)
    write(arguments.name, results)
    plot(arguments.name, results["cases"])


def plot(name: str, cases: Mapping[str, list[dict[str, Any]]]) -> None:
    """The slowest /health beside each request, and the memory of each by what it may take."""
    figure, ((waits, memory),) = panels(1, 2, (13.0, 0.8 + 0.27 * len(cases)), sharey=True)
    slowest = [[run["slowest_health_ms"] for run in runs] for runs in cases.values()]
    shares = [
        [(run["rss_peak_mb"] - run["rss_before_mb"]) / run["allowed_mb"] for run in runs] for runs in cases.values()
    ]
    for axes, values, most, title in (
        (waits, slowest, 50.0, "slowest /health, ms (50 are asked)"),
        (memory, shares, 1.0, "memory at its peak, of four times the answer and 64 MB"),
    ):
        bars(axes, list(cases), values, [RED if max(found) > most else BLUE for found in values])
        axes.axvline(most, color=GREY, linewidth=1)
        axes.set_title(title)
    save(figure, name)


if __name__ == "__main__":
    main()
