"""A peer that runs, with one model: what it answers, how long it took. Servers get requests from the benchmarks' own
client, libraries get calls in a process of theirs (``worker``)."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bei.core import Float32Array
from bei.utils.cpu_count import usable_cores
from benchmarks.harness.load import LANE, FloatArray, Stream, drive
from benchmarks.harness.servers import free_port, running, tied, wait_ready
from benchmarks.harness.texts import groups
from benchmarks.peers.data import Model, Peer, cache_folder, environment_folder
from benchmarks.peers.servers import COMMANDS, Served

_START_S = 600.0
Pair = tuple[str, Sequence[str]]  # a query and its documents


@dataclass(frozen=True)
class Given:
    """What a peer is started with. ``folder``: the checkpoint, or bei's artifact; ``binaries``: programs and files
    given by path."""

    model: Model
    folder: Path
    scratch: Path
    calibration: Sequence[str] = ()
    binaries: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Timed:
    """Calls or requests, answered. ``count``: of texts, or of documents."""

    latencies_s: FloatArray
    elapsed_s: float
    count: int

    @property
    def per_s(self) -> float:
        return self.count / self.elapsed_s


class Side:
    """``pid``: of the process that has all of the peer's work, or of its parent."""

    is_server = False

    def __init__(self, peer: Peer, pid: int) -> None:
        self.peer, self.pid = peer, pid

    def embed(self, requests: Sequence[Sequence[str]], concurrency: int, most_s: float | None = None) -> Timed:
        """``requests``: texts each. ``concurrency``: of a server's clients; a library gets single texts in calls of so
        many, and larger requests one after the other. ``most_s``: none begins later."""
        raise NotImplementedError

    def rerank(self, requests: Sequence[Pair], most_s: float | None = None) -> Timed:
        """One after the other."""
        raise NotImplementedError

    def vectors(self, texts: Sequence[str]) -> Float32Array:
        """float32 [n, width], of unit length."""
        raise NotImplementedError

    def scores(self, pair: Pair) -> list[float]:
        """In the order of the documents."""
        raise NotImplementedError

    def memory_mb(self) -> float:
        """Resident memory of the process and its children, in MB of 10^6 bytes."""
        process = psutil.Process(self.pid)
        return round(sum(each.memory_info().rss for each in (process, *process.children(recursive=True))) / 1e6, 1)


class ServerSide(Side):
    is_server = True

    def __init__(self, peer: Peer, pid: int, port: int, served: Served) -> None:
        super().__init__(peer, pid)
        self.port, self._served = port, served

    def body(self, texts: Sequence[str], encoding: str = "base64") -> str:
        given = texts[0] if len(texts) == 1 else list(texts)
        fields = {"model": self._served.model, "input": given, "encoding_format": encoding, **self._served.fields}
        return json.dumps(fields)

    def stream(self, name: str, requests: Sequence[Sequence[str]], **how: Any) -> Stream:
        """A stream of requests for embeddings, in the lane that it is named after where the peer has lanes."""
        return Stream(name, [self.body(each) for each in requests], self._served.embed, headers={LANE: name}, **how)

    def embed(self, requests: Sequence[Sequence[str]], concurrency: int, most_s: float | None = None) -> Timed:
        bodies = [self.body(each) for each in requests]
        return self._drive(bodies, self._served.embed, [len(each) for each in requests], concurrency, most_s)

    def rerank(self, requests: Sequence[Pair], most_s: float | None = None) -> Timed:
        bodies = [json.dumps(self._rerank_fields(pair)) for pair in requests]
        return self._drive(bodies, self._served.rerank, [len(documents) for _, documents in requests], 1, most_s)

    def _drive(
        self, bodies: Sequence[str], path: str, counts: Sequence[int], concurrency: int, most_s: float | None
    ) -> Timed:
        stream = Stream("all", bodies, path, concurrency=concurrency)
        outcome = drive(self.port, [stream], seconds=most_s)["all"].must_be_ok()
        return Timed(outcome.latencies_s, outcome.elapsed_s, sum(counts[index] for index in outcome.body))

    def _rerank_fields(self, pair: Pair) -> dict[str, Any]:
        key = "texts" if self.peer.software == "tei" else "documents"
        return {"model": self._served.model, "query": pair[0], key: list(pair[1]), **self._served.fields}

    def vectors(self, texts: Sequence[str]) -> Float32Array:
        rows: list[Any] = []
        for group in groups(texts, 32):
            answer = asked(self.port, self._served.embed, self.body(group, "float"))
            rows += [each["embedding"] for each in sorted(answer["data"], key=lambda each: each["index"])]
        return unit(rows)

    def scores(self, pair: Pair) -> list[float]:
        answer = asked(self.port, self._served.rerank, json.dumps(self._rerank_fields(pair)))
        ranks = answer["results"] if isinstance(answer, dict) else answer
        found = {each["index"]: each.get("relevance_score", each.get("score")) for each in ranks}
        return [float(found[index]) for index in range(len(pair[1]))]


