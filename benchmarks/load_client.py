"""A light HTTP client: raw sockets, one thread, requests made beforehand. Runs as a process of its own.

Reads from stdin ``{"port", "concurrency", "bodies": [JSON texts]}``; sends every body once to ``/v1/embeddings`` over
``concurrency`` kept-alive connections and prints ``{"elapsed_s", "latencies_s", "statuses"}``. It parses no more of
an answer than its status and length, so that the cores it shares with the server go to the server.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time


class _Connection:
    """One kept-alive connection with at most one request on its way."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()
        self._total = 0
        self.sent_s = 0.0

    def send(self, request: bytes) -> None:
        self._received.clear()
        self._total = 0
        self.sent_s = time.perf_counter()
        self.socket.sendall(request)

    def receive(self) -> int | None:
        """The status once the answer is whole, else None."""
        chunk = self.socket.recv(1 << 20)
        if not chunk:
            raise ConnectionError("the server closed a connection")
        self._received += chunk
        if not self._total:
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                return None
            head = bytes(self._received[:end]).lower()
            start = head.index(b"content-length:") + len(b"content-length:")
            self._total = end + 4 + int(head[start:].split(b"\r\n", 1)[0])
        return int(self._received[9:12]) if len(self._received) >= self._total else None


def drive(port: int, concurrency: int, bodies: list[str]) -> dict[str, object]:
    """Send every body once; times from the first send to the last answer."""
    head = "POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
    requests = [f"{head}{len(body.encode())}\r\n\r\n{body}".encode() for body in bodies]
    selector = selectors.DefaultSelector()
    waiting = iter(requests)
    latencies: list[float] = []
    statuses: dict[int, int] = {}
    open_connections = 0
    connections = [_Connection(port) for _ in range(min(concurrency, len(requests)))]
    started = time.perf_counter()
    for connection in connections:
        selector.register(connection.socket, selectors.EVENT_READ, connection)
        connection.send(next(waiting))
        open_connections += 1
    while open_connections:
        for key, _ in selector.select():
            connection = key.data
            status = connection.receive()
            if status is None:
                continue
            latencies.append(time.perf_counter() - connection.sent_s)
            statuses[status] = statuses.get(status, 0) + 1
            following = next(waiting, None)
            if following is None:
                selector.unregister(connection.socket)
                open_connections -= 1
            else:
                connection.send(following)
    elapsed = time.perf_counter() - started
    for connection in connections:
        connection.socket.close()
    return {"elapsed_s": elapsed, "latencies_s": latencies, "statuses": statuses}


if __name__ == "__main__":
    task = json.load(sys.stdin)
    json.dump(drive(task["port"], task["concurrency"], task["bodies"]), sys.stdout)
