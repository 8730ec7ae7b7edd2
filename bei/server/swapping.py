"""SIGHUP: an artifact that was built again takes the place of the one that is served, and no request is lost.

Models are looked at one after the other, so that no more than one engine is in memory beside those that serve:

1. In a thread, the artifact is verified as at start and compared with the one that is served; its engine is loaded.
2. The new service answers its canary.
3. It takes the other's place. A request has found either the former service or the new one, and stays with it.
4. When nobody holds the former one any more it is closed, and its memory is given back.

Until 3 an error leaves everything as it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from bei.errors import BeiError, ShuttingDownError
from bei.loading import SHOWN_DIGITS, Loaded, Standing
from bei.metrics import Metrics
from bei.server.memory import give_back
from bei.server.models import Models
from bei.service import InferenceService

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

# What lies where a model's artifact lay; None: the same. Blocks.
LoadNext = Callable[[Standing, InferenceService], "Loaded | None"]

# Makes a service of it, on the event loop.
Start = Callable[[Loaded], InferenceService]


class Swapping:
    """Swaps the artifacts of ``models``, of which each has its ``standings``. Of one event loop."""

    def __init__(
        self, models: Models, standings: Mapping[str, Standing], load_next: LoadNext, start: Start, metrics: Metrics
    ) -> None:
        self._models = models
        self._standings = dict(standings)
        self._load_next = load_next
        self._start = start
        self._metrics = metrics
        self._is_due = False
        self._is_over = False
        self._task: asyncio.Task[None] | None = None
        self.is_loading = False  # in a thread that nothing can interrupt
        for service in models:
            metrics.artifact(service.name, service.manifest.digest)

    async def reload(self) -> None:
        """Look at all artifacts, soon. Where that is under way already, once more after it."""
        self._is_due = not self._is_over
        if self._is_due and self._task is None:
            self._task = asyncio.ensure_future(self._run())

    def end(self) -> None:
        """Swap nothing more: the server drains. What is being loaded will be thrown away."""
        self._is_over, self._is_due = True, False

    async def wait_closed(self) -> None:
        """Return when no service that was replaced is open. Not while something is loaded."""
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        while self._is_due:
            self._is_due = False
            for service in list(self._models):
                if not self._is_over:
                    await self._look_at(service)
        self._task = None

    async def _look_at(self, former: InferenceService) -> None:
        name, path = former.name, self._standings[former.name].path
        try:
            found = await self._next(former)
        except ShuttingDownError:
            log.info("%s: what was loaded from %s is not served any more", name, path)
            return
        except (BeiError, OSError) as error:  # OSError: files that cannot be read
            code = error.code if isinstance(error, BeiError) else BeiError.code
            said = " ".join(str(error).split())  # compilers say it in several lines
            log.error("%s is served as before, %s cannot take its place: %s: %s", name, path, code, said)
            self._metrics.swap(name, "refused")
        except Exception:  # a border: whatever is wrong with the new one, the former one serves
            log.exception("%s is served as before, %s cannot take its place", name, path)
            self._metrics.swap(name, "refused")
        else:
            if found is None:
                log.info("%s: its artifact is the one that is served, %s", name, _shown(former))
                self._metrics.swap(name, "unchanged")
            else:
                self._replace(former, *found)
                await self._close(former)

    async def _next(self, former: InferenceService) -> tuple[InferenceService, Standing] | None:
        """A service that may take the place of ``former``; None: there is no other artifact.

        Raises what ``LoadNext`` and the canary raise, and ShuttingDownError.
        """
        standing = self._standings[former.name]
        self.is_loading = True
        try:
            loaded = await _in_thread(self._load_next, standing, former)
        finally:
            self.is_loading = False
        if loaded is None:
            return None
        new, following = self._start(loaded), Standing.of(standing.path, loaded)
        del loaded  # which holds the engine: one that hangs is to be freed when it is given up
        try:
            await new.check_ready()
            if self._is_over:
                raise ShuttingDownError("The server drains.")
        except BaseException:
            await _in_thread(_closed, new)
            raise
        return new, following

    def _replace(self, former: InferenceService, new: InferenceService, standing: Standing) -> None:
        """In one moment of the event loop."""
        self._models.replace(new)
        self._standings[new.name] = standing
        self._metrics.artifact(new.name, new.manifest.digest)
        self._metrics.swap(new.name, "swapped")
        log.log(
            logging.INFO if new.certificate.passed else logging.WARNING,
            "%s is served from the artifact %s (%s, %s), no longer from %s; verification: %s",
            *(new.name, _shown(new), new.manifest.target, new.manifest.precision),
            *(_shown(former), new.certificate.verdict),
        )

    async def _close(self, former: InferenceService) -> None:
        """When it has answered everybody who has found it."""
        await former.wait_unheld()
        await _in_thread(_closed, former)
        self._models.removed(former)
        log.info("%s: the artifact %s has answered its last request and is closed", former.name, _shown(former))


def _shown(service: InferenceService) -> str:
    return service.manifest.digest[:SHOWN_DIGITS]


def _closed(service: InferenceService) -> None:
    """End its threads, and give its memory back to the system."""
    service.close()
    give_back()


async def _in_thread(work: Callable[..., ResultT], *args: object) -> ResultT:
    """``work(*args)`` in a thread of its own, which ends with it. Work that is offloaded for requests does not wait."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="bei-swap")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, work, *args)
    finally:
        executor.shutdown(wait=False)