class WorkerSide(Side):
    def __init__(self, peer: Peer, process: subprocess.Popen[str]) -> None:
        super().__init__(peer, process.pid)
        self._process = process

    def asked(self, **task: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailedError(f"{self.peer.name} has ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def embed(self, requests: Sequence[Sequence[str]], concurrency: int, most_s: float | None = None) -> Timed:
        calls = requests
        if requests and len(requests[0]) == 1:
            calls = [[each[0] for each in group] for group in groups(requests, concurrency)]
        return self._timed("embed", calls, [len(call) for call in calls], most_s)

    def rerank(self, requests: Sequence[Pair], most_s: float | None = None) -> Timed:
        return self._timed("rerank", requests, [len(documents) for _, documents in requests], most_s)

    def _timed(self, do: str, calls: Sequence[Any], counts: Sequence[int], most_s: float | None) -> Timed:
        found = self.asked(do=do, calls=calls, most_s=most_s)
        latencies = np.array(found["latencies_s"])
        return Timed(latencies, found["elapsed_s"], sum(counts[: len(latencies)]))

    def vectors(self, texts: Sequence[str]) -> Float32Array:
        return unit(self.asked(do="vectors", texts=list(texts))["vectors"])

    def scores(self, pair: Pair) -> list[float]:
        found: list[float] = self.asked(do="scores", query=pair[0], documents=list(pair[1]))["scores"]
        return found


class PeerFailedError(Exception):
    """A peer did not start, or has ended."""


@contextmanager
def started(peer: Peer, given: Given) -> Iterator[tuple[Side, float]]:
    """The peer, ready, and the seconds from its start to its first answer. Raises PeerFailedError."""
    with ExitStack() as stack:
        began = time.perf_counter()
        try:
            side = stack.enter_context(_server(peer, given) if peer.transport == "http" else _worker(peer, given))
            if given.model.task == "embed":
                side.vectors(["first"])
            else:
                side.scores(("first", ["one", "two"]))
        except (SystemExit, OSError, KeyError) as error:
            raise PeerFailedError(f"{peer.name}: {error}") from error
        yield side, time.perf_counter() - began


@contextmanager
def _server(peer: Peer, given: Given) -> Iterator[Side]:
    port = free_port()
    served = COMMANDS[peer.software](peer, given.model, given.folder, port, given.binaries)
    home = given.scratch / "home" / peer.environment
    home.mkdir(parents=True, exist_ok=True)
    env = _environment(peer, served.environment) | {"HOME": str(home)}
    with running(served.command, port, cwd=given.scratch, env=env, wait=False) as server:
        wait_ready(port, server.process, served.ready, most_s=_START_S)
        yield ServerSide(peer, server.process.pid, port, served)


@contextmanager
def _worker(peer: Peer, given: Given) -> Iterator[Side]:
    model = given.model
    prepared = cache_folder() / "prepared" / f"{model.name} {peer.name}".replace(" ", "-")
    prepared.mkdir(parents=True, exist_ok=True)
    python = environment_folder(peer.environment) / "bin" / "python"
    script = Path(__file__).with_name("worker.py")
    # -P and no PYTHONPATH: the environment's packages, and nothing of this checkout.
    command = tied([python, "-P", script])
    log = given.scratch / f"{peer.name}.log"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stderr=errors, env=_environment(peer, {}), **pipes)
    side = WorkerSide(peer, process)
    task = {
        "library": peer.software,
        "precision": peer.precision,
        "folder": str(given.folder),
        "prepared": str(prepared),
        "task": model.task,
        "max_tokens": model.max_tokens,
        "threads": usable_cores(),
        "calibration": list(given.calibration),
        **peer.settings,
    }
    try:
        try:
            side.asked(**task)
        except PeerFailedError as error:
            raise PeerFailedError(f"{error}: {log.read_text(errors='replace')[-600:]}") from None
        yield side
    finally:
        process.terminate()
        process.wait(60)


def _environment(peer: Peer, extra: Mapping[str, str]) -> dict[str, str]:
    """As many threads as cores, no more, and no look at the network."""
    dropped = ("PYTHONPATH", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BEI_") and name not in dropped}
    binaries = str(environment_folder(peer.environment) / "bin") if peer.environment else ""
    path = os.pathsep.join(filter(None, (binaries, kept.get("PATH", ""))))
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TQDM_DISABLE": "1", "DO_NOT_TRACK": "1"}
    return {**kept, "PATH": path, "OMP_NUM_THREADS": str(usable_cores()), **offline, **extra}


def asked(port: int, path: str, body: str) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", body.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.loads(answer.read())


def unit(rows: Any) -> Float32Array:
    vectors = np.asarray(rows, np.float32)
    found: Float32Array = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return found
