"""A small embedding server on an event loop in a thread of its own: it answers as a test wants, and records requests
and the time of each answer by its own clock."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from tests.support.engines import DEADLINE_S

VECTOR = base64.b64encode(bytes(16)).decode()


def good(asked: Asked) -> tuple[int, Any]:
    """OpenAI's embeddings."""
    given = asked.body["input"]
    rows = [{"embedding": VECTOR, "index": index} for index in range(1 if isinstance(given, str) else len(given))]
    return 200, {"data": rows, "model": "m"}


@dataclass
class Asked:
    """A request."""

    path: str
    headers: dict[str, str]
    body: Any
    at_s: float
    took_s: float = 0.0


Respond = Callable[[Asked], "tuple[int, Any]"]


@dataclass
class SmallServer:
    """Use as a context manager. ``waits``: awaited in front of each answer. ``routes``: what GETs answer."""

    respond: Respond = good
    waits: Callable[[Asked], Awaitable[None]] | None = None
    routes: dict[str, Any] = field(default_factory=lambda: {"/v1/models": {"data": [{"id": "m"}]}})
    tls: ssl.SSLContext | None = None
    asked: list[Asked] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def posts(self) -> list[Asked]:
        """Those with a body."""
        return [asked for asked in self.asked if asked.body is not None]

    def __enter__(self) -> SmallServer:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(DEADLINE_S)
        self._server = server
        self.port = server.sockets[0].getsockname()[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)

    async def _stop(self) -> None:
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, ssl.SSLError):
            pass
        finally:
            writer.transport.abort()  # close waits for a client to take what is left, and the loop may end before

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        begin_s = time.monotonic()
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        asked = Asked(head[0].split(" ")[1].split("?")[0], headers, json.loads(content) if content else None, begin_s)
        self.asked.append(asked)
        if asked.body is None:
            status, body = (200, self.routes[asked.path]) if asked.path in self.routes else (404, {})
        else:
            if self.waits is not None:
                await self.waits(asked)
            status, body = self.respond(asked)
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nserver: small\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        asked.took_s = time.monotonic() - begin_s
        return True
