"""Traffic of a soak: requests of every route with what their answers must hold, and the faults of clients.

Every action makes a request, or does harm, and says by its return what came; ``expected`` are the statuses that are
right. GONE is an action that waits for no answer.
"""

from __future__ import annotations

import gzip
import http.client
import json
import random
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backports import zstd

# Tasks of bei.
EMBED, EMBED_TOKENS, EMBED_SPARSE = "embed", "embed_tokens", "embed_sparse"
RERANK, CLASSIFY, CLASSIFY_TOKENS = "rerank", "classify", "classify_tokens"

# The tiny models (tests.e2e.kinds) by task.
MODELS = {
    EMBED: "embedder",
    EMBED_TOKENS: "embedder",
    EMBED_SPARSE: "splade",
    RERANK: "reranker",
    CLASSIFY: "classifier",
    CLASSIFY_TOKENS: "ner",
}

GONE = 0
_TIMEOUT_S = 60.0
_LINGER_NOT = struct.pack("ii", 1, 0)  # close with a reset

Body = dict[str, Any]
Texts = Callable[[int], list[str]]


@dataclass(frozen=True)
class Action:
    """One deed of a client. ``weight``: how often, beside the others. ``path``: the route that it asks."""

    name: str
    weight: float
    run: Callable[[Client], int]
    expected: frozenset[int]
    path: str = ""


class Client:
    """A client with a kept-alive connection of its own for requests that are right, and new ones for the others."""

    def __init__(self, port: int, texts: Texts, rng: random.Random) -> None:
        self.port = port
        self.texts = texts
        self.rng = rng
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, method: str, path: str, body: Body | bytes | None = None, headers: Mapping[str, str] = {}) -> Any:
        """Status and parsed body (None of what is no JSON). A connection the server closed meanwhile is made anew."""
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        kept = self._connection is not None and self.rng.random() > 0.02
        if not kept:
            self.close()
            self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT_S)
        assert self._connection is not None
        try:
            self._connection.request(method, path, content, {"content-type": "application/json", **headers})
            response = self._connection.getresponse()
            read = response.read()
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            self.close()
            if not kept:
                raise
            return self.ask(method, path, body, headers)
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(read) if is_json else None

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=_TIMEOUT_S)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class WrongAnswerError(Exception):
    """An answer with 200 that is not what was asked for."""


# By kind: the body of a request for these texts, and the number of texts that an answer is about.
_KINDS: dict[str, tuple[Callable[[Client, list[str]], Body], Callable[[Any], int]]] = {
    "openai": (
        lambda client, texts: {"input": texts, "encoding_format": client.rng.choice(("float", "base64"))},
        lambda answer: len(answer["data"]),
    ),
    "ids": (lambda client, texts: {"input": _ids(client, texts)}, lambda answer: len(answer["data"])),
    "inputs": (lambda _, texts: {"inputs": texts}, len),
    "lists": (lambda _, texts: {"inputs": [[text] for text in texts]}, len),
    "input": (lambda _, texts: {"input": texts}, lambda answer: len(answer["data"])),
    "similarity": (
        lambda _, texts: {"inputs": {"source_sentence": texts[0], "sentences": texts[1:]}},
        lambda answer: len(answer) + 1,
    ),
    "rerank, TEI": (
        lambda _, texts: {"query": texts[0], "texts": texts[1:], "return_text": True},
        lambda answer: len(answer) + 1,
    ),
    "rerank": (lambda _, texts: {"query": texts[0], "documents": texts[1:]}, lambda answer: len(answer["results"]) + 1),
    "ranking": (
        lambda _, texts: {
            "query": {"text": texts[0]},
            "passages": [{"text": text} for text in texts[1:]],
            "truncate": "END",
        },
        lambda answer: len(answer["rankings"]) + 1,
    ),
    "score": (lambda _, texts: {"text_1": texts[0], "text_2": texts[1:]}, lambda answer: len(answer["data"]) + 1),
    "cohere": (
        lambda _, texts: {"texts": texts, "input_type": "search_document"},
        lambda answer: len(answer["embeddings"]),
    ),
    "cohere, v2": (
        lambda _, texts: {"texts": texts, "input_type": "search_document", "embedding_types": ["float", "ubinary"]},
        lambda answer: len(answer["embeddings"]["float"]),
    ),
    "voyage": (
        lambda client, texts: {"input": texts, **client.rng.choice(({}, {"encoding_format": "base64"}))},
        lambda answer: len(answer["data"]),
    ),
    "pooling": (
        lambda client, texts: {
            "input": texts,
            "task": "embed",
            "encoding_format": client.rng.choice(("float", "base64")),
        },
        lambda answer: len(answer["data"]),
    ),
    "vertex": (
        lambda _, texts: {"instances": [{"inputs": text} for text in texts]},
        lambda answer: len(answer["predictions"]),
    ),
    "decode": (lambda client, texts: {"ids": _ids(client, texts)}, len),
    "detokenize": (lambda client, texts: {"tokens": _ids(client, texts)[0]}, lambda _: 1),
}

