"""Replaces a served artifact by the one that was built in its place, without losing a request. SIGHUP asks for it.

``ArtifactSwaps`` is the loop over the models, for engines in this process (``LocalSwaps``) or in others
(``bei.multiprocess.supervisor.supervisor``). It handles one model at a time, so that at most one engine more is in
memory:

1. In a thread, the artifact is verified as at start and compared with the served one; its engine is loaded.
2. The new service answers its canary.
3. It takes the other's place. A request stays with the service that it has found.
4. When no request holds the former service, it is closed and its memory is given back.

An error before 3 leaves everything as it was.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from bei.artifact.certificate.record import Certificate
from bei.artifact.manifest import Manifest
from bei.artifact.store import SHOWN_DIGITS
from bei.errors import BeiError, ShuttingDownError
from bei.metrics.registry import Metrics, SwapResult
from bei.server.endpoint.models import Models
from bei.server.process_tuning import give_back
from bei.service.loader import Loaded, Standing
from bei.service.service import InferenceService

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
NextT = TypeVar("NextT")

# Loads the artifact at a model's path; None: it is the served one. Blocks.
LoadNext = Callable[[Standing, InferenceService], "Loaded | None"]

# Makes a service of a loaded artifact, on the event loop.
Start = Callable[[Loaded], InferenceService]


class ArtifactSwaps(ABC, Generic[NextT]):
    """Replaces models by the artifacts that ``find`` returns. Not thread-safe: used on one event loop."""

    def __init__(self) -> None:
        self._is_due = False
        self._is_over = False
        self._task: asyncio.Task[None] | None = None

    @abstractmethod
    def names(self) -> Iterable[str]:
        """Names of the models."""

    @abstractmethod
    def path(self, name: str) -> Path:
        """Folder of the model's artifact."""

    @abstractmethod
    def served(self, name: str) -> Manifest:
        """Manifest of the artifact that is served."""

    @abstractmethod
    async def find(self, name: str) -> NextT | None:
        """The replacement of the model, ready to answer; None: there is no other artifact.

        Raises BeiError, OSError where it may not, and ShuttingDownError where the server has begun to drain.
        """

    @abstractmethod
    async def swap(self, name: str, found: NextT) -> None:
        """Replace the model by ``found``, and close the former service when it has answered its last request."""

    @abstractmethod
    def count(self, name: str, result: SwapResult) -> None:
        """Count the result of a check of the model."""

    async def reload(self) -> None:
        """Start a check of all artifacts; if a check is running, another one follows it."""
        self._is_due = not self._is_over
        if self._is_due and self._task is None:
            self._task = asyncio.ensure_future(self._run())

    def end(self) -> None:
        """Swap nothing more: the server drains. An engine that is being loaded is dropped."""
        self._is_over, self._is_due = True, False

    def check_serving(self) -> None:
        """Raise ShuttingDownError after ``end``."""
        if self._is_over:
            raise ShuttingDownError("The server drains.")

    async def wait_closed(self) -> None:
        """Return when every replaced service is closed. Not to be called while one is being loaded."""
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        try:
            while self._is_due:
                self._is_due = False
                for name in list(self.names()):
                    if not self._is_over:
                        await self._look_at(name)
        finally:
            self._task = None  # so that a later SIGHUP can start another check

    async def _look_at(self, name: str) -> None:
        path = self.path(name)
        try:
            found = await self.find(name)
        except ShuttingDownError:
            log.info("%s: what was loaded from %s is not served any more", name, path)
            return
        except (BeiError, OSError) as error:  # OSError: files that cannot be read
            code = error.code if isinstance(error, BeiError) else BeiError.code
            said = " ".join(str(error).split())  # compilers say it in several lines
            log.error("%s is served as before, %s cannot take its place: %s: %s", name, path, code, said)
            self.count(name, "refused")
        except Exception:  # a border: whatever is wrong with the new one, the former one serves
            log.exception("%s is served as before, %s cannot take its place", name, path)
            self.count(name, "refused")
        else:
            if found is None:
                log.info("%s: its artifact is the one that is served, %s", name, shown(self.served(name)))
                self.count(name, "unchanged")
            else:
                await self._swap(name, found)

    async def _swap(self, name: str, found: NextT) -> None:
        try:
            await self.swap(name, found)
        except Exception:  # a border: to close the former may fail, and the other models are still to be looked at
            log.exception("%s: the swap to the artifact from %s was not completed", name, self.path(name))


