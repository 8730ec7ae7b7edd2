"""A server of one process: start-up, serving and drain."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path

from bei.artifact.manifest import Artifact
from bei.config.devices import devices_of, usable_cores
from bei.config.settings import ServeConfig
from bei.metrics.registry import Metrics
from bei.scheduler.device_gate import DeviceGate
from bei.server.app import create_app
from bei.server.auth.keys import keyring_of
from bei.server.endpoint.models import Models
from bei.server.http.connections import Connections, fitting_connections
from bei.server.http.listen import Sockets, log_served
from bei.server.http.listener import MOST_HANDSHAKES
from bei.server.http.tls import tls_of
from bei.server.lifecycle.drain import DrainingServer, uvicorn_config
from bei.server.lifecycle.sighup import SighupReloads
from bei.server.lifecycle.signals import exit_now, exit_soon, on_signals
from bei.server.lifecycle.swap import LocalSwaps
from bei.server.process_tuning import collect_rarely, run_on_loop
from bei.server.telemetry.access_log import request_log_of
from bei.server.telemetry.otel_settings import tracing_of
from bei.service.loader import Loaded, Standing, load_model, load_next, manifest_of
from bei.service.service import InferenceService
from bei.utils.sighup import LogTerminal, remember

log = logging.getLogger(__name__)


def run(artifacts: Seq[Path | Artifact], config: ServeConfig, sockets: Sockets) -> None:
    """Serve ``artifacts`` on ``sockets`` until SIGTERM or SIGINT; returns when every accepted request is answered.

    Artifacts given by their paths are verified first; the others are verified already.

    Raises ArtifactError and its subclasses, ConfigError, MissingDependencyError, EngineError, before it serves.
    """
    run_on_loop(_serve(artifacts, config, sockets))


async def _serve(artifacts: Seq[Path | Artifact], config: ServeConfig, sockets: Sockets) -> None:
    # First the cheap steps: a missing key is reported before gigabytes are loaded.
    memory = remember()
    _take_device(artifacts, config)
    metrics = Metrics()
    keys, tls, request_log = keyring_of(config), tls_of(config), request_log_of(config)
    tracing = tracing_of(config)
    reloading = SighupReloads([part.reload for part in (keys, tls) if part is not None], memory)
    models, swapping = _load(artifacts, config, metrics)
    reloading.add(swapping.reload)
    for service in models:
        await service.check_ready()  # an engine that computes other numbers than at build time must not get a request
    app = create_app(models, config, metrics, keys, request_log, tracing)
    max_connections = fitting_connections(config.max_connections, MOST_HANDSHAKES if tls is not None else 0)
    connections = Connections(config, metrics, max_connections, request_log)
    server = DrainingServer(
        uvicorn_config(app),
        models,
        connections,
        tls,
        reloading.start,
        lambda: _Signals(server, models, reloading, swapping).take(memory.terminal),
    )
    collect_rarely()
    try:
        listening = sockets.listen()
        for service in models:
            log_served(service.manifest, service.certificate)
        sockets.log_addresses()
        await server.serve(sockets=listening)
    finally:
        sockets.close()
    await asyncio.get_running_loop().run_in_executor(None, models.close)
    if tracing is not None:
        await asyncio.get_running_loop().run_in_executor(None, tracing.close)
    if not swapping.is_loading:
        await swapping.wait_closed()
    log.info("stopped")
    if swapping.is_loading:  # it would take seconds or minutes more, for an engine that is not used
        exit_now()


def _take_device(artifacts: Seq[Path | Artifact], config: ServeConfig) -> None:
    """Bind this process to the device that ``config`` names, if it names one. Raises ConfigError."""
    if config.devices:
        targets = {manifest.name: manifest.target for manifest in map(manifest_of, artifacts)}
        (device,) = devices_of(config.devices, targets, os.environ, usable_cores())
        device.take()


def _load(artifacts: Seq[Path | Artifact], config: ServeConfig, metrics: Metrics) -> tuple[Models, LocalSwaps]:
    """The services of ``artifacts``, and their swaps for new ones."""
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
    return models, LocalSwaps(models, standings, partial(load_next, config=config), start, metrics)


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
