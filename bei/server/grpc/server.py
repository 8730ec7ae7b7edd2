"""The port of gRPC beside HTTP's, on the same event loop.

With several front ends each listens on it (SO_REUSEPORT): the kernel gives a connection to one of them, and who
connects while one is started again reaches another.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Receive, Scope, Send

from bei.config.settings import ServeConfig
from bei.errors import ConfigError
from bei.server.endpoint.context import Context
from bei.server.endpoint.models import Models
from bei.server.grpc.calls import Calls, Header, RpcCall, RpcMethod, code_of, deadline_of, error_metadata
from bei.server.grpc.idle_streams import end_idle, next_message, only_message
from bei.server.grpc.inference_service import inference_methods
from bei.server.grpc.messages import pool, services
from bei.server.grpc.tei_services import tei_methods
from bei.server.http.body_time import body_due_s, body_too_slow
from bei.server.http.memory_budgets import AnswerMemory, Body, BodyMemory
from bei.server.http.tls import TLS, Pem
from bei.server.lifecycle.drain import LINGER_S
from bei.server.server_parts import ServerParts
from bei.server.status.peers import Peers
from bei.server.status.whole_server import WholeServer
from bei.server.telemetry.middleware import Telemetry
from bei.utils.libraries import importing

if TYPE_CHECKING:
    import grpc

log = logging.getLogger(__name__)

# Messages of a stream that are read before the answer to the first of them is taken, and about their answers' bytes.
_MOST_UNDER_WAY = 64
_MOST_UNDER_WAY_BYTES = 8_000_000

# Calls of a connection: a client that takes no answers keeps no more of ``max_connections`` from others.
_MOST_CALLS = 1_000

# One that watches the health, and one beside it.
_LEAST_CALLS = 2

_HEALTH_EVERY_S = 2.0
_PING_ANSWER_MS = 20_000
_MOST = (1 << 31) - 1  # of a setting of the library's; settings of ours may be larger
_NEVER_A_REQUEST = frozenset[str]()


def check_grpc(config: ServeConfig) -> None:
    """Raise MissingDependencyError, or ConfigError where the port is taken, before anything is loaded."""
    if config.grpc_port is None:
        return
    with importing("grpcio", "grpc", "--grpc-port", modules=("grpc", "grpc_health", "grpc_reflection", "google")):
        import grpc_reflection.v1alpha  # noqa: F401
    # Bound for a moment by this process alone: with SO_REUSEPORT another server's port would be shared silently.
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.grpc_port))
        except OSError as error:
            raise _taken(config, str(error)) from error


def _taken(config: ServeConfig, reason: str) -> ConfigError:
    return ConfigError(
        f"Cannot listen on {config.host} port {config.grpc_port} ({reason}): choose another --grpc-port."
    )


def grpc_of(
    models: Models,
    parts: ServerParts,
    tls: TLS | None,
    answers: AnswerMemory,
    bodies: BodyMemory,
    peers: Peers | None = None,
) -> GrpcServer | None:
    """The server that the settings ask for; None: they ask for none."""
    config = parts.config
    if config.grpc_port is None:
        return None
    shared = Context(models, config.max_client_batch_size, min(config.answer_limit, _MOST), answers)
    return GrpcServer(shared, bodies, parts, WholeServer(models, parts.metrics, peers), tls)


class GrpcServer:
    """The server of a process. Of the event loop on which it is made; ``start`` it once the models answer."""

    def __init__(
        self, shared: Context, bodies: BodyMemory, parts: ServerParts, server: WholeServer, tls: TLS | None
    ) -> None:
        import grpc
        from grpc_health.v1 import health
        from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

        from bei.server.grpc.library_services import HealthServicer, ReflectionServicer

        def telemetry(app: ASGIApp) -> Telemetry:
            return parts.telemetry(app, _nothing, _NEVER_A_REQUEST)

        self._config = config = parts.config
        self._tls = tls
        self._status = server
        self._calls = Calls(shared, bodies, parts.keys, telemetry, config.payload_limit)
        calls = max(_LEAST_CALLS, config.max_connections)
        self._server = grpc.aio.server(options=_options(config), maximum_concurrent_rpcs=calls)
        self._health = HealthServicer(max(1, config.max_connections // 2), config.body_timeout)
        methods = [*tei_methods(config), *inference_methods(shared.models, server)]
        by_path = {method.path: method for method in methods}
        handlers = [self._handlers(service, by_path) for service in services()]
        self._server.add_generic_rpc_handlers([*handlers, self._health.handlers()])
        self._names = [service.full_name for service in services()]
        names = (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        described = ReflectionServicer(names, pool(), config.keep_alive_timeout)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(described, self._server)
        self._watch: asyncio.Task[None] | None = None
        self._is_draining = False
        self.port = 0

    async def start(self) -> None:
        """Listen. Raises ConfigError."""
        config = self._config
        assert config.grpc_port is not None  # or there would be no server
        address = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{address}:{config.grpc_port}"
        try:
            if self._tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, _credentials(self._tls))
        except RuntimeError as error:
            raise _taken(config, str(error)) from error
        await self._set_health(is_serving=True)  # or its service would know no name yet
        await self._server.start()
        self._watch = asyncio.ensure_future(self._tell_health())

    def log_address(self) -> None:
        scheme = "grpc" if self._tls is None else "grpcs"
        log.info("listening on %s://%s:%d", scheme, self._config.host, self.port)

    def begin_drain(self) -> None:
        """Say that the server is going away; the models refuse new work."""
        self._is_draining = True

    async def wait_drained(self) -> None:
        """Return at once: calls wait for the models, which are drained by themselves."""

    async def stop(self) -> None:
        """End: calls under way have a while for their answers."""
        if self._watch is not None:
            self._watch.cancel()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(LINGER_S)

    async def _tell_health(self) -> None:
        """Keep the health service's answers those of the probes over HTTP."""
        while not self._is_draining:
            await self._set_health(is_serving=not await self._status.problems())
            await asyncio.sleep(_HEALTH_EVERY_S)
        await self._health.enter_graceful_shutdown()

    async def _set_health(self, *, is_serving: bool) -> None:
        from grpc_health.v1 import health_pb2

        statuses = health_pb2.HealthCheckResponse
        for name in ("", *self._names):
            await self._health.set(name, statuses.SERVING if is_serving else statuses.NOT_SERVING)

    # Calls.

    def _handlers(self, service: Any, methods: Mapping[str, RpcMethod]) -> grpc.GenericRpcHandler:
        import grpc

        found = {}
        for one in service.methods:
            method = methods[f"/{service.full_name}/{one.name}"]
            if one.client_streaming and one.server_streaming:
                found[one.name] = grpc.stream_stream_rpc_method_handler(partial(self._stream, method))
            elif one.client_streaming:
                found[one.name] = grpc.stream_unary_rpc_method_handler(partial(self._gathered, method))
            else:
                found[one.name] = grpc.stream_unary_rpc_method_handler(partial(self._single, method))
        return grpc.method_handlers_generic_handler(service.full_name, found)

    async def _single(self, method: RpcMethod, _: AsyncIterator[bytes], context: Any) -> bytes:
        content = await only_message(context, self._config.body_timeout)
        headers, deadline_s = _headers(context), deadline_of(context.time_remaining())
        call = await self._calls.answered(method, content, context.peer(), headers, deadline_s)
        return await _ended(call, context)

    async def _gathered(self, method: RpcMethod, contents: AsyncIterator[bytes], context: Any) -> bytes:
        """All messages of the stream as one request, of at most so many, and so many bytes, as a request may have."""
        given: list[Any] = []
        body = self._calls.new_body()
        reading = asyncio.ensure_future(self._read_all(contents, given, body))

        def give_up() -> None:
            """A client that sends slowly yields to others, or is too slow."""
            given.clear()
            reading.cancel()

        body.on_fail = give_up
        try:
            await self._in_time(reading, body)
            headers, deadline_s = _headers(context), deadline_of(context.time_remaining())
            call = await self._calls.answered(method, given, context.peer(), headers, deadline_s, body, is_stream=True)
        finally:
            reading.cancel()
            body.end()
        return await _ended(call, context)

    async def _read_all(self, contents: AsyncIterator[bytes], given: list[Any], body: Body) -> None:
        most = self._config.max_client_batch_size
        async for content in contents:
            given.append(content)
            body.add(len(content))
            if body.error is not None or len(given) > most or body.size > self._config.payload_limit:
                break  # which is refused
        body.complete = True

    async def _in_time(self, reading: asyncio.Task[None], body: Body) -> None:
        """Return when all messages were read, or ``body`` has failed: it has the time that a body over HTTP has."""
        timeout_s = self._config.body_timeout
        while not reading.done():
            left_s = body_due_s(body.started_s, timeout_s, body.size) - time.monotonic()
            if left_s <= 0:
                body.fail(body_too_slow(timeout_s))
                return
            await asyncio.wait([reading], timeout=left_s)
        if body.error is None:
            reading.result()

    async def _stream(self, method: RpcMethod, contents: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """An answer for each message, in order. Messages are read as answers are taken: a client that takes none sends
        none. The first that fails ends the stream, and so does too long a time without any."""
        headers = _headers(context)
        largest = 0
        under_way: deque[asyncio.Task[RpcCall]] = deque()
        iterator = contents.__aiter__()
        reading: asyncio.Task[bytes | None] | None = asyncio.ensure_future(next_message(iterator))

        async def answered(content: bytes) -> RpcCall:
            deadline_s = deadline_of(context.time_remaining())
            return await self._calls.answered(method, content, context.peer(), headers, deadline_s, is_stream=True)

        try:
            while reading is not None or under_way:
                waits: list[asyncio.Task[Any]] = [*under_way][:1]
                most = min(_MOST_UNDER_WAY, 1 + _MOST_UNDER_WAY_BYTES // max(1, largest))
                if reading is not None and len(under_way) < most:
                    waits.append(reading)
                idle_s = None if under_way else self._config.keep_alive_timeout
                done, _ = await asyncio.wait(waits, timeout=idle_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    await end_idle(context, self._config.keep_alive_timeout)
                if reading in waits and reading.done():
                    content = reading.result()
                    reading = None if content is None else asyncio.ensure_future(next_message(iterator))
                    if content is not None:
                        under_way.append(asyncio.ensure_future(answered(content)))
                while under_way and under_way[0].done():
                    call = under_way.popleft().result()
                    largest = max(largest, len(call.content))
                    try:
                        yield await _ended(call, context, is_last=False)  # which goes on when it was taken
                    finally:
                        _release(call)
        finally:
            for task in under_way:
                task.add_done_callback(_dropped)
            for waiting in (*under_way, *([] if reading is None else [reading])):
                waiting.cancel()


async def _ended(call: RpcCall, context: Any, *, is_last: bool = True) -> bytes:
    """The answer, with its metadata, or the end of the call with its error."""
    if call.error is not None:
        metadata = (*call.trailing, *error_metadata(call.error))
        await context.abort(code_of(call.error, call.method.path), str(call.error), metadata)
    if is_last:
        context.set_trailing_metadata(tuple(call.trailing))
        if call.account is not None:
            context.add_done_callback(lambda _: _release(call))
    return call.content


def _release(call: RpcCall) -> None:
    """Its answer was taken, or never will be."""
    if call.account is not None:
        call.account.release()


def _dropped(task: asyncio.Task[RpcCall]) -> None:
    if not task.cancelled() and task.exception() is None:
        _release(task.result())


def _headers(context: Any) -> list[Header]:
    """The metadata as headers; binary values mean nothing here."""
    return [
        (name.encode(), value.encode("latin-1", "replace"))
        for name, value in context.invocation_metadata() or ()
        if isinstance(value, str)
    ]


def _options(config: ServeConfig) -> Seq[tuple[str, int]]:
    options = (
        ("grpc.max_receive_message_length", config.payload_limit),
        ("grpc.max_send_message_length", config.answer_limit),
        ("grpc.max_metadata_size", config.max_header_bytes),
        ("grpc.max_concurrent_streams", _MOST_CALLS),
        ("grpc.max_connection_idle_ms", int(config.keep_alive_timeout * 1000)),
        # Who answers no ping is cut off, with what it has not taken.
        ("grpc.keepalive_time_ms", int(config.keep_alive_timeout * 1000)),
        ("grpc.http2.max_pings_without_data", 0),  # as many as it takes
        ("grpc.http2.ping_timeout_ms", _PING_ANSWER_MS),  # of pings for keepalive too
        ("grpc.so_reuseport", int(config.http_workers > 1)),
    )
    return [(name, min(value, _MOST)) for name, value in options]


def _credentials(tls: TLS) -> grpc.ServerCredentials:
    """The certificates of ``tls``, as it has them at each handshake."""
    import grpc

    seen = tls.pem

    def made(pem: Pem) -> Any:
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.client_ca)

    def renewed() -> Any:
        nonlocal seen
        if tls.pem is seen:
            return None
        seen = tls.pem
        return made(seen)

    needs = seen.client_ca is not None
    return grpc.dynamic_ssl_server_credentials(made(seen), renewed, require_client_authentication=needs)


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """Calls are all of one type."""
