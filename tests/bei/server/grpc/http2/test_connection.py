"""Connections by the frame: what a client may do, and what ends a call or a connection."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hpack import Decoder, Encoder

from bei.engine.fake import FakeEngine
from bei.server.grpc.http2 import frames
from bei.server.grpc.http2.connection import MOST_STREAMS
from bei.server.grpc.http2.frames import END_HEADERS, END_STREAM, PREFACE, frame
from bei.server.grpc.http2.messages import with_prefix
from tests.bei.server.conftest import MakeApp
from tests.bei.server.grpc.served import Grpc, tei
from tests.support.artifacts import LIMITS
from tests.support.engines import GatedEngine

EMBED = "/tei.v1.Embed/Embed"
CALL = [(":method", "POST"), (":scheme", "http"), (":path", EMBED), ("content-type", "application/grpc")]
CAT = with_prefix(tei("EmbedRequest", inputs="cat").SerializeToString())


class Client:
    """A connection whose frames a test writes."""

    def __init__(self, served: Grpc) -> None:
        self._app = served.app
        self._encoder, self._decoder = Encoder(), Decoder()
        self._reader, self._writer = self._app.run(asyncio.open_connection("127.0.0.1", served.server.port))

    def send(self, *content: bytes) -> None:
        async def write() -> None:
            self._writer.write(b"".join(content))
            await asyncio.sleep(0)

        self._app.run(write())

    def hello(self, **settings: int) -> None:
        self.send(PREFACE, frames.settings(**settings))

    def head(self, stream: int, fields: Any = CALL, flags: int = END_HEADERS) -> bytes:
        return frame(frames.HEADERS, flags, stream, self._encoder.encode(fields))

    def ask(self, stream: int, message: bytes = CAT) -> None:
        self.send(self.head(stream), frame(frames.DATA, END_STREAM, stream, message))

    def frames(self, until: int, stream: int | None = None) -> list[tuple[int, int, int, bytes]]:
        """All frames up to the first of the kind (of the stream): kind, flags, stream, payload; HEADERS as text."""

        async def read() -> list[tuple[int, int, int, bytes]]:
            found = []
            while True:
                size, kind, flags, number = frames.head_at(await self._reader.readexactly(9), 0)
                payload = await self._reader.readexactly(size)
                found.append((kind, flags, number, payload))
                if kind == until and stream in (None, number) and (kind != frames.HEADERS or flags & END_STREAM):
                    return found

        found: list[tuple[int, int, int, bytes]] = self._app.run(asyncio.wait_for(read(), 20))
        return found

    def trailers(self, stream: int) -> dict[str, str]:
        """The end of a call."""
        found = {}
        for kind, flags, number, payload in self.frames(frames.HEADERS, stream):
            if kind == frames.HEADERS:
                fields = self._decoder.decode(payload)
                if number == stream and flags & END_STREAM:
                    found = {str(name): str(value) for name, value in fields}
        return found

    def ended_with(self) -> tuple[int, str]:
        """Code and reason of the GOAWAY."""
        payload = self.frames(frames.GOAWAY)[-1][3]
        return struct.unpack_from("!I", payload, 4)[0], payload[8:].decode()

    def rest(self) -> bytes:
        found: bytes = self._app.run(asyncio.wait_for(self._reader.read(), 20))
        return found

    def close(self) -> None:
        self._writer.close()


@pytest.fixture
def served(make_app: MakeApp) -> Iterator[Grpc]:
    served = Grpc(make_app(FakeEngine(LIMITS)), payload_limit=2_000_000, body_memory=8_000_000)
    yield served
    served.close()


@pytest.fixture
def client(served: Grpc) -> Iterator[Client]:
    client = Client(served)
    yield client
    client.close()


def test_a_call(client: Client) -> None:
    client.hello()
    client.ask(1)
    assert client.trailers(1)["grpc-status"] == "0"
    client.send(frame(frames.PING, 0, 0, b"12345678"))
    assert client.frames(frames.PING)[-1][1:] == (frames.ACK, 0, b"12345678")


def test_frames_that_may_stand_between(client: Client) -> None:
    """Padding, priorities, unknown kinds, a head in pieces, data in pieces, trailers."""
    client.hello()
    head = client.head(1)[9:]
    padded = bytes((3,)) + struct.pack("!IB", 0, 16) + head[:5] + bytes(3)
    client.send(
        frame(frames.HEADERS, 0x8 | 0x20, 1, padded),
        frame(frames.CONTINUATION, END_HEADERS, 1, head[5:]),
        frame(frames.PRIORITY, 0, 1, struct.pack("!IB", 0, 16)),
        frame(0x42, 0, 1, b"what is this"),
        frame(frames.DATA, 0, 1, CAT[:3]),
        frame(frames.DATA, 0x8, 1, bytes((2,)) + CAT[3:] + bytes(2)),
        client.head(1, [("x-checksum", "a")], END_HEADERS | END_STREAM),
    )
    assert client.trailers(1)["grpc-status"] == "0"


def test_an_answer_comes_as_fast_as_windows_open(client: Client) -> None:
    client.hello(initial_window_size=10)
    client.ask(1)
    kinds = client.frames(frames.DATA)
    assert len(kinds[-1][3]) == 10
    client.send(frames.window_update(1, 7))
    assert len(client.frames(frames.DATA)[-1][3]) == 7
    client.send(frames.settings(initial_window_size=100_000))
    assert client.frames(frames.HEADERS, 1)[-1][1] & END_STREAM


def test_a_large_message_is_let_in_and_one_that_is_too_large_is_not(client: Client) -> None:
    client.hello()
    large = with_prefix(tei("EmbedRequest", inputs="cat " * 400_000, truncate=True).SerializeToString())
    client.send(client.head(1))
    for start in range(0, len(large), 16_384):
        client.send(frame(frames.DATA, 0, 1, large[start : start + 16_384]))
    client.send(frame(frames.DATA, END_STREAM, 1))
    assert client.trailers(1)["grpc-status"] == "0"
    client.send(client.head(3), frame(frames.DATA, 0, 3, b"\0" + (3_000_000).to_bytes(4, "big")))
    found = client.trailers(3)
    assert (found["grpc-status"], found["bei-code"]) == ("8", "payload_too_large")


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (frame(frames.DATA, 0, 1, b"a"), frames.PROTOCOL_ERROR),
        (frame(frames.HEADERS, END_HEADERS, 2, b"\x82"), frames.PROTOCOL_ERROR),
        (frame(frames.HEADERS, END_HEADERS, 1, b"\xbf"), frames.COMPRESSION_ERROR),
        (frame(frames.HEADERS, 0, 1, b"\x82") + frame(frames.PING, 0, 0, bytes(8)), frames.PROTOCOL_ERROR),
        (frame(frames.CONTINUATION, 0, 1, b"\x82"), frames.PROTOCOL_ERROR),
        (frame(frames.HEADERS, 0, 1, b"\x82") + frame(frames.CONTINUATION, 0, 1) * 9, frames.ENHANCE_YOUR_CALM),
        (frame(frames.HEADERS, 0, 1) + frame(frames.CONTINUATION, 0, 1, bytes(9_000)) * 9, frames.ENHANCE_YOUR_CALM),
        (frame(frames.PUSH_PROMISE, 0, 1, bytes(4)), frames.PROTOCOL_ERROR),
        (frame(frames.PING, 0, 0, b"short"), frames.FRAME_SIZE_ERROR),
        (frame(frames.SETTINGS, 0, 0, b"short"), frames.FRAME_SIZE_ERROR),
        (frame(frames.SETTINGS, 0, 1), frames.PROTOCOL_ERROR),
        (frames.settings(initial_window_size=1 << 31), frames.FLOW_CONTROL_ERROR),
        (frames.settings(max_frame_size=1), frames.PROTOCOL_ERROR),
        (frames.window_update(0, 0), frames.FLOW_CONTROL_ERROR),
        (frames.window_update(0, frames.LARGEST_WINDOW), frames.FLOW_CONTROL_ERROR),
        (frames.window_update(5, 1), frames.PROTOCOL_ERROR),
        (frames.reset(5, 8), frames.PROTOCOL_ERROR),
        (frame(frames.WINDOW_UPDATE, 0, 0, b"a"), frames.FRAME_SIZE_ERROR),
        (frame(frames.HEADERS, 0x8, 1, b"\x09"), frames.PROTOCOL_ERROR),
        (frame(frames.DATA, 0, 1, bytes(16_385)), frames.FRAME_SIZE_ERROR),
    ],
)
def test_what_ends_a_connection_says_why(client: Client, content: bytes, code: int) -> None:
    client.hello()
    client.send(content)
    found, reason = client.ended_with()
    assert found == code
    assert reason
    assert client.rest() == b""


def test_what_ends_one_call_only(client: Client) -> None:
    client.hello()
    client.send(client.head(1, CALL[1:]))
    assert client.frames(frames.RST_STREAM)[-1][3] == struct.pack("!I", frames.PROTOCOL_ERROR)
    client.send(client.head(3), frames.window_update(3, frames.LARGEST_WINDOW))
    assert client.frames(frames.RST_STREAM)[-1][2] == 3
    client.send(client.head(5, [*CALL[:2], (":path", "/a/B"), CALL[3]]))
    assert client.trailers(5)["grpc-status"] == "12"
    client.ask(7, CAT + CAT)
    assert client.trailers(7)["grpc-status"] == "3"
    client.ask(9, CAT[:-1])
    assert client.trailers(9)["grpc-status"] == "3"
    client.ask(11, b"")
    assert client.trailers(11)["grpc-status"] == "3"
    client.send(client.head(13, [*CALL[:3], ("content-type", "text/plain")], END_HEADERS | END_STREAM))
    assert client.trailers(13)[":status"] == "415"
    client.ask(15)
    assert client.trailers(15)["grpc-status"] == "0"


def test_the_first_error_ends_a_stream_and_what_still_comes_is_dropped(client: Client) -> None:
    client.hello()
    wrong = with_prefix(tei("EmbedRequest").SerializeToString())
    head = client.head(1, [*CALL[:2], (":path", f"{EMBED}Stream"), CALL[3]])
    client.send(head, frame(frames.DATA, 0, 1, CAT), frame(frames.DATA, 0, 1, wrong))
    found = client.trailers(1)
    assert (found["grpc-status"], found["grpc-message"]) == ("3", "inputs 0 is an empty text: leave it out.")
    client.send(frame(frames.DATA, END_STREAM, 1, CAT))
    client.ask(3)
    assert client.trailers(3)["grpc-status"] == "0"


@pytest.mark.parametrize("content", [b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16\x03\x01", b"\0" * 30])
def test_who_speaks_no_http_2_is_told(client: Client, content: bytes) -> None:
    client.send(content)
    assert client.rest().endswith(b"This port speaks gRPC: --port is that of HTTP.\n")


def test_calls_that_are_reset_count_until_their_work_has_ended(make_app: MakeApp) -> None:
    engine = GatedEngine(LIMITS)
    served = Grpc(make_app(engine), watches=False, max_connections=5 * MOST_STREAMS)
    client = Client(served)
    client.hello()
    for index in range(MOST_STREAMS + 5):
        client.ask(1 + 2 * index)
    refused = client.frames(frames.RST_STREAM)[-1]
    assert refused[3] == struct.pack("!I", frames.REFUSED_STREAM)
    client.send(*(frames.reset(1 + 2 * index, frames.CANCEL) for index in range(MOST_STREAMS)))
    engine.open()
    number = 3 * MOST_STREAMS + 1
    client.send(frame(frames.PING, 0, 0, bytes(8)))
    client.frames(frames.PING)
    served.app.run(asyncio.sleep(0.1))
    client.ask(number)
    assert client.trailers(number)["grpc-status"] == "0"
    client.close()
    served.close()


def test_more_calls_than_the_limit_are_told_to_come_back(make_app: MakeApp) -> None:
    engine = GatedEngine(LIMITS)
    served = Grpc(make_app(engine), watches=False, max_connections=3)
    client = Client(served)
    client.hello()
    for index in range(4):
        client.ask(1 + 2 * index)
    found = client.trailers(7)
    assert (found["grpc-status"], found["bei-code"]) == ("14", "too_many_connections")
    engine.open()
    client.close()
    served.close()


@pytest.mark.parametrize(
    "settings", [{"header_timeout": 1.0}, {"keep_alive_timeout": 1.0}, {"body_timeout": 1.0, "keep_alive_timeout": 9.0}]
)
def test_who_is_slow_is_cut_off(make_app: MakeApp, settings: dict[str, Any]) -> None:
    served = Grpc(make_app(FakeEngine(LIMITS)), **settings)
    client = Client(served)
    if "body_timeout" in settings:
        client.hello()
        client.send(client.head(1), frame(frames.DATA, 0, 1, CAT[:7]))
        assert client.trailers(1)["bei-code"] == "request_timeout"
    elif "keep_alive_timeout" in settings:
        client.hello()
        assert client.ended_with() == (frames.NO_ERROR, "")
    else:
        assert client.ended_with()[1] == "no preface of HTTP/2 has come"
    client.close()
    served.close()


def test_an_answer_that_nobody_takes_is_given_up(make_app: MakeApp) -> None:
    served = Grpc(make_app(FakeEngine(LIMITS)), keep_alive_timeout=1.0, body_timeout=1.0)
    client = Client(served)
    client.hello(initial_window_size=0)
    client.ask(1)
    assert client.frames(frames.RST_STREAM)[-1][2:] == (1, struct.pack("!I", frames.CANCEL))
    client.close()
    served.close()


def test_frames_at_random_end_no_other_connection(served: Grpc) -> None:
    source, good = random.Random(3), Client(served)
    good.hello()
    for turn in range(60):
        client = Client(served)
        client.hello()
        for _ in range(8):
            kind, flags = source.randrange(12), source.choice([0, 1, 4, 5, 8, 13, 0x2C, 0xFF])
            payload = source.choice([b"", CAT, bytes(4), bytes(8), source.randbytes(source.randrange(40))])
            client.send(frame(kind, flags, source.choice([0, 1, 1, 3, 5]), payload))
            if source.random() < 0.5:
                client.send(client.head(source.choice([1, 3, 5, 7])))
        client.close()
        good.ask(1 + 2 * turn)
        assert good.trailers(1 + 2 * turn)["grpc-status"] == "0"
    good.close()
