"""A server under pressure: full queues and clients that leave. The engine waits for the test."""

from __future__ import annotations

import json
import socket
import threading

import httpx
import openai
import pytest

from tests.e2e.conftest import StartServer
from tests.e2e.process import DEADLINE_S, Server, wait_until


class Call(threading.Thread):
    """A request on a thread of its own."""

    def __init__(self, server: Server, given: object) -> None:
        super().__init__()
        self._server, self._given = server, given
        self.response: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        self.response = self._server.embed(self._given)

    def status(self) -> int:
        """Of the answer, once it is there."""
        self.join(DEADLINE_S)
        assert self.response is not None
        return self.response.status_code


@pytest.mark.client_call("openai", "OpenAI", "/v1", "embeddings.create: overload: RateLimitError with Retry-After")
def test_a_full_queue_is_a_rate_limit_error_to_the_openai_client(gated: StartServer) -> None:
    server = gated("--max-queue-tokens", "3")
    first = Call(server, [1])
    server.wait_for_log("engine has")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="not needed", max_retries=0) as client:
        with pytest.raises(openai.RateLimitError, match="retry in") as caught:
            client.embeddings.create(model="tiny", input="a")
        assert float(caught.value.response.headers["retry-after"]) > 0
        assert caught.value.type == "rate_limit_error"
        assert server.get_status("/ready") == 200  # a full queue is no reason to take the server out
        server.say("open")
        assert first.status() == 200
        assert len(client.embeddings.create(model="tiny", input="a").data) == 1


def test_the_queued_work_of_a_client_that_leaves_is_cancelled(gated: StartServer) -> None:
    server = gated()
    wait_until(lambda: server.metric("bei_tokens_total") > 0, "the canary of the start is counted")
    before = server.metric("bei_tokens_total")
    first = Call(server, [1])
    server.wait_for_log(r"engine has \[1\]")
    body = json.dumps({"input": [[50], [51], [52]]}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as leaves:
        head = f"POST /v1/embeddings HTTP/1.1\r\nhost: bei\r\ncontent-length: {len(body)}\r\n\r\n"
        leaves.sendall(head.encode() + body)
        wait_until(lambda: server.metric("bei_queue_sequences") == 3, "its inputs are queued")
    wait_until(lambda: server.metric("bei_requests_total", status="499") == 1, "the server saw it leave")
    server.say("open")
    assert first.status() == 200
    assert server.embed([9]).status_code == 200
    assert server.wait_for_log("engine has").endswith("engine has [9]")
    wait_until(lambda: server.metric("bei_tokens_total") - before == 2, "two tokens have run, not five")


def test_requests_of_many_clients_share_batches(gated: StartServer) -> None:
    server = gated()
    wait_until(lambda: server.metric("bei_batch_sequences_count") > 0, "the canary of the start is counted")
    before = server.metric("bei_batch_sequences_count")
    first = Call(server, [1])
    server.wait_for_log("engine has")
    others = [Call(server, [value]) for value in range(10, 17)]
    wait_until(lambda: server.metric("bei_queue_sequences") == 7, "all are queued")
    server.say("open")
    assert [call.status() for call in (first, *others)] == [200] * 8
    wait_until(lambda: server.metric("bei_batch_sequences_count") - before == 2, "two batches have run")
