"""HTTP by hand, for clients that no library would be: slow, greedy, half-hearted."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.process import DEADLINE_S, Server, wait_until


@dataclass(frozen=True)
class Answer:
    """What the server wrote."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """Of the error in the body, which must be in our form."""
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "Traceback" not in error["message"]
        return str(error["code"])


def connect(server: Server) -> socket.socket:
    """A connection of its own."""
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), DEADLINE_S)


def head(length: int, *headers: str, path: str = "/v1/embeddings", method: str = "POST") -> bytes:
    """A request's line and headers."""
    lines = [f"{method} {path} HTTP/1.1", "host: bei", f"content-length: {length}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1")


def embed(given: object, *headers: str) -> bytes:
    """A whole request."""
    body = json.dumps({"input": given}).encode()
    return head(len(body), *headers) + body


def read_answer(wire: socket.socket) -> Answer:
    """The next answer, interim ones left out."""
    while True:
        start = b""
        while not start.endswith(b"\r\n\r\n"):
            byte = wire.recv(1)
            assert byte, f"the server closed the connection after {start!r}"
            start += byte
        status_line, *lines = start.decode("latin-1").split("\r\n")[:-2]
        status = int(status_line.split(" ")[1])
        if status >= 200:
            break
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    body = b""
    while missing := int(headers["content-length"]) - len(body):
        piece = wire.recv(missing)
        assert piece, "the server closed the connection within a body"
        body += piece
    return Answer(status, headers, body)


def wait_until_read(server: Server) -> None:
    """Return when the server has accepted every connection, and read everything that was sent to it."""
    port = int(server.url.rsplit(":", 1)[1])

    def num_unread() -> int:
        """In the kernel's queues: connections of the listening socket, bytes of the others."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(int(row[4].split(":")[1], 16) for row in rows if int(row[1].split(":")[1], 16) == port)

    wait_until(lambda: num_unread() == 0, "the server has read everything")


def is_closed(wire: socket.socket) -> bool:
    """Whether the server ends the connection within the deadline, and sends nothing more."""
    try:
        return wire.recv(1) == b""
    except ConnectionResetError:
        return True
