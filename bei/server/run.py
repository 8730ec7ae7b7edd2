"""Start-up, serving and the drain: a server's life from arguments to exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import uvicorn
import uvloop
from starlette.types import ASGIApp

from bei.artifact import Artifact
from bei.batching.gate import DeviceGate
from bei.config import ServeConfig
from bei.loading import Loaded, Standing, load_model, load_next
from bei.metrics import Metrics
from bei.server.app import create_app
from bei.server.connections import Connections
from bei.server.descriptors import MOST_HANDSHAKES, Listener, fitting_connections, raise_limit
from bei.server.keys import keyring_of
from bei.server.models import Models
from bei.server.protocol import Connection
from bei.server.reloading import Reloading
from bei.server.request_log import request_log_of
from bei.server.sockets import UnixSocket, bind_tcp, listen_tcp
from bei.server.stopping import LogTerminal, exit_now, exit_soon, on_signals
from bei.server.swapping import Swapping
from bei.server.tls import TLS, tls_of
from bei.server.tracing import tracing_of
from bei.service import InferenceService

log = logging.getLogger(__name__)

# When everything accepted is answered, clients have this long to take the answers; one that never ends its own
# request does not keep the process.
_LINGER_S = 10

# An engine thread that comes back from a batch must not wait Python's usual 5 ms for the event loop to let go of the
# interpreter: the device would be idle (docs/decisions.md: +5 % single texts, +2 % bulk).
_SWITCH_INTERVAL_S = 1e-4


# Python's garbage collector stops every thread for 1 us an object it looks at. A collection of everything took 60 to
# 100 ms, most of it for what was imported at start (docs/decisions.md, "Large answers"): that is left out for good, and
# the rest, a large request's inputs say, is looked at as a whole a thousandth as often. Reference counts free nearly
# everything here; the collector is for the cycles of exceptions, which are young.
_GC_THRESHOLDS = (5_000, 20, 100)


def run(artifacts: Seq[Path | Artifact], config: ServeConfig) -> None:
    """Serve ``artifacts`` until SIGTERM or SIGINT; returns when every accepted request is answered.

    Those given by their paths are verified first, the others have been.

    Raises ArtifactError and its subclasses, ConfigError, MissingDependencyError, EngineError, before it serves.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    raise_limit()
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(_serve(artifacts, config))
    finally:
        loop.close()


async def _serve(artifacts: Seq[Path | Artifact], config: ServeConfig) -> None:
    # First what costs nothing: a taken port or a lost key is known before gigabytes are loaded.
    tcp = bind_tcp(config.host, config.port) if config.listens_on_tcp else None
    uds = None if config.uds is None else UnixSocket(config.uds, config.uds_mode)
    metrics = Metrics()
    keys, tls, request_log = keyring_of(config, metrics), tls_of(config), request_log_of(config)
    tracing = tracing_of(config)
    terminal = LogTerminal()
    reloading = Reloading([part.reload for part in (keys, tls) if part is not None], terminal)
    reloading.remember()
    models, swapping = _load(artifacts, config, metrics)
    reloading.add(swapping.reload)
    for service in models:
        await service.check_ready()  # an engine that computes something else must not get a single request
    app = create_app(models, config, metrics, keys, request_log, tracing)
    max_connections = fitting_connections(config.max_connections, MOST_HANDSHAKES if tls is not None else 0)
    connections = Connections(config, metrics, max_connections, request_log)
    server = _DrainingServer(_uvicorn_config(app), models, connections, reloading, swapping, terminal, tls)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        sockets = _listen(tcp, uds)
        for service in models:
            manifest, certificate = service.manifest, service.certificate
            level = logging.INFO if certificate.passed else logging.WARNING
            how = f"{manifest.target}, {manifest.precision}"
            log.log(level, "serving %s (%s); verification: %s", service.name, how, certificate.verdict)
        for address in _addresses(tcp, uds, tls):
            log.info("listening on %s", address)
        await server.serve(sockets=sockets)
    finally:
        if uds is not None:
            uds.remove()
    await asyncio.get_running_loop().run_in_executor(None, models.close)
    if tracing is not None:
        await asyncio.get_running_loop().run_in_executor(None, tracing.close)
    if not swapping.is_loading:
        await swapping.wait_closed()
    log.info("stopped")
    if swapping.is_loading:  # seconds or minutes more, for an engine that nobody will ask
        exit_now()


