"""Answers that are rendered while they are sent: what is held and given back, and clients that leave or see a
failure. The ASGI side; the same over sockets is in tests/e2e/test_event_loop.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from bei.engine.fake import FakeEngine
from bei.server.endpoint import context, render, route
from bei.server.endpoint.render import Notation
from bei.server.http import memory_budgets, responses
from bei.server.http.memory_budgets import AnswerAccount, AnswerMemory
from tests.bei.server.app import ROUTE, App, check_error
from tests.bei.server.conftest import MakeApp
from tests.bei.server.endpoint.test_route import GOOD, filled
from tests.bei.server.kinds import KINDS, post, save_kind
from tests.support.artifacts import LIMITS
from tests.support.engines import GatedEngine

Message = dict[str, Any]
BODY = json.dumps({"input": [[token] for token in range(1, 31)]}).encode()


@pytest.fixture(autouse=True)
def _in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "INLINE_BYTES", 0)
    monkeypatch.setattr(context, "INLINE_BYTES", 0)
    monkeypatch.setattr(render, "PIECE_BYTES", 100)


class Client:
    """A client of the embeddings route that takes its answer as ``on_body`` lets it."""

    def __init__(self, app: App, on_body: Callable[[int], Any] | None = None, http_version: str = "1.1") -> None:
        self._app = app
        self._on_body = on_body
        self._version = http_version
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": BODY, "more_body": False})
        self.sent: list[Message] = []

    async def request(self) -> None:
        """To the end."""
        scope = {"type": "http", "method": "POST", "path": ROUTE, "query_string": b"", "headers": [], "root_path": ""}
        await self._app.asgi({**scope, "http_version": self._version}, self._incoming.get, self._send)

    def leave(self) -> None:
        """Disconnect."""
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def is_complete(self) -> bool:
        """Whether it has the end of a body."""
        return any(message["type"] == "http.response.body" and not message.get("more_body") for message in self.sent)

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        if self._on_body is not None and message.get("more_body"):
            found = self._on_body(len(self.sent))
            if found is not None:
                await found


def num_open(app: App) -> int:
    (service,) = app.models
    found: int = service._admission.num_open
    return found


def counted(app: App, status: str) -> float:
    return float(app.metrics.requests.labels(ROUTE, status).value)


def test_what_was_admitted_is_held_until_the_last_piece_is_sent(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS))
    held: list[int] = []
    client = Client(app, lambda _: held.append(num_open(app)))
    app.run(client.request())
    assert client.is_complete
    assert len(held) > 5
    assert set(held) == {1}
    assert num_open(app) == 0
    assert counted(app, "200") == 1


def test_pieces_are_rendered_when_those_before_are_taken(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app(FakeEngine(LIMITS))
    rendered: list[bytes] = []

    def noting(content: object, _: Notation) -> Iterator[bytes]:
        for piece in render.pieces_of(content):
            rendered.append(piece)
            yield piece

    monkeypatch.setattr(route, "pieces_of", noting)
    ahead: list[int] = []
    client = Client(app, lambda num_sent: ahead.append(len(rendered) - (num_sent - 1)))
    app.run(client.request())
    assert len(ahead) > 5
    assert set(ahead) == {0}


def test_a_client_that_leaves_in_the_middle_gives_everything_back(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS))

    async def leaves(num_sent: int) -> None:
        if num_sent == 3:
            client.leave()
            await asyncio.Event().wait()  # a full socket that nobody reads

    client = Client(app, leaves)
    app.run(client.request())
    assert not client.is_complete
    assert num_open(app) == 0
    assert counted(app, "499") == 1
    assert app.embed(input="a").status_code == 200


@pytest.mark.parametrize("turns", range(6))
def test_a_client_that_leaves_as_its_socket_empties_is_left(make_app: MakeApp, turns: int) -> None:
    """A server that sees a client leave also wakes who waits for its socket: in the same turn of the loop, or near."""
    app = make_app(FakeEngine(LIMITS))

    async def leaves(num_sent: int) -> None:
        if num_sent == 3:
            client.leave()
            for _ in range(turns):
                await asyncio.sleep(0)

    client = Client(app, leaves)
    app.run(client.request())
    assert not client.is_complete
    assert len(client.sent) <= 4
    assert num_open(app) == 0
    assert counted(app, "499") == 1


def test_a_client_that_takes_nothing_any_more_is_left(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "_TAKE_S", 0.05)
    monkeypatch.setattr(responses, "_BYTES_PER_S", 10**9)
    app = make_app(FakeEngine(LIMITS))

    async def stalls(num_sent: int) -> None:
        if num_sent == 3:
            await asyncio.Event().wait()

    client = Client(app, stalls)
    app.run(client.request())
    assert not client.is_complete
    assert num_open(app) == 0
    assert counted(app, "499") == 1


def failing_after(num_pieces: int) -> Callable[[object, Notation], Iterator[bytes]]:
    def pieces(content: object, _: Notation) -> Iterator[bytes]:
        for index, piece in enumerate(render.pieces_of(content)):
            if index == num_pieces:
                raise ValueError("a bug")
            yield piece

    return pieces


def test_a_failure_in_the_middle_is_no_whole_answer(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "pieces_of", failing_after(3))
    app = make_app(FakeEngine(LIMITS))
    client = Client(app)
    with pytest.raises(ValueError, match="a bug"):
        app.run(client.request())
    assert not client.is_complete
    assert num_open(app) == 0
    assert (counted(app, "200"), counted(app, "500")) == (0, 1)


def test_a_failure_in_the_first_piece_is_an_error_as_any_other(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "pieces_of", failing_after(0))
    app = make_app(FakeEngine(LIMITS))
    check_error(app.post(BODY), 500, code="bei_error")
    assert num_open(app) == 0


def test_http_1_0_gets_its_answer_with_a_length(make_app: MakeApp) -> None:
    app = make_app(FakeEngine(LIMITS))
    old, new = Client(app, http_version="1.0"), Client(app)
    app.run(old.request())
    app.run(new.request())
    start, *pieces = old.sent
    body = b"".join(message["body"] for message in pieces)
    assert (b"content-length", str(len(body)).encode()) in start["headers"]
    assert body == b"".join(message["body"] for message in new.sent[1:])


def test_an_answer_to_http_1_0_is_sent_in_pieces_and_held_until_the_last_one(
    make_app: MakeApp, answers: list[AnswerMemory]
) -> None:
    app = make_app(FakeEngine(LIMITS))
    held: list[tuple[int, bool]] = []
    client = Client(app, lambda _: held.append((num_open(app), answers[0].held > 0)), "1.0")
    app.run(client.request())
    assert len(held) > 5
    assert set(held) == {(1, True)}
    assert max(len(message.get("body", b"")) for message in client.sent) <= 100
    assert (num_open(app), answers[0].held) == (0, 0)


def test_an_http_1_0_client_that_takes_nothing_any_more_is_left(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "_TAKE_S", 0.05)
    monkeypatch.setattr(responses, "_BYTES_PER_S", 10**9)
    app = make_app(FakeEngine(LIMITS))

    async def stalls(num_sent: int) -> None:
        if num_sent == 3:
            await asyncio.Event().wait()

    client = Client(app, stalls, "1.0")
    app.run(client.request())
    assert not client.is_complete
    assert num_open(app) == 0
    assert counted(app, "499") == 1


# The limit of answers

LIMITED = sorted(
    set(GOOD)
    - {"/similarity", "/rerank", "/v1/rerank", "/v2/rerank", "/v1/ranking", "/score", "/v1/score"}
    - {"/v1/decisions", "/v1/systemone"}
)


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """Every kind of model behind a low limit of answers."""
    folder = tmp_path_factory.mktemp("limited")
    app = App(*(save_kind(folder / kind, kind) for kind in KINDS), answer_limit=500, max_client_batch_size=64)
    yield app
    app.close()


@pytest.mark.parametrize("path", LIMITED)
def test_an_answer_beyond_the_limit_is_refused_and_says_what_to_do(limited: App, path: str) -> None:
    """Before the engine computes it, where the tokens or the number of inputs say enough."""
    model = GOOD[path][2]
    assert post(limited, path, **filled(path, ["cat"]), model=model).status_code == 200
    response = post(limited, path, **filled(path, [f"cat {'hello ' * n}" for n in range(40)]), model=model)
    check_error(response, 413, "the limit is 500: send fewer or shorter inputs at a time", code="answer_too_large")
    assert all(service._admission.num_open == 0 for service in limited.models)


@pytest.mark.parametrize("path", sorted(set(LIMITED) - {"/embed_sparse", "/decode", "/v1/extract"}))
def test_what_is_refused_for_its_answer_is_not_computed(tmp_path: Path, path: str) -> None:
    artifact, engine = save_kind(tmp_path / "model", GOOD[path][2])
    app = App((artifact, engine), answer_limit=500)
    try:
        check_error(post(app, path, **filled(path, [f"cat {'hello ' * n}" for n in range(30)])), 413)
        assert engine.batches == []
    finally:
        app.close()


def test_aggregated_entities_count_as_if_every_token_were_one(limited: App) -> None:
    body = {"model": "ner", "aggregation_strategy": "simple"}
    assert post(limited, "/predict_tokens", inputs=["cat"], **body).status_code == 200
    check_error(post(limited, "/predict_tokens", inputs=["a b c d e f g"], **body), 413, code="answer_too_large")


# The memory of all answers


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[AnswerMemory]:
    """That of each app made."""
    made: list[AnswerMemory] = []

    def noting(limit: int) -> AnswerMemory:
        made.append(AnswerMemory(limit))
        return made[-1]

    monkeypatch.setattr("bei.server.app.AnswerMemory", noting)
    return made


def test_answers_that_do_not_fit_together_wait_outside(make_app: MakeApp, answers: list[AnswerMemory]) -> None:
    engine = GatedEngine(LIMITS)
    app = make_app(engine, answer_limit=500, answer_memory=500)
    body = json.dumps({"input": ["a", "b", "c"]}).encode()

    async def two() -> httpx.Response:
        first = asyncio.ensure_future(app.client.post(ROUTE, content=body))
        await asyncio.to_thread(engine.wait_entered)
        (memory,) = answers
        assert 250 < memory.held <= 500
        second = await app.client.post(ROUTE, content=body)
        check_error(second, 429, "retry later, or ask for less at a time", code="overloaded")
        assert int(second.headers["retry-after"]) >= 1
        engine.open()
        return await first

    assert app.run(two()).status_code == 200
    assert answers[0].held == 0
    assert app.post(body).status_code == 200


@pytest.mark.parametrize("path", LIMITED)
def test_every_answer_gives_back_what_it_held(tmp_path: Path, path: str, answers: list[AnswerMemory]) -> None:
    app = App(save_kind(tmp_path / "model", GOOD[path][2]), answer_limit=100_000, answer_memory=100_000)
    most = 0
    hold = answers[0]._hold

    def noting(answer: AnswerAccount, size: int, *, may_exceed: bool) -> None:
        nonlocal most
        hold(answer, size, may_exceed=may_exceed)
        most = max(most, answers[0].held)

    try:
        with mock.patch.object(answers[0], "_hold", noting):
            response = post(app, path, **filled(path, [f"cat {'hello ' * n}" for n in range(4)]))
        assert response.status_code == 200
        assert most >= len(response.content) / 3
        assert answers[0].held == 0
    finally:
        app.close()


def test_tokens_that_promise_too_much_are_refused_before_they_are_admitted(
    tmp_path: Path, answers: list[AnswerMemory]
) -> None:
    app = App(save_kind(tmp_path / "model", "colbert"), answer_limit=100_000, answer_memory=100_000)
    try:
        AnswerAccount(answers[0]).grow(99_900, may_exceed=False)
        check_error(post(app, "/embed_all", inputs=["cat " * 20]), 429, code="overloaded")
        assert (num_open(app), answers[0].held) == (0, 99_900)
    finally:
        app.close()


def test_the_slowest_client_yields_its_answer_to_others(
    make_app: MakeApp, answers: list[AnswerMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes nothing for longer than a moment, and one that has just begun: the first is ended."""
    monkeypatch.setattr(memory_budgets, "_GRACE_S", 0.05)
    app = make_app(FakeEngine(LIMITS), answer_limit=4600, answer_memory=4600)
    body = json.dumps({"input": ["a", "b", "c"]}).encode()

    stalled = asyncio.Event()

    async def stalls(num_sent: int) -> None:
        if num_sent == 3:
            stalled.set()
            await asyncio.Event().wait()

    async def scenario() -> None:
        client = Client(app, stalls)
        slow = asyncio.ensure_future(client.request())
        await stalled.wait()
        assert answers[0].held > 4600 - 300
        check_error(await app.client.post(ROUTE, content=body), 429, code="overloaded")
        await asyncio.sleep(0.06)
        assert (await app.client.post(ROUTE, content=body)).status_code == 200
        await slow
        assert not client.is_complete
        assert answers[0].held == 0

    app.run(scenario())
    assert num_open(app) == 0
    assert counted(app, "499") == 1
