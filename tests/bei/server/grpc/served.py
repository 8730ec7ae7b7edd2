"""The server of gRPC over fake engines, on the event loop of an ``App``, and a client's side of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, TypeAlias

import grpc

from bei.config.settings import ServeConfig
from bei.server.grpc.messages import message
from bei.server.grpc.server import GrpcServer, grpc_of
from bei.server.http.memory_budgets import AnswerMemory, BodyMemory
from bei.server.http.tls import tls_of
from bei.server.server_parts import ServerParts
from bei.server.telemetry.access_log import request_log_of
from tests.bei.server.app import App

DEADLINE_S = 20.0


class Grpc:
    """A server and a channel to it. ``settings`` are those of ServeConfig. ``watches``: canaries are run for the health
    service."""

    def __init__(self, app: App, credentials: Any = None, *, watches: bool = True, **settings: Any) -> None:
        self.app = app
        config = ServeConfig(**{"grpc_port": 0, "openai_token_ids": "accept", **settings})
        self.answers, self.bodies = AnswerMemory(config.answer_memory), BodyMemory(config.body_memory)
        self.server: GrpcServer = app.run(self._start(config, watches=watches))
        address = f"127.0.0.1:{self.server.port}"
        self.channel = app.run(self._channel(address, credentials))

    async def _start(self, config: ServeConfig, *, watches: bool) -> GrpcServer:
        parts = ServerParts(config, self.app.metrics, self.app.keys, request_log_of(config))
        server = grpc_of(self.app.models, parts, tls_of(config), self.answers, self.bodies)
        assert server is not None
        await server.start()
        if not watches:
            assert server._watch is not None
            server._watch.cancel()
        return server

    async def _channel(self, address: str, credentials: Any) -> Any:
        if credentials is not None:
            return grpc.aio.secure_channel(address, credentials)
        return grpc.aio.insecure_channel(address)

    def call(
        self, path: str, request: Any, metadata: Any = None, timeout: float = DEADLINE_S
    ) -> tuple[Any, dict[str, str]]:
        """The answer to one message, and its trailing metadata."""
        found: tuple[Any, dict[str, str]] = self.app.run(self._call(path, request, metadata, timeout))
        return found

    async def _call(self, path: str, request: Any, metadata: Any, timeout: float) -> tuple[Any, dict[str, str]]:
        content = request if isinstance(request, bytes) else request.SerializeToString()
        call = self.channel.unary_unary(path)(content, metadata=metadata, timeout=timeout)
        answer = response_type(path).FromString(await call)
        return answer, dict(await call.trailing_metadata())

    def stream(self, path: str, requests: Iterable[Any], metadata: Any = None) -> list[Any]:
        """All answers to a stream."""
        found: list[Any] = self.app.run(self._stream(path, requests, metadata))
        return found

    async def _stream(self, path: str, requests: Iterable[Any], metadata: Any) -> list[Any]:
        async def given() -> AsyncIterator[bytes]:
            for request in requests:
                yield request.SerializeToString()

        kind = response_type(path)
        call = self.channel.stream_stream(path)(given(), metadata=metadata, timeout=DEADLINE_S)
        return [kind.FromString(content) async for content in call]

    def in_turn(self, path: str, requests: Iterable[Any], metadata: Any = None) -> None:
        """Each message of a stream when the one before is answered: grpc names a message that it could not send behind
        the stream's end as the error, in place of the server's."""
        self.app.run(self._in_turn(path, requests, metadata))

    async def _in_turn(self, path: str, requests: Iterable[Any], metadata: Any) -> None:
        call = self.channel.stream_stream(path)(metadata=metadata, timeout=DEADLINE_S)
        for request in requests:
            await call.write(request.SerializeToString())
            await call.read()

    def gather(self, path: str, requests: Iterable[Any]) -> Any:
        """The one answer to a stream."""
        return self.app.run(self._gather(path, requests))

    async def _gather(self, path: str, requests: Iterable[Any]) -> Any:
        async def given() -> AsyncIterator[bytes]:
            for request in requests:
                yield request.SerializeToString()

        return response_type(path).FromString(await self.channel.stream_unary(path)(given(), timeout=DEADLINE_S))

    def error(self, path: str, request: Any, metadata: Any = None, timeout: float = DEADLINE_S) -> grpc.aio.AioRpcError:
        """The error of one message."""
        try:
            self.call(path, request, metadata, timeout)
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError("it was answered")

    def close(self) -> None:
        """End both."""
        self.app.run(self.channel.close())
        self.app.run(self.server.stop())


# Starts one over an app, with settings of ServeConfig.
Serve: TypeAlias = Callable[..., Grpc]


def tei(kind: str, /, **fields: Any) -> Any:
    """A message of TEI's."""
    return message(f"tei.v1.{kind}")(**fields)


def inference(kind: str, /, **fields: Any) -> Any:
    """A message of the Open Inference Protocol."""
    return message(f"inference.{kind}")(**fields)


def response_type(path: str) -> Any:
    """The class of the answers of a method."""
    from bei.server.grpc.messages import pool

    service, method = path[1:].rsplit("/", 1)
    found = pool().FindServiceByName(service).methods_by_name[method]
    return message(found.output_type.full_name)
