"""SIGHUP: an artifact that was built again takes the place of the one that is served, and no request is lost.

Models are looked at one after the other, so that no more than one engine is in memory beside those that serve:

1. In a thread, the artifact is verified as at start and compared with the one that is served; its engine is loaded.
2. The new service answers its canary.
3. It takes the other's place. A request has found either the former service or the new one, and stays with it.
4. When nobody holds the former one any more it is closed, and its memory is given back.

Until 3 an error leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from bei.artifact.manifest import Manifest
from bei.metrics.registry import Metrics, SwapResult
from bei.server.endpoint.models import Models
from bei.server.lifecycle.swap_loop import SwapLoop, in_thread, log_closed, log_swapped
from bei.server.process_tuning import give_back
from bei.service.loader import Loaded, Standing
from bei.service.service import InferenceService

# What lies where a model's artifact lay; None: the same. Blocks.
LoadNext = Callable[[Standing, InferenceService], "Loaded | None"]

# Makes a service of it, on the event loop.
Start = Callable[[Loaded], InferenceService]


class Following(NamedTuple):
    """A service that has answered its canary, and what is known of its engine."""

    service: InferenceService
    standing: Standing


class Swapping(SwapLoop[Following]):
    """Swaps the artifacts of ``models``, of which each has its ``standings``. Of one event loop."""

    def __init__(
        self, models: Models, standings: Mapping[str, Standing], load_next: LoadNext, start: Start, metrics: Metrics
    ) -> None:
        super().__init__()
        self._models = models
        self._standings = dict(standings)
        self._load_next = load_next
        self._start = start
        self._metrics = metrics
        self.is_loading = False  # in a thread that nothing can interrupt
        for service in models:
            metrics.artifact(service.name, service.manifest.digest)

    def names(self) -> Iterable[str]:
        """The models."""
        return self._standings

    def path(self, name: str) -> Path:
        """Where the artifact of the model lies."""
        return self._standings[name].path

    def served(self, name: str) -> Manifest:
        """Of the artifact that is served."""
        return self._models[name].manifest

    def count(self, name: str, result: SwapResult) -> None:
        """The model was looked at."""
        self._metrics.swap(name, result)

    async def find(self, name: str) -> Following | None:
        """A service that may take the place of the model's; None: there is no other artifact.

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
        new, following = self._start(loaded), Standing.of(standing.path, loaded)
        del loaded  # which holds the engine: one that hangs is to be freed when it is given up
        await check_new(new)
        try:
            self.check_serving()
        except BaseException:
            await in_thread(closed, new)
            raise
        return Following(new, following)

    async def swap(self, name: str, found: Following) -> None:
        """Replace the model's service in one moment of the event loop, and close it when it has answered all."""
        new = found.service
        former = replace(self._models, new, self._metrics)
        self._standings[name] = found.standing
        self.count(name, "swapped")
        log_swapped(former.manifest, new.manifest, new.certificate)
        await close_replaced(self._models, former)
        log_closed(former.manifest)


async def check_new(new: InferenceService) -> None:
    """Return if ``new`` answers its canary. Raises BeiError if not; then it is closed."""
    try:
        await new.check_ready()
    except BaseException:
        await in_thread(closed, new)
        raise


def replace(models: Models, new: InferenceService, metrics: Metrics) -> InferenceService:
    """Give ``new`` the requests that come from now on. Returns the former service."""
    former = models.replace(new)
    metrics.artifact(new.name, new.manifest.digest)
    return former


async def close_replaced(models: Models, former: InferenceService) -> None:
    """Close ``former`` when it has answered everybody who has found it."""
    await former.wait_unheld()
    try:
        await in_thread(closed, former)
    finally:  # what could not be closed is still not asked any more
        models.removed(former)


def closed(service: InferenceService) -> None:
    """End its threads, and give its memory back to the system."""
    service.close()
    give_back()