# Route, weight, task, texts of a request, kind.
_ROUTES = (
    ("/v1/embeddings", 20, EMBED, 1, "openai"),
    ("/v1/embeddings", 6, EMBED, 32, "openai"),
    ("/v1/embeddings", 3, EMBED, 4, "ids"),
    ("/embed", 5, EMBED, 4, "inputs"),
    ("/embed_all", 3, EMBED_TOKENS, 4, "inputs"),
    ("/embed_sparse", 3, EMBED_SPARSE, 4, "inputs"),
    ("/similarity", 3, EMBED, 5, "similarity"),
    ("/rerank", 4, RERANK, 8, "rerank, TEI"),
    ("/v1/rerank", 3, RERANK, 8, "rerank"),
    ("/v2/rerank", 3, RERANK, 8, "rerank"),
    ("/predict", 4, CLASSIFY, 4, "lists"),
    ("/classify", 4, CLASSIFY, 4, "input"),
    ("/predict_tokens", 3, CLASSIFY_TOKENS, 4, "lists"),
    ("/tokenize", 4, EMBED, 4, "inputs"),
    ("/", 2, EMBED, 4, "inputs"),
    ("/invocations", 1, CLASSIFY, 4, "lists"),
    ("/embeddings", 1, EMBED, 4, "openai"),
    ("/v1/embed", 1, EMBED, 4, "cohere"),
    ("/v2/embed", 2, EMBED, 4, "cohere, v2"),
    ("/v1/ranking", 1, RERANK, 8, "ranking"),
    ("/v1/classify", 1, CLASSIFY, 4, "input"),
    ("/score", 1, RERANK, 8, "score"),
    ("/v1/score", 1, RERANK, 8, "score"),
    ("/pooling", 2, EMBED, 4, "pooling"),
    ("/vertex", 1, EMBED, 4, "vertex"),
    ("/decode", 2, EMBED, 4, "decode"),
    ("/detokenize", 2, EMBED, 1, "detokenize"),
    ("/tei/embed", 1, EMBED, 4, "inputs"),
    ("/voyage/v1/embeddings", 1, EMBED, 4, "voyage"),
    ("/openai/v1/embeddings", 1, EMBED, 4, "openai"),
    ("/openai/deployments/{model}/embeddings", 1, EMBED, 4, "openai"),
    ("/models/{model}", 1, EMBED, 4, "inputs"),
    ("/models/{model}/pipeline/feature-extraction", 1, EMBED, 4, "inputs"),
    ("/pipeline/feature-extraction/{model}", 1, EMBED, 4, "inputs"),
)
_READS = ("/info", "/v1/models", "/health", "/ready", "/metrics", "/openapi.json", "/docs")


def requests(models: Mapping[str, str]) -> list[Action]:
    """Requests that are right, of every route that ``models`` (names by task) can answer."""
    right = frozenset((200,))
    named = [
        (path.format(model=models[task]), weight, models[task], count, kind)
        for path, weight, task, count, kind in _ROUTES
        if task in models
    ]
    asked = [
        Action(f"{path}, {count} by {kind}", weight, _ask(path, model, count, kind), right, path=path)
        for path, weight, model, count, kind in named
    ]
    return asked + [Action(f"GET {path}", 1, _get(path, models), right, path=path) for path in _READS]


def faults(models: Mapping[str, str]) -> list[Action]:
    """Faults of clients. Weights are small, but there are many of them."""
    model = models[EMBED]

    def posted(body: Callable[[Client], Body | bytes], path: str = "/v1/embeddings") -> Callable[[Client], int]:
        return lambda client: int(client.ask("POST", path, body(client))[0])

    def given(value: Any) -> Callable[[Client], Body]:
        return lambda client: {"model": model, "input": value}

    right = {200}
    table: list[tuple[str, float, Callable[[Client], int], set[int]]] = [
        ("bad JSON", 2, posted(lambda client: b'{"input": ["a", '), {400}),
        ("a field is missing", 1, posted(lambda client: {"model": model}), {400}),
        ("a field of a wrong type", 1, posted(given({"text": 1})), {400}),
        ("an empty text", 1, posted(given(["a", ""])), {400}),
        ("ids out of range", 1, posted(given([[1, 10_000_000]])), {400}),
        ("too many inputs", 1, posted(given(["a"] * 16385)), {400, 413, 422}),
        ("a wrong task", 1, posted(lambda c: {"model": model, "query": "a", "texts": ["b"]}, "/rerank"), {400}),
        ("an unknown model", 1, posted(lambda client: {"model": "nobody", "input": "a"}), {404}),
        ("a wrong route", 1, posted(lambda client: {}, "/v1/nothing"), {404}),
        ("a wrong method", 1, lambda client: int(client.ask("GET", "/v1/embeddings")[0]), {405}),
        ("a text that is too long", 1, posted(lambda c: {"model": model, "input": c.texts(1)[0] * 500}), right),
        ("a deadline of 1 ms", 2, lambda client: _with_deadline(client, model), {200, 429, 504}),
        ("a body that is too large", 1, _too_large, {413, GONE}),
        ("no HTTP", 1, _no_http, {400}),
        ("a slow body", 1, lambda client: _slow_body(client, model), right),
        ("a chunked body", 2, lambda client: _chunked(client, model), right),
        ("a gzip body", 2, lambda client: _coded(client, model, "gzip", gzip.compress), right),
        ("a zstd body", 2, lambda client: _coded(client, model, "zstd", zstd.compress), right),
        ("a gzip body that is none", 1, lambda client: _coded(client, model, "gzip", bytes), {400}),
        ("a body that grows to 100 MB", 1, lambda client: _coded(client, model, "zstd", _bomb), {413}),
        ("an upgrade to HTTP/2", 1, lambda client: _upgrade(client, model), right),
        ("left amid the head", 1, lambda client: _leave(client, b"POST /v1/embeddings HTTP/1.1\r\nho"), {GONE}),
        ("left amid the body", 2, lambda client: _leave(client, _raw(client, model, 8)[:-200]), {GONE}),
        ("left before the answer", 2, lambda client: _leave(client, _raw(client, model, 64)), {GONE}),
        ("left amid the answer", 2, lambda client: _leave(client, _raw(client, model, 64), read=100), {GONE}),
        ("an idle connection", 1, lambda client: _leave(client, b"", wait_s=client.rng.uniform(0.5, 3)), {GONE}),
    ]
    return [Action(name, weight, run, frozenset(expected)) for name, weight, run, expected in table]


