"""A server of one process: start-up, serving and drain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence as Seq
from pathlib import Path

from bei.artifact.manifest import Artifact
from bei.config.settings import ServeConfig
from bei.server.endpoint.models import Models
from bei.server.grpc.server import grpc_of
from bei.server.http.connections import Connections, fitting_connections
from bei.server.http.listen import Sockets, log_served
from bei.server.http.listener import MOST_HANDSHAKES
from bei.server.http.tls import tls_of
from bei.server.lifecycle.drain import DrainingServer, uvicorn_config
from bei.server.lifecycle.sighup import SighupReloads
from bei.server.lifecycle.signals import exit_now, exit_soon, on_signals
from bei.server.lifecycle.swap import LocalSwaps
from bei.server.make_app import make_app
from bei.server.process_tuning import collect_rarely, run_on_loop
from bei.utils.sighup import LogTerminal, remember

log = logging.getLogger(__name__)


def run(artifacts: Seq[Path | Artifact], config: ServeConfig, sockets: Sockets) -> None:
    """Serve ``artifacts`` on ``sockets`` until SIGTERM or SIGINT; returns when every accepted request is answered.

    Artifacts given by their paths are verified first; the others are verified already.

    Raises ArtifactError and its subclasses, ConfigError, MissingDependencyError, EngineError, before it serves.
    """
    run_on_loop(_serve(artifacts, config, sockets))


async def _serve(artifacts: Seq[Path | Artifact], config: ServeConfig, sockets: Sockets) -> None:
    memory = remember()
    tls = tls_of(config)  # wrong certificates are reported before gigabytes are loaded
    async with await make_app(artifacts, config) as whole:
        parts = whole.parts
        reloading = SighupReloads([part.reload for part in (parts.keys, tls, whole.swaps) if part is not None], memory)
        max_connections = fitting_connections(config.max_connections, MOST_HANDSHAKES if tls is not None else 0)
        connections = Connections(config, parts.metrics, max_connections, parts.request_log)
        grpc = grpc_of(whole.models, parts, tls, whole.answers, connections.bodies)
        server = DrainingServer(
            uvicorn_config(whole.app),
            whole.workers if grpc is None else (*whole.workers, grpc),
            connections,
            tls,
            reloading.start,
            lambda: _Signals(server, whole.models, reloading, whole.swaps).take(memory.terminal),
        )
        collect_rarely()
        try:
            listening = sockets.listen()
            for service in whole.models:
                log_served(service.manifest, service.certificate)
            if grpc is not None:
                await grpc.start()
                grpc.log_address()
            sockets.log_addresses()
            await server.serve(sockets=listening)
        finally:
            sockets.close()
            if grpc is not None:
                await grpc.stop()
    log.info("stopped")
    if whole.swaps.is_loading:  # it would take seconds or minutes more, for an engine that is not used
        exit_now()


class _Signals:
    """First signal: refuse new requests with 503, answer those that are accepted, stop. Second: refuse those that wait,
    too, and end the process within seconds, even if something hangs. SIGHUP: reload everything.
    """

    def __init__(self, server: DrainingServer, models: Models, reloading: SighupReloads, swapping: LocalSwaps) -> None:
        self._server = server
        self._models = models
        self._reloading = reloading
        self._swapping = swapping
        self._drain: asyncio.Task[None] | None = None

    def take(self, terminal: LogTerminal) -> None:
        """Install the handlers. Call it on the event loop."""
        loop = asyncio.get_running_loop()

        def later() -> None:
            log.warning("second signal: requests that wait for an answer get 503")
            exit_soon()
            loop.call_soon_threadsafe(self._models.abandon)

        def reload() -> None:
            loop.call_soon_threadsafe(self._reloading.soon)

        on_signals(lambda: loop.call_soon_threadsafe(self._begin_drain), later, reload, terminal)

    def _begin_drain(self) -> None:
        log.info("draining: new requests get 503")
        self._swapping.end()
        self._server.begin_drain()
        self._drain = asyncio.ensure_future(self._stop_when_drained())

    async def _stop_when_drained(self) -> None:
        await self._server.wait_drained()
        self._server.stop()