def _load(artifacts: Seq[Path | Artifact], config: ServeConfig, metrics: Metrics) -> tuple[Models, Swapping]:
    """The services of ``artifacts``, and what swaps them for others."""
    gate = DeviceGate()

    def start(loaded: Loaded) -> InferenceService:
        return loaded.service(config, metrics, gate)

    services: list[InferenceService] = []
    standings = {}
    for source in artifacts:
        loaded = load_model(source, config)
        services.append(start(loaded))
        standings[services[-1].name] = Standing.of(source, loaded)
    models = Models(services)
    return models, Swapping(models, standings, partial(load_next, config=config), start, metrics)


def _uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Connection,  # made by the server below; named here so that no other implementation is loaded
        ws="none",  # a request to upgrade is answered as if it had not asked
        lifespan="off",
        log_config=None,
        access_log=False,  # bei.server.request_log has a better one
        timeout_graceful_shutdown=_LINGER_S,
        proxy_headers=False,  # nothing here reads the client's address
        server_header=False,
    )


def _listen(tcp: socket.socket | None, uds: UnixSocket | None) -> list[socket.socket]:
    """The sockets, which listen from now on. Raises ConfigError."""
    sockets = []
    if tcp is not None:
        listen_tcp(tcp)
        sockets.append(tcp)
    if uds is not None:
        sockets.append(uds.listen())
    return sockets


def _addresses(tcp: socket.socket | None, uds: UnixSocket | None, tls: TLS | None) -> Iterator[str]:
    if tcp is not None:
        host, port = tcp.getsockname()[:2]
        yield f"{'http' if tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"
    if uds is not None:
        yield f"unix:{uds.path}"


class _DrainingServer(uvicorn.Server):
    """First signal: refuse new requests with 503, answer what is accepted, stop. Second: refuse what waits, too, and
    end the process within seconds, whatever hangs.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        models: Models,
        connections: Connections,
        reloading: Reloading,
        swapping: Swapping,
        terminal: LogTerminal,
        tls: TLS | None,
    ) -> None:
        super().__init__(config)
        self._models = models
        self._connections = connections
        self._reloading = reloading
        self._swapping = swapping
        self._terminal = terminal
        self._tls = tls
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Our own listeners and connections."""
        loop = asyncio.get_running_loop()

        def connection() -> Connection:
            return Connection(self.config, self.server_state, self._connections, loop)

        def listener(sock: socket.socket) -> Listener:
            tls = None if sock.family == socket.AF_UNIX else self._tls
            return Listener(sock, connection, self._connections.close_oldest_idle, tls, self._connections)

        self.servers = [listener(sock) for sock in sockets or []]  # type: ignore[misc]
        self._connections.start_clock()
        self._reloading.start()
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what is under way; clients have a while to take it."""
        await super().shutdown(sockets)
        self._connections.stop_clock()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Our own handlers: uvicorn's stop listening at once, and end the process by the signal instead of exit 0."""
        loop = asyncio.get_running_loop()

        def later() -> None:
            log.warning("second signal: what waits for its answer gets 503")
            exit_soon()
            loop.call_soon_threadsafe(self._models.abandon)

        def reload() -> None:
            loop.call_soon_threadsafe(self._reloading.soon)

        on_signals(lambda: loop.call_soon_threadsafe(self._begin_drain), later, reload, self._terminal)
        yield

    def _begin_drain(self) -> None:
        log.info("draining: new requests get 503")
        self._swapping.end()
        self._models.begin_drain()
        self._drain = asyncio.ensure_future(self._stop_when_drained())

    async def _stop_when_drained(self) -> None:
        await self._models.wait_drained()
        self.should_exit = True