def shown(manifest: Manifest) -> str:
    """The first digits of the digest."""
    return manifest.digest[:SHOWN_DIGITS]


def log_swapped(former: Manifest, new: Manifest, certificate: Certificate) -> None:
    """Log that requests are answered from ``new`` from now on."""
    log.log(
        logging.INFO if certificate.passed else logging.WARNING,
        "%s is served from the artifact %s (%s, %s), no longer from %s; verification: %s",
        *(new.name, shown(new), new.target, new.precision),
        *(shown(former), certificate.verdict),
    )


def log_closed(former: Manifest) -> None:
    """Log that ``former`` has answered its last request."""
    log.info("%s: the artifact %s has answered its last request and is closed", former.name, shown(former))


async def in_thread(work: Callable[..., ResultT], *args: object) -> ResultT:
    """Run ``work(*args)`` in a new thread, so that it takes no thread of a pool from requests."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="bei-swap")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, work, *args)
    finally:
        executor.shutdown(wait=False)


class ReadyService(NamedTuple):
    """A service that has answered its canary, and the facts about its engine."""

    service: InferenceService
    standing: Standing


class LocalSwaps(ArtifactSwaps[ReadyService]):
    """Swaps the artifacts of ``models`` in this process. ``standings``: facts about each engine, by name."""

    def __init__(
        self, models: Models, standings: Mapping[str, Standing], load_next: LoadNext, start: Start, metrics: Metrics
    ) -> None:
        super().__init__()
        self._models = models
        self._standings = dict(standings)
        self._load_next = load_next
        self._start = start
        self._metrics = metrics
        self.is_loading = False  # True while a thread loads an artifact, which nothing can interrupt
        for service in models:
            metrics.artifact(service.name, service.manifest.digest)

    def names(self) -> Iterable[str]:
        return self._standings

    def path(self, name: str) -> Path:
        return self._standings[name].path

    def served(self, name: str) -> Manifest:
        return self._models[name].manifest

    def count(self, name: str, result: SwapResult) -> None:
        self._metrics.swap(name, result)

    async def find(self, name: str) -> ReadyService | None:
        """The service that may replace the model's; None: there is no other artifact.

        Raises what ``LoadNext`` and the canary raise, and ShuttingDownError.
        """
        standing = self._standings[name]
        self.is_loading = True
        try:
            loaded = await in_thread(self._load_next, standing, self._models[name])
        finally:
            self.is_loading = False
        if loaded is None:
            return None
        new, new_standing = self._start(loaded), Standing.of(standing.path, loaded)
        del loaded  # it holds the engine, which must be freed if the new service hangs and is given up
        await check_new(new)
        try:
            self.check_serving()
        except BaseException:
            await in_thread(closed, new)
            raise
        return ReadyService(new, new_standing)

    async def swap(self, name: str, found: ReadyService) -> None:
        """Replace the model's service in one moment of the event loop, and close it when it has answered all."""
        new = found.service
        former = replace(self._models, new, self._metrics)
        self._standings[name] = found.standing
        self.count(name, "swapped")
        log_swapped(former.manifest, new.manifest, new.certificate)
        await close_replaced(self._models, former)
        log_closed(former.manifest)


async def check_new(new: InferenceService) -> None:
    """Return if ``new`` answers its canary. Otherwise close it and raise BeiError."""
    try:
        await new.check_ready()
    except BaseException:
        await in_thread(closed, new)
        raise


def replace(models: Models, new: InferenceService, metrics: Metrics) -> InferenceService:
    """Route new requests to ``new``. Returns the former service."""
    former = models.replace(new)
    metrics.artifact(new.name, new.manifest.digest)
    return former


async def close_replaced(models: Models, former: InferenceService) -> None:
    """Close ``former`` when no request holds it."""
    await former.wait_unheld()
    try:
        await in_thread(closed, former)
    finally:  # it gets no requests any more, even if closing it failed
        models.removed(former)


def closed(service: InferenceService) -> None:
    """Close ``service``, and give its memory back to the system."""
    service.close()
    give_back()
