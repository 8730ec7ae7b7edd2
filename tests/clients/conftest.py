"""One server for all clients, what it answers to plain HTTP, and a server whose queue is full."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
import numpy as np
import pytest

from bei.core import Float32Array
from tests.e2e.conftest import StartServer, env, gated, home
from tests.e2e.kinds import LABELS, MODELS, QUERY, TEXTS, TOLERANCE
from tests.e2e.process import DEADLINE_S, Server, serve, wait_until
from tests.e2e.test_queue import Call
from tests.support.artifacts import expected_vectors, token_ids
from tests.support.builds import build_artifact
from tests.support.zoo import save_case

__all__ = ["env", "gated", "home"]

T = TypeVar("T")

SERVED = ("embedder", "reranker", "classifier")
TOO_LONG = "cat " * 200  # the models read 48 tokens


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without the tier's packages its modules cannot be imported. Whoever asks for the tier gets the ImportError."""
    is_asked = "clients" in config.option.markexpr.replace("not clients", "")
    return None if is_asked or not collection_path.name.startswith("test_") else True


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Every test beside this file belongs to the tier."""
    for item in items:
        if item.nodeid.startswith("tests/clients/"):
            item.add_marker(pytest.mark.clients)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, env: Mapping[str, str], home: Path) -> Iterator[Server]:
    """A server of the three models in SERVED, which reads at most 48 tokens of a text."""
    folder = tmp_path_factory.mktemp("clients")
    paths = []
    for name in SERVED:
        checkpoint = save_case(folder / name, MODELS[name])
        paths.append(build_artifact(checkpoint, folder / f"{name}-built", name=name, reference="engine").path)
    settings = {
        "BEI_OPENAI_TOKEN_IDS": "refuse",
        "BEI_BATCH_DIR": str(folder / "batches"),
        "BEI_GRPC_PORT": "0",
    }  # the first as by default
    with serve(paths, {**env, **settings}, home) as server:
        yield server


def post(server: Server, path: str, **body: object) -> Any:
    """The content of a good answer to plain HTTP."""
    response = httpx.post(server.url + path, json=body, timeout=DEADLINE_S)
    assert response.status_code == 200, response.text
    return response.json()


@dataclass(frozen=True)
class Expected:
    """What the server answers to plain HTTP. Rows are in the order of TEXTS, scores are of QUERY and each text."""

    vectors: Float32Array
    short: Float32Array  # 8 dimensions
    cut: Float32Array  # the one row of TOO_LONG
    scores: Float32Array
    logits: Float32Array
    labels: Float32Array  # a column for each of LABELS
    num_tokens: int

    @property
    def order(self) -> list[int]:
        """Of the texts, best first."""
        order: list[int] = np.argsort(-self.scores, kind="stable").tolist()
        return order

    def check_vectors(self, found: object, kind: Literal["vectors", "short", "cut"] = "vectors") -> None:
        """Fails unless ``found`` are these vectors."""
        np.testing.assert_allclose(np.array(found), getattr(self, kind), atol=TOLERANCE)

    def check_ranking(self, found: Sequence[tuple[int, float]], top: int | None = None, *, raw: bool = False) -> None:
        """Fails unless ``found`` are the ``top`` best texts with their scores, or logits, best first."""
        best = self.order[:top]
        assert [index for index, _ in found] == best
        scores = self.logits if raw else self.scores
        np.testing.assert_allclose([score for _, score in found], scores[best], atol=TOLERANCE)


@pytest.fixture(scope="session")
def expected(server: Server) -> Expected:
    """From the routes that tests/e2e compares with transformers."""

    def vectors(texts: Sequence[str], **fields: object) -> Float32Array:
        data = post(server, "/v1/embeddings", input=texts, model="embedder", **fields)["data"]
        return np.array([entry["embedding"] for entry in data], np.float32)

    def scores(*, raw: bool) -> Float32Array:
        ranks = post(server, "/rerank", query=QUERY, texts=TEXTS, model="reranker", raw_scores=raw)
        found = {rank["index"]: rank["score"] for rank in ranks}
        return np.array([found[index] for index in range(len(TEXTS))], np.float32)

    classified = post(server, "/predict", inputs=[[text] for text in TEXTS], model="classifier")
    by_label = [{entry["label"]: entry["score"] for entry in entries} for entries in classified]
    return Expected(
        vectors=vectors(TEXTS),
        short=vectors(TEXTS, dimensions=8),
        cut=vectors([TOO_LONG]),
        scores=scores(raw=False),
        logits=scores(raw=True),
        labels=np.array([[entry[label] for label in LABELS] for entry in by_label], np.float32),
        num_tokens=post(server, "/v1/embeddings", input=TEXTS, model="embedder")["usage"]["total_tokens"],
    )


def run(call: Awaitable[T]) -> T:
    """The result of an asynchronous call, on an event loop of its own."""

    async def wait() -> T:
        return await asyncio.wait_for(call, DEADLINE_S)

    return asyncio.run(wait())


class FullServer:
    """A server of the embedder ``tiny`` whose queue is full until ``open``."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._first = Call(server, [1])
        server.wait_for_log("engine has")
        self.url = server.url

    def open(self) -> None:
        """Let the queue empty."""
        self._server.say("open")
        assert self._first.status() == 200

    def check_vector(self, found: object) -> None:
        """Fails unless ``found`` is the vector of the text ``hello``."""
        np.testing.assert_allclose(np.array(found), expected_vectors([token_ids("hello")])[0], atol=TOLERANCE)

    def check_retried(self, call: Callable[[], object], status: int = 429) -> None:
        """Fails unless ``call`` embeds ``hello``, and was refused with ``status`` before the queue was emptied."""
        refusals = {"status": str(status)}
        with ThreadPoolExecutor(1) as pool:
            called = pool.submit(call)
            wait_until(lambda: called.done() or self._server.metric("bei_requests_total", **refusals) >= 1, "a refusal")
            self.open()
            self.check_vector(called.result(DEADLINE_S))
        assert self._server.metric("bei_requests_total", **refusals) >= 1


@pytest.fixture
def full(gated: StartServer) -> FullServer:
    """A server whose queue is full."""
    return FullServer(gated("--max-queue-tokens", "4"))