def _ask(path: str, model: str, count: int, kind: str) -> Callable[[Client], int]:
    body, counted = _KINDS[kind]

    def run(client: Client) -> int:
        status, answer = client.ask("POST", path, {"model": model, **body(client, client.texts(count))})
        if status == 200 and counted(answer) != count:
            raise WrongAnswerError(f"{path}: {counted(answer)} instead of {count}")
        return int(status)

    return run


def _get(path: str, models: Mapping[str, str]) -> Callable[[Client], int]:
    query = f"?model={models[EMBED]}" if path == "/info" else ""
    return lambda client: int(client.ask("GET", path + query)[0])


def _ids(client: Client, texts: Sequence[str]) -> list[list[int]]:
    return [[client.rng.randrange(5, 60) for _ in range(client.rng.randint(1, 40))] for _ in texts]


def _with_deadline(client: Client, model: str) -> int:
    body = {"model": model, "input": client.texts(16)}
    return int(client.ask("POST", "/v1/embeddings", body, {"Request-Timeout-Ms": "1"})[0])


def _raw(client: Client, model: str, count: int) -> bytes:
    content = json.dumps({"model": model, "input": client.texts(count)}).encode()
    return f"POST /v1/embeddings HTTP/1.1\r\nhost: a\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


def _status(connection: socket.socket) -> int:
    """Read an answer to its end."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    response.read()
    return response.status


def _too_large(client: Client) -> int:
    """Sends 9 MB, more than the default limit, or until the server has heard enough."""
    with client.connect() as connection:
        try:
            connection.sendall(b"POST /v1/embeddings HTTP/1.1\r\nhost: a\r\ncontent-length: 9000000\r\n\r\n")
            connection.sendall(b"{" * 9_000_000)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the answer may be there all the same
        try:
            return _status(connection)
        except (ConnectionResetError, http.client.RemoteDisconnected):
            return GONE  # it closed while much was unread, and the kernel threw the answer away with it


def _no_http(client: Client) -> int:
    with client.connect() as connection:
        connection.sendall(b"\x16\x03\x01 hello, is this TLS?\r\n\r\n")
        return _status(connection)


def _slow_body(client: Client, model: str) -> int:
    request = _raw(client, model, 2)
    with client.connect() as connection:
        step = len(request) // 4
        for start in range(0, len(request), step):
            connection.sendall(request[start : start + step])
            time.sleep(0.2)
        return _status(connection)


def _chunked(client: Client, model: str) -> int:
    content = json.dumps({"model": model, "input": client.texts(2)}).encode()
    half = len(content) // 2
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (content[:half], content[half:], b""))
    with client.connect() as connection:
        connection.sendall(b"POST /v1/embeddings HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" + chunks)
        return _status(connection)


def _coded(client: Client, model: str, coding: str, coded: Callable[[bytes], bytes]) -> int:
    content = json.dumps({"model": model, "input": client.texts(16)}).encode()
    return int(client.ask("POST", "/v1/embeddings", coded(content), {"content-encoding": coding})[0])


def _bomb(_: bytes) -> bytes:
    return zstd.compress(b" " * 100_000_000)


def _upgrade(client: Client, model: str) -> int:
    """As Java's client asks at its first request: the answer comes in HTTP/1.1, and the body must not be lost."""
    upgrade = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\ncontent-length:"
    with client.connect() as connection:
        connection.sendall(_raw(client, model, 2).replace(b"content-length:", upgrade, 1))
        return _status(connection)


def _leave(client: Client, sent: bytes, *, read: int = 0, wait_s: float = 0.0) -> int:
    """Send, read a little, wait, and be gone: by a proper end or by a reset."""
    with client.connect() as connection:
        connection.sendall(sent)
        if read:
            connection.recv(read)
        time.sleep(wait_s)
        if client.rng.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    return GONE
