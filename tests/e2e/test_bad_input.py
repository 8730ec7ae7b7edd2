"""Bad requests on the wire: a 4xx each, and the server goes on. tests/bei/server/ has the full list."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.process import DEADLINE_S, Server

ROUTE = "/v1/embeddings"


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client:
        yield client
        assert client.post(ROUTE, json={"input": "cat"}).status_code == 200  # the next good request is answered


def chunks(size: int) -> Iterator[bytes]:
    for _ in range(size // 100_000):
        yield b"x" * 100_000


def test_a_string_of_ten_megabytes_is_413_with_a_length_and_in_chunks(client: httpx.Client) -> None:
    assert client.post(ROUTE, json={"input": "x" * 10_000_000}).status_code == 413
    response = client.post(ROUTE, content=chunks(10_000_000))
    assert response.status_code == 413
    assert "larger than 8000000 bytes" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b'{"input": "\xff"}',
        b'{"input": "\\ud800"}',
        b'{"input": "a", "model": "\\ud800"}',
        b'{"input": "a", "dimensions": 2.5}',
        b'{"input": "a", "dimensions": NaN}',
        b'{"input": [1, 99999999999999999999]}',
        b'{"input": ' + b"[" * 500_000,
    ],
)
def test_a_wrong_body_is_400(client: httpx.Client, body: bytes) -> None:
    response = client.post(ROUTE, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_half_a_character_costs_its_input_alone_and_a_mark_in_front_and_whole_numbers_are_read(
    client: httpx.Client,
) -> None:
    body = b'\xef\xbb\xbf{"input": ["cat", "cut off \\ud83d here"], "dimensions": 4.0}'
    response = client.post(ROUTE, content=body, headers={"x-bei-report": "true"})
    assert response.status_code == 200, response.text
    vectors = [one["embedding"] for one in response.json()["data"]]
    assert vectors == [client.post(ROUTE, json={"input": "cat", "dimensions": 4}).json()["data"][0]["embedding"], None]
    error = response.json()["report"][1]["error"]
    assert error["code"] == "invalid_text"
    assert error["message"].startswith("input 1 has half a surrogate pair at 8")
    refused = client.post(ROUTE, content=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == error["message"]


def test_more_texts_than_allowed_are_400_and_as_many_as_allowed_are_not(client: httpx.Client) -> None:
    assert client.post(ROUTE, json={"input": ["a"] * 16385}).status_code == 400
    assert len(client.post(ROUTE, json={"input": ["a"] * 16384}).json()["data"]) == 16384


@pytest.mark.parametrize("garbage", [b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00"])
def test_what_is_no_http_is_refused_and_the_connection_closed(client: httpx.Client, garbage: bytes) -> None:
    with socket.create_connection((str(client.base_url.host), client.base_url.port or 80), DEADLINE_S) as wire:
        wire.sendall(garbage)
        assert wire.recv(1000).startswith(b"HTTP/1.1 400")
