"""The whole application with its models loaded, on the running event loop: for ``bei serve`` and other ASGI servers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from starlette.types import ASGIApp

from bei.artifact.manifest import Artifact, Manifest
from bei.config.devices import devices_of, usable_cores
from bei.config.settings import ServeConfig
from bei.errors import ConfigError
from bei.metrics.registry import Metrics
from bei.scheduler.device_gate import DeviceGate
from bei.server.app import create_app
from bei.server.batches.worker import BatchWorker, worker_of
from bei.server.endpoint.aliases import alias_names
from bei.server.endpoint.models import Models
from bei.server.http.memory_budgets import AnswerMemory
from bei.server.lifecycle.drain import Drains, wait_all_drained
from bei.server.lifecycle.swap import LocalSwaps
from bei.server.server_parts import ServerParts
from bei.service.loader import Loaded, Standing, check_names, load_model, load_next, manifest_of
from bei.service.service import InferenceService


@dataclass(frozen=True, eq=False)
class WholeApp:
    """``app`` answers requests from ``models`` in this process. An async context manager, which ends with ``aclose``.

    Of the event loop on which ``make_app`` ran.
    """

    app: ASGIApp
    models: Models
    swaps: LocalSwaps
    parts: ServerParts
    batches: BatchWorker | None
    answers: AnswerMemory

    @property
    def workers(self) -> tuple[Drains, ...]:
        """What has to drain, in this order: lines of batches that are under way are still answered."""
        return (self.models,) if self.batches is None else (self.batches, self.models)

    async def __aenter__(self) -> WholeApp:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Refuse new requests, answer those that were accepted, and free all engines."""
        self.swaps.end()
        for worker in self.workers:
            worker.begin_drain()
        await wait_all_drained(self.workers)
        if self.batches is not None:
            self.batches.close()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self.models.close)
        if self.parts.tracing is not None:
            await loop.run_in_executor(None, self.parts.tracing.close)
        if not self.swaps.is_loading:
            await self.swaps.wait_closed()


async def make_app(artifacts: Seq[Path | Artifact], config: ServeConfig) -> WholeApp:
    """The application of ``bei serve``, over ``artifacts`` on one device, with keys, access log and traces as
    ``config`` has them. Every engine has answered its canary.

    Artifacts given by their paths are verified first; the others are verified already. Loading holds the event loop.

    Raises ArtifactError and its subclasses, ConfigError, MissingDependencyError, EngineError.
    """
    if config.has_processes:
        raise ConfigError("http_workers and several devices are for 'bei serve': leave them out, and name one device.")
    # First the cheap steps: a missing key or a wrong alias is reported before gigabytes are loaded.
    manifests = [manifest_of(source) for source in artifacts]
    check_names(manifest.name for manifest in manifests)
    alias_names(config.alias, manifests)
    _take_device(manifests, config)
    parts = ServerParts.of(config, Metrics())
    models, swaps = _load(artifacts, config, parts.metrics)
    try:
        for service in models:
            await service.check_ready()  # an engine that computes other numbers than at build time gets no request
    except BaseException:  # raised again: engines are not left behind
        await asyncio.get_running_loop().run_in_executor(None, models.close)
        raise
    answers = AnswerMemory(config.answer_memory)
    app = create_app(models, parts, answers=answers)
    return WholeApp(app, models, swaps, parts, worker_of(parts.batches, app, parts.keys, config), answers)


def _take_device(manifests: Seq[Manifest], config: ServeConfig) -> None:
    """Bind this process to the device that ``config`` names, if it names one. Raises ConfigError."""
    if config.devices:
        targets = {manifest.name: manifest.target for manifest in manifests}
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
    models = Models(services, aliases=config.alias)
    return models, LocalSwaps(models, standings, partial(load_next, config=config), start, metrics)
