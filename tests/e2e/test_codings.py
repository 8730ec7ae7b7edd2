"""Compressed bodies on the wire, good ones and bombs."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.e2e.process import DEADLINE_S, Server

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ROUTE = "/v1/embeddings"
ENCODERS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstd.compress}

codings = pytest.mark.parametrize("coding", sorted(ENCODERS))


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client:
        yield client
        assert client.get("/health").status_code == 200
        assert client.post(ROUTE, json={"input": "cat"}).status_code == 200
    assert not any("Traceback" in line for line in server.log), server.log


def post(client: httpx.Client, content: bytes, coding: str) -> httpx.Response:
    return client.post(ROUTE, content=content, headers={"content-encoding": coding})


@codings
@pytest.mark.parametrize("number", [1, 2048])
def test_a_compressed_body_is_answered_as_a_plain_one(client: httpx.Client, coding: str, number: int) -> None:
    body = json.dumps({"input": ["a cat sat", *["a dog ran " * 50] * (number - 1)]}).encode()
    response = post(client, ENCODERS[coding](body), coding)
    assert response.status_code == 200
    assert response.json() == client.post(ROUTE, content=body).json()


@codings
def test_a_bomb_is_413(client: httpx.Client, coding: str) -> None:
    response = post(client, ENCODERS[coding](b" " * 100_000_000), coding)
    assert response.status_code == 413
    assert "decodes to more than 8000000 bytes" in response.json()["error"]["message"]


@codings
def test_what_is_not_of_its_coding_is_400(client: httpx.Client, coding: str) -> None:
    for body in (b'{"input": "cat"}', ENCODERS[coding](b'{"input": "cat"}')[:-3]):
        response = post(client, body, coding)
        assert response.status_code == 400
        assert f"not {coding}" in response.json()["error"]["message"]


@pytest.mark.parametrize("coding", ["br", "deflate", "gzip, gzip"])
def test_other_codings_are_415_and_the_accepted_ones_are_named(client: httpx.Client, coding: str) -> None:
    response = post(client, b" " * 10_000_000, coding)
    assert response.status_code == 415
    assert response.headers["accept-encoding"] == "gzip, zstd"
    assert response.json()["error"]["code"] == "encoding_not_supported"
