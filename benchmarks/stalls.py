"""The cost of the largest legal requests to everybody else: the slowest /health while each is served, and memory.

    python -m benchmarks.stalls [--repetitions 1] [--cases NAME...]
    python -m benchmarks.stalls --images [--repetitions 1]

The server is a process of its own with models of every kind whose engine costs nothing (tests/e2e/wide_server.py), so
stalls and memory are the server's. A thread asks for /health every 5 ms on a connection of its own; the request is
sent, and its answer read and dropped, by another process. Memory is the server's: RSS before, the peak (VmHWM, reset
before each case) and two seconds after the answer. Then some cases on a server with 2 GB of address space and the
default limits. ``--images``: `bei serve` of a tiny CLIP instead, and images as large as its limits let in.
"""

from __future__ import annotations

import http.client
import io
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
from PIL import Image

from benchmarks.grpc_beside_http import INFER, infer_message
from benchmarks.harness.arguments import parsed
from benchmarks.harness.record import write
from benchmarks.harness.sampling import repeating
from benchmarks.harness.servers import free_port, running
from tests.e2e.wide_server import MOST_LABELS, save_models
from tests.support.builds import build_artifact
from tests.support.two_towers import data_url, save_clip

_EVERY_S = 0.005
_AFTER_S = 2.0
_MB = 1_000_000
# Answers of 2.4 GB are asked for.
_FLAGS = ("--answer-limit", "3000000000", "--answer-memory", "3000000000", "--compress-answers")
_GRPC_PORT = free_port()


class Case(NamedTuple):
    """A request: its path, its body, made when it is needed, and its headers. Bytes are a message of gRPC."""

    path: str
    body: Callable[[], dict[str, Any] | bytes]
    headers: Mapping[str, str] = {}


def texts(count: int, num_words: int = 3) -> list[str]:
    """Distinct texts: "able" is one token of the wide tokenizer, the number one to five."""
    return [f"abcd {index} " + "able " * (num_words - 2) for index in range(count)]


def lists(*sizes: int) -> list[list[str]]:
    return [[text] for text in texts(*sizes)]


def field_documents(count: int) -> list[dict[str, Any]]:
    return [{"text": "abcd", **{f"f{i}": i for i in range(60)}} for _ in range(count)]


