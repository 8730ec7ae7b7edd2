"""Clients that ask a server of ``tests.e2e.swapping_server``'s engines without a pause, and check every answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

import httpx

from tests.e2e.process import DEADLINE_S, Server, wait_until
from tests.e2e.swapping_server import PLACE, vector_of

# A guard: of seconds on a machine that others use, too, against waits of minutes.
READY_AGAIN_S = 40.0


class Answered(NamedTuple):
    """An answer: of which build, and when it was asked for and came."""

    build: int
    asked_s: float
    came_s: float


class Client(threading.Thread):
    """Asks without a pause, each time for other sequences, on a connection of its own.

    ``may_break``: the connection may, while it waits for an answer; then it comes again, on another one.
    """

    def __init__(self, url: str, number: int, num_inputs: int = 1, *, may_break: bool = False) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._may_break = may_break
        self._number = number
        self._num_inputs = num_inputs
        self._is_over = threading.Event()
        self.answers: list[Answered] = []
        self.errors: list[BaseException] = []
        self.num_broken = 0

    def stop(self) -> None:
        self._is_over.set()
        self.join(DEADLINE_S)
        assert not self.is_alive()

    def run(self) -> None:
        try:
            while not self._is_over.is_set():
                with httpx.Client(base_url=self._url, timeout=DEADLINE_S) as client:
                    self._ask_on(client)
        except BaseException as error:
            self.errors.append(error)

    def _ask_on(self, client: httpx.Client) -> None:
        try:
            while not self._is_over.is_set():
                self._ask(client)
        except httpx.TransportError:
            if not self._may_break:
                raise
            self.num_broken += 1

    def _ask(self, client: httpx.Client) -> None:
        count = len(self.answers)
        inputs = [[self._number, count // 100, count % 100, place] for place in range(self._num_inputs)]
        asked_s = time.monotonic()
        response = client.post("/v1/embeddings", json={"input": inputs})
        assert response.status_code == 200, response.text
        vectors = [item["embedding"] for item in response.json()["data"]]
        build = int(vectors[0][PLACE])
        assert vectors == [vector_of(ids, build) for ids in inputs]  # its own, and all of one build
        self.answers.append(Answered(build, asked_s, time.monotonic()))


class Load:
    """Clients of single texts, and one that sends many at a time."""

    def __init__(self, server: Server, *, may_break: bool = False) -> None:
        self._server = server
        self._before = self._num_counted()
        self.clients = [
            *(Client(server.url, number, may_break=may_break) for number in range(4)),
            Client(server.url, 9, 40, may_break=may_break),
        ]

    def __enter__(self) -> Load:
        for client in self.clients:
            client.start()
        self.wait_for_more()
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.clients:
            client.stop()

    def wait_for_more(self, count: int = 3) -> None:
        """Return when every client has so many more answers."""
        reached = [len(client.answers) + count for client in self.clients]
        wait_until(
            lambda: (
                self.errors != []
                or all(len(client.answers) >= least for client, least in zip(self.clients, reached, strict=True))
            ),
            "every client is answered",
        )
        assert self.errors == []

    @property
    def errors(self) -> list[BaseException]:
        return [error for client in self.clients for error in client.errors]

    def _num_counted(self) -> float:
        return self._server.metric_of_all("bei_requests_total", route="/v1/embeddings", status="200")

    def check(self, swapped_s: Mapping[int, float]) -> None:
        """No request failed, each was answered once, and by the build that was served. ``swapped_s``: by build, when
        the signal was sent that brought it."""
        assert self.errors == []
        answers = [client.answers for client in self.clients]
        num_answers = sum(map(len, answers))
        wait_until(lambda: self._num_counted() - self._before >= num_answers, "all answers are counted")
        assert self._num_counted() - self._before == num_answers
        for of_client in answers:
            builds = [answer.build for answer in of_client]
            assert builds == sorted(builds)  # a swap is never taken back
        for build, sent_s in swapped_s.items():
            assert all(answer.asked_s < sent_s or answer.build >= build - 1 for one in answers for answer in one)
            assert all(answer.came_s > sent_s for one in answers for answer in one if answer.build == build)
            first_s = min(answer.came_s for one in answers for answer in one if answer.build == build)
            assert first_s - sent_s < READY_AGAIN_S
