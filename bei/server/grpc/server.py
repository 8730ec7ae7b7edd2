"""The port of gRPC beside HTTP's, on the same event loop, among the same connections and limits.

With several front ends each listens on it (SO_REUSEPORT): the kernel gives a connection to one of them, and who
connects while one is started again reaches another.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from starlette.types import ASGIApp, Receive, Scope, Send

from bei.config.settings import ServeConfig
from bei.errors import BeiError, ConfigError, RouteNotFoundError, TooManyConnectionsError
from bei.metrics.registry import Metrics
from bei.server.auth.keys import Key, Keyring
from bei.server.endpoint.context import Context
from bei.server.endpoint.models import Models
from bei.server.grpc.calls import Calls, RpcCall, RpcMethod
from bei.server.grpc.health import SERVICE as HEALTH_SERVICE
from bei.server.grpc.health import HealthService
from bei.server.grpc.http2.connection import Http2Connection
from bei.server.grpc.http2.stream import Stream
from bei.server.grpc.inference_service import inference_methods
from bei.server.grpc.messages import REFLECTION, services
from bei.server.grpc.reflection import ReflectionService
from bei.server.grpc.status_codes import StatusCode, code_of, error_metadata
from bei.server.grpc.tei_services import tei_methods
from bei.server.http.connections import Connections
from bei.server.http.errors import UNEXPECTED, status_of
from bei.server.http.listen import bind_tcp, listen_tcp
from bei.server.http.listener import Listener
from bei.server.http.memory_budgets import AnswerMemory
from bei.server.http.request_id import request_id_of
from bei.server.http.tls import TLS
from bei.server.lifecycle.drain import LINGER_S
from bei.server.status.peers import Peers
from bei.server.status.whole_server import WholeServer
from bei.server.telemetry.access_log import RequestLog
from bei.server.telemetry.middleware import Telemetry
from bei.utils.libraries import importing

if TYPE_CHECKING:
    from bei.server.telemetry.spans import Tracing

log = logging.getLogger(__name__)

# Messages of a stream that are read before the answer to the first of them is taken.
_MOST_UNDER_WAY = 64

_HEALTH_EVERY_S = 2.0
_NEVER_A_REQUEST = frozenset[str]()

Run: TypeAlias = Callable[[Stream], Awaitable[None]]


class _Rpc(NamedTuple):
    """A method as it is served. ``takes_all``: of one message, which is there before it begins."""

    run: Run
    takes_all: bool = True


def check_grpc(config: ServeConfig) -> None:
    """Raise MissingDependencyError, or ConfigError where the port is taken, before anything is loaded."""
    if config.grpc_port is None:
        return
    with importing("hpack", "grpc", "--grpc-port", modules=("hpack", "google")):
        import hpack  # noqa: F401
    # Bound for a moment by this process alone: with SO_REUSEPORT another server's port would be shared silently.
    _bound(config).close()


def _bound(config: ServeConfig, *, is_shared: bool = False) -> socket.socket:
    """A socket on the port. Raises ConfigError."""
    assert config.grpc_port is not None  # or there would be no server
    try:
        return bind_tcp(config.host, config.grpc_port, is_shared=is_shared)
    except ConfigError as error:
        raise ConfigError(str(error).replace("another --host or --port", "another --grpc-port")) from error


def grpc_of(
    config: ServeConfig,
    models: Models,
    answers: AnswerMemory,
    metrics: Metrics,
    keys: Keyring | None,
    request_log: RequestLog | None,
    tracing: Tracing | None,
    tls: TLS | None,
    connections: Connections,
    peers: Peers | None = None,
) -> GrpcServer | None:
    """The server that ``config`` asks for; None: it asks for none."""
    if config.grpc_port is None:
        return None
    shared = Context(models, config.max_client_batch_size, config.answer_limit, answers)

    def telemetry(app: ASGIApp) -> Telemetry:
        return Telemetry(
            app,
            _nothing,
            metrics,
            request_log,
            tracing,
            untraced=_NEVER_A_REQUEST,
            server_timing=config.server_timing,
        )

    calls = Calls(shared, keys, telemetry)
    return GrpcServer(config, calls, models, WholeServer(models, metrics, peers), tls, connections)


class GrpcServer:
    """The server of a process. Of the event loop on which it is made; ``start`` it once the models answer."""

    def __init__(
        self,
        config: ServeConfig,
        calls: Calls,
        models: Models,
        server: WholeServer,
        tls: TLS | None,
        connections: Connections,
    ) -> None:
        self._config = config
        self._tls = tls
        self._status = server
        self._calls = calls
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        names = [service.full_name for service in services()]
        self._health = HealthService(names)
        self._rpcs = dict(self._served(names, {one.path: one for one in _methods(config, models, server)}))
        self._open: set[Http2Connection] = set()
        self._under_way: set[asyncio.Task[None]] = set()
        self._listener: Listener | None = None
        self._socket: socket.socket | None = None
        self._watch: asyncio.Task[None] | None = None
        self._is_draining = False
        self.port = 0

    def _served(self, names: list[str], methods: dict[str, RpcMethod]) -> Iterator[tuple[str, _Rpc]]:
        for service in services():
            for one in service.methods:
                path = f"/{service.full_name}/{one.name}"
                if one.client_streaming:
                    run = self._stream if one.server_streaming else self._gathered
                    yield path, _Rpc(partial(run, methods[path]), takes_all=False)
                else:
                    yield path, _Rpc(partial(self._unary, methods[path]))
        health = {"Check": self._health.check, "List": self._health.list, "Watch": self._health.watch}
        yield from ((f"/{HEALTH_SERVICE}/{name}", _Rpc(run)) for name, run in health.items())
        described = [f"{package}.ServerReflection" for package in REFLECTION]
        for package, service_name in zip(REFLECTION, described, strict=True):
            reflection = ReflectionService(package, (*names, HEALTH_SERVICE, *described))
            yield f"/{service_name}/ServerReflectionInfo", _Rpc(reflection.run, takes_all=False)

    async def start(self) -> None:
        """Listen. Raises ConfigError."""
        self._socket = _bound(self._config, is_shared=self._config.http_workers > 1)
        self.port = self._socket.getsockname()[1]
        self._health.set(is_serving=True)  # the models answer
        listen_tcp(self._socket)
        tls = None if self._tls is None else self._tls.http2
        self._listener = Listener(self._socket, self._connection, self._connections.close_oldest_idle, tls)
        self._watch = asyncio.ensure_future(self._tell_health())

    def log_address(self) -> None:
        """Log the address."""
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        log.info("listening on %s://%s:%d", "grpc" if self._tls is None else "grpcs", host, self.port)

    def begin_drain(self) -> None:
        """Have clients go elsewhere; the models refuse new work of those who come all the same."""
        self._is_draining = True
        self._health.set(is_serving=False)
        self._go_away()

    async def wait_drained(self) -> None:
        """Return at once: calls wait for the models, which are drained by themselves."""

    async def stop(self) -> None:
        """End: calls under way have a while for their answers."""
        if self._watch is not None:
            self._watch.cancel()
        if self._listener is not None and self._socket is not None:
            self._listener.close()
            self._socket.close()
            await self._listener.wait_closed()
        self._health.set(is_serving=False)
        self._go_away()
        until_s = self._loop.time() + LINGER_S
        while self._open and self._loop.time() < until_s:
            if not self._under_way:
                await asyncio.sleep(0.01)
            else:
                await asyncio.wait(self._under_way, timeout=0.1)
        for connection in [*self._open]:
            connection.drop()

    def _go_away(self) -> None:
        for connection in [*self._open]:
            connection.go_away()

    async def _tell_health(self) -> None:
        """Keep the health service's answers those of the probes over HTTP."""
        while not self._is_draining:
            is_serving = not await self._status.problems()
            if not self._is_draining:
                self._health.set(is_serving=is_serving)
            await asyncio.sleep(_HEALTH_EVERY_S)

    # Connections and their calls.

    def _connection(self) -> Http2Connection:
        connection = Http2Connection(self._connections, self, self._loop)
        self._open.add(connection)
        return connection

    def lost(self, connection: Http2Connection) -> None:
        """A connection is closed."""
        self._open.discard(connection)

    def accept(self, stream: Stream) -> None:
        """The head of a call has arrived."""
        rpc = self._rpcs.get(stream.head.path)
        if rpc is None:
            self._refuse(stream, RouteNotFoundError(f"There is no method {stream.head.path[:120]!r} here."))
        elif len(self._under_way) >= self._config.max_connections:
            most = self._config.max_connections
            self._refuse(stream, TooManyConnectionsError(f"{most} calls are under way: retry later."))
        elif not rpc.takes_all:
            stream.takes_all = False
            self._start(stream, rpc.run)

    def _refuse(self, stream: Stream, error: BeiError) -> None:
        self._connections.count_refusal(status_of(error), request_id_of(stream.head.headers))
        self.fail(stream, error)

    def begin(self, stream: Stream) -> None:
        """A call of one message has it."""
        self._start(stream, self._rpcs[stream.head.path].run)

    def fail(self, stream: Stream, error: BeiError) -> None:
        """End a call of which the messages cannot be read."""
        stream.finish(code_of(error), str(error), error_metadata(error))

    def _start(self, stream: Stream, run: Run) -> None:
        task = self._loop.create_task(self._guarded(stream, run))
        stream.task = task
        self._under_way.add(task)
        task.add_done_callback(partial(self._ended, stream))

    async def _guarded(self, stream: Stream, run: Run) -> None:
        try:
            await run(stream)
        except BeiError as error:
            self.fail(stream, error)
        except Exception:  # a border: a bug costs its own call the answer, and the client sees no traceback
            log.exception("unexpected error on %s", stream.head.path)
            self.fail(stream, UNEXPECTED)

    def _ended(self, stream: Stream, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        stream.connection.work_ended()

    async def _unary(self, method: RpcMethod, stream: Stream) -> None:
        call = await self._calls.answered(method, stream.only_message(), stream)
        _finish(stream, call)

    async def _gathered(self, method: RpcMethod, stream: Stream) -> None:
        """All messages of the stream as one request, of at most so many as a request may have."""
        given: list[Any] = []
        while (content := await stream.message()) is not None:
            given.append(content)
            if len(given) > self._config.max_client_batch_size:  # which the handler refuses
                break
        _finish(stream, await self._calls.answered(method, given, stream, is_stream=True))

    async def _stream(self, method: RpcMethod, stream: Stream) -> None:
        """An answer for each message, in order. Messages are read as answers are taken: a client that takes none sends
        none. The first that fails ends the stream."""
        key: Key | None = None
        is_first = True
        under_way: deque[asyncio.Task[RpcCall]] = deque()
        reading: asyncio.Task[bytes | None] | None = asyncio.ensure_future(stream.message())
        try:
            while reading is not None or under_way:
                waits: list[asyncio.Task[Any]] = [*under_way][:1]
                if reading is not None and len(under_way) < _MOST_UNDER_WAY:
                    waits.append(reading)
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if reading in waits and reading.done():
                    content = reading.result()
                    reading = None if content is None else asyncio.ensure_future(stream.message())
                    if content is not None:
                        answering = self._calls.answered(method, content, stream, key, is_stream=True)
                        under_way.append(asyncio.ensure_future(answering))
                        if is_first:  # its key is that of the whole stream
                            key, is_first = (await under_way[0]).key, False
                while under_way and under_way[0].done():
                    call = under_way.popleft().result()
                    if call.error is not None:
                        _finish(stream, call)
                        return
                    stream.answer(call.content)
                    await stream.answered()
            stream.finish(StatusCode.OK)
        finally:
            for task in (*under_way, *([] if reading is None else [reading])):
                task.cancel()


def _methods(config: ServeConfig, models: Models, server: WholeServer) -> Iterator[RpcMethod]:
    yield from tei_methods(config)
    yield from inference_methods(models, server)


def _finish(stream: Stream, call: RpcCall) -> None:
    """The answer, with its metadata, or the end of the call with its error."""
    error = call.error
    if error is None:
        stream.finish(StatusCode.OK, "", call.trailing, call.content)
    else:
        stream.finish(code_of(error), str(error), (*call.trailing, *error_metadata(error)))


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """Calls are all of one type."""