def jpeg(side: int) -> str:
    """The data URL of a square JPEG of noise: 1.4 bytes a pixel."""
    levels = np.random.default_rng(side).integers(0, 256, (side, side, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(levels).save(file, "JPEG", quality=97)
    return data_url(file.getvalue())


_MANY = 16_384
_FORMS = {"input_type": "search_document", "embedding_types": ["float", "ubinary", "binary", "base64"]}
_ON: dict[str, dict[str, Any]] = {name: {"model": name} for name in ("embedder", "classifier", "reranker")}
_EMBEDDER, _CLASSIFIER, _RERANKER = _ON.values()
_QUESTIONS = {"questions": {f"q{index}": {"type": "noul", "instructions": "word"} for index in range(400)}}
CASES: dict[str, Case] = {
    "nothing": Case("/health", dict),
    "/tokenize, a text of 7 MB": Case("/tokenize", lambda: {"inputs": "a " * 3_500_000, **_EMBEDDER}),
    "/tokenize, a prompt of 7.9 MB": Case("/tokenize", lambda: {"prompt": "a " * 3_950_000, **_EMBEDDER}),
    "/embed_all, 2,048 texts of 256 tokens": Case("/embed_all", lambda: {"inputs": texts(2048, 250)}),
    "/embed_all, 200 texts of 256 tokens": Case("/embed_all", lambda: {"inputs": texts(200, 250)}),
    "/predict_tokens, 2,048 texts of 256 tokens": Case("/predict_tokens", lambda: {"inputs": lists(2048, 250)}),
    "/predict_tokens, raw scores": Case("/predict_tokens", lambda: {"inputs": lists(2048, 250), "raw_scores": True}),
    "/v1/embeddings, 16,384 texts": Case("/v1/embeddings", lambda: {"input": texts(_MANY), **_EMBEDDER}),
    "/v1/embeddings, 16,384 texts, base64": Case(
        "/v1/embeddings", lambda: {"input": texts(_MANY), "encoding_format": "base64", **_EMBEDDER}
    ),
    "/embed, 8 MB of token ids": Case(
        "/embed", lambda: {"inputs": [[7000 + index % 20000] * 512 for index in range(2560)], **_EMBEDDER}
    ),
    "/embed, a text of 8 MB, all escapes": Case("/embed", lambda: {"inputs": "\n" * 3_990_000 + "a"}),
    "/embed_sparse, 16,384 texts": Case("/embed_sparse", lambda: {"inputs": texts(_MANY)}),
    "/classify, 4,096 texts, 1,000 labels": Case("/classify", lambda: {"input": texts(4096), **_CLASSIFIER}),
    "/predict, 4,096 texts, 1,000 labels": Case("/predict", lambda: {"inputs": lists(4096), **_CLASSIFIER}),
    "/rerank, a query of 300 kB, 1,000 documents": Case(
        "/rerank", lambda: {"query": "able " * 60_000, "texts": texts(1000, 50), **_RERANKER}
    ),
    "/rerank, 7.9 MB of documents, returned": Case(
        "/v1/rerank", lambda: {"query": "word", "documents": texts(1000, 1570), **_RERANKER}
    ),
    "/rerank, documents of 60 fields": Case(
        "/v1/rerank", lambda: {"query": "word", "documents": field_documents(10_000), **_RERANKER}
    ),
    "/v1/embeddings, 16,384 texts, MessagePack": Case(
        "/v1/embeddings", lambda: {"input": texts(_MANY), **_EMBEDDER}, {"accept": "application/msgpack"}
    ),
    "/v1/embeddings, 16,384 texts, gzip": Case(
        "/v1/embeddings", lambda: {"input": texts(_MANY), **_EMBEDDER}, {"accept-encoding": "gzip"}
    ),
    "/v2/embed, 16,384 texts, four forms": Case("/v2/embed", lambda: {"texts": texts(_MANY), **_FORMS, **_EMBEDDER}),
    "/pooling, 16,384 texts": Case("/pooling", lambda: {"input": texts(_MANY), **_EMBEDDER}),
    "/score, 16,383 pairs": Case("/score", lambda: {"text_1": "abcd", "text_2": texts(_MANY - 1), **_RERANKER}),
    "/vertex, 16,384 instances": Case(
        "/vertex", lambda: {"instances": [{"inputs": text} for text in texts(_MANY)], **_EMBEDDER}
    ),
    "/decode, 60 lists of 65,536 ids": Case("/decode", lambda: {"ids": [[7] * 65_536] * 60, **_EMBEDDER}),
    "/detokenize, 65,536 ids": Case("/detokenize", lambda: {"tokens": [7] * 65_536, **_EMBEDDER}),
    "/embed, one list of 3.9 million ids": Case("/embed", lambda: {"inputs": [7] * 3_900_000, **_EMBEDDER}),
    "/decode, one list of 3.9 million ids": Case("/decode", lambda: {"ids": [7] * 3_900_000, **_EMBEDDER}),
    "/v1/embeddings, 2.6 million texts": Case("/v1/embeddings", lambda: {"input": [""] * 2_600_000, **_EMBEDDER}),
    "/v1/embeddings, 16,384 texts, a prompt of 500 characters": Case(
        "/v1/embeddings", lambda: {"input": texts(_MANY), "prompt": "able " * 100, **_EMBEDDER}
    ),
    "/v1/extract, 16 texts of 350 words, 25 labels": Case(
        "/v1/extract", lambda: {"input": texts(16, 350), "labels": texts(MOST_LABELS), "model": "spans"}
    ),
    "/v1/extract, 16 texts of 350 words, every span": Case(
        "/v1/extract", lambda: {"input": texts(16, 350), "labels": texts(10), "threshold": 0, "model": "spans"}
    ),
    "/v1/systemone, 400 questions": Case("/v1/systemone", lambda: {**_QUESTIONS, "state": "able " * 450, **_RERANKER}),
    "/v1/systemone, a state of 7 MB": Case(
        "/v1/systemone", lambda: {**_QUESTIONS, "state": texts(1000, 1400), **_RERANKER}
    ),
    "ModelInfer, 16,384 texts": Case(INFER, lambda: infer_message("embedder", texts(_MANY))),
    "/rerank, 2.6 million documents": Case(
        "/v1/rerank", lambda: {"query": "word", "documents": [""] * 2_600_000, **_RERANKER}
    ),
}
_IMAGE_FLAGS = ("--payload-limit", "16000000", "--image-megabytes", "9")
IMAGE_CASES: dict[str, Case] = {
    "nothing": CASES["nothing"],
    "/v1/embeddings, a JPEG of 8 MB": Case("/v1/embeddings", lambda: {"input": [{"image": jpeg(2400)}]}),
    "/v1/embeddings, 16 JPEGs of 0.6 MB": Case("/v1/embeddings", lambda: {"input": [{"image": jpeg(660)}] * 16}),
    "/v1/embeddings, a base64 of 8 MB that is no image": Case(
        "/v1/embeddings", lambda: {"input": [{"image": data_url(bytes(8_000_000))}]}
    ),
}
# What a server with 2 GB of address space is asked; what its limits refuse is refused, the others are answered.
SMALL = ["/tokenize, a text of 7 MB", "/embed_all, 2,048 texts of 256 tokens", "/embed_all, 200 texts of 256 tokens"]
SMALL += ["/predict_tokens, raw scores", "/predict_tokens, 2,048 texts of 256 tokens", "/v1/embeddings, 16,384 texts"]


def main() -> None:
    options = parsed(__doc__, images=False, cases=list(CASES), repetitions=1)
    with tempfile.TemporaryDirectory() as folder:
        if options.images:
            _measure_images(Path(folder), options.repetitions)
        else:
            _measure_texts(Path(folder), options.cases, options.repetitions)


def _measure_images(folder: Path, repetitions: int) -> None:
    artifact = build_artifact(save_clip(folder / "checkpoint"), folder / "clip")
    with _serving(["-m", "bei", "serve", artifact.path], *_IMAGE_FLAGS) as (port, pid):
        write("stalls-images", {"cases": _all_measured(port, pid, IMAGE_CASES, repetitions)})


def _measure_texts(folder: Path, cases: list[str], repetitions: int) -> None:
    command = ["-m", "tests.e2e.wide_server"]
    paths = save_models(folder)
    results: dict[str, Any] = {"cases": {}, "2 GB of address space": {}}
    with _serving([*command, *paths], *_FLAGS, "--grpc-port", str(_GRPC_PORT)) as (port, pid):
        results["cases"] = _all_measured(port, pid, {name: CASES[name] for name in cases}, repetitions)
    if set(SMALL) <= set(cases):
        with _serving([*command, "--memory", 2_000_000_000, *paths]) as (port, pid):
            small = _all_measured(port, pid, {name: CASES[name] for name in SMALL}, 1)
            results["2 GB of address space"] = {name: rows[0] for name, rows in small.items()}
    write("stalls", results)


def _all_measured(port: int, pid: int, cases: Mapping[str, Case], repetitions: int) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for name in [*cases] * repetitions:
        rows.setdefault(name, []).append(measured(port, pid, cases[name]))
        print(name, rows[name][-1], flush=True)
    return rows


@contextmanager
def _serving(command: Sequence[object], *flags: str) -> Iterator[tuple[int, int]]:
    """Port and pid of a server that ``command`` starts."""
    port = free_port()
    with running([sys.executable, *command, "--port", port, *flags], port) as server:
        yield port, server.process.pid


def measured(port: int, pid: int, case: Case) -> dict[str, Any]:
    """One request beside a thread that asks for /health."""
    made = case.body()
    body = made if isinstance(made, bytes) else json.dumps(made, separators=(",", ":")).encode() if made else b""
    before = _memory_mb(pid, "VmRSS")
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_ask, args=(port, case, body, answers))
    child.start()
    with _asking_for_health(port) as waits_s:
        child.join()
        if not body:
            time.sleep(_AFTER_S)
    status, size, seconds, begin = answers.get()
    peak = _memory_mb(pid, "VmHWM")
    time.sleep(_AFTER_S)
    waits_ms = sorted(1000 * wait for wait in waits_s)
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


def _ask(port: int, case: Case, body: bytes, answers: Any) -> None:
    """In a process of its own: the request, and its answer to the end. Puts status, bytes, seconds and a beginning."""
    started = time.perf_counter()
    if case.path == INFER:
        with grpc.insecure_channel(f"127.0.0.1:{_GRPC_PORT}", [("grpc.max_receive_message_length", -1)]) as channel:
            answer = channel.unary_unary(case.path)(body)
        answers.put((200, len(answer), time.perf_counter() - started, ""))
        return
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST" if body else "GET", case.path, body or None, dict(case.headers))
    response = connection.getresponse()
    size, begin = 0, b""
    while piece := response.read(1 << 20):
        size += len(piece)
        begin = begin or piece[:200]
    answers.put((response.status, size, time.perf_counter() - started, begin.decode(errors="replace")))


@contextmanager
def _asking_for_health(port: int) -> Iterator[list[float]]:
    """The seconds that the answers took."""
    waits_s: list[float] = []
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:

        def ask() -> bool:
            started = time.perf_counter()
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            assert response.status == 200
            waits_s.append(time.perf_counter() - started)
            return True

        with repeating(ask, _EVERY_S):
            yield waits_s


def _memory_mb(pid: int, name: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024 / _MB, 1)


if __name__ == "__main__":
    main()
