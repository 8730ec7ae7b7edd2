"""Looking at the artifacts of a server anew, one model after the other, and saying what became of them.

Where the engines are is the business of who swaps: in this process (``bei.server.lifecycle.swap``), or in others
(``bei.multiprocess.supervisor.swap``).
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, TypeVar

from bei.artifact.certificate.record import Certificate
from bei.artifact.manifest import Manifest
from bei.errors import BeiError, ShuttingDownError
from bei.metrics.registry import SwapResult
from bei.service.loader import SHOWN_DIGITS

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
NextT = TypeVar("NextT")


class SwapLoop(ABC, Generic[NextT]):
    """Swaps what ``find`` finds. Of one event loop."""

    def __init__(self) -> None:
        self._is_due = False
        self._is_over = False
        self._task: asyncio.Task[None] | None = None

    @abstractmethod
    def names(self) -> Iterable[str]:
        """The models."""

    @abstractmethod
    def path(self, name: str) -> Path:
        """Where the artifact of the model lies."""

    @abstractmethod
    def served(self, name: str) -> Manifest:
        """Of the artifact that is served."""

    @abstractmethod
    async def find(self, name: str) -> NextT | None:
        """What may take the place of the model, ready to answer; None: there is no other artifact.

        Raises BeiError, OSError where it may not, and ShuttingDownError where the server has begun to drain.
        """

    @abstractmethod
    async def swap(self, name: str, found: NextT) -> None:
        """Let it take the place, and close the former when nobody asks it any more."""

    @abstractmethod
    def count(self, name: str, result: SwapResult) -> None:
        """The model was looked at."""

    async def reload(self) -> None:
        """Look at all artifacts, soon. Where that is under way already, once more after it."""
        self._is_due = not self._is_over
        if self._is_due and self._task is None:
            self._task = asyncio.ensure_future(self._run())

    def end(self) -> None:
        """Swap nothing more: the server drains. What is being loaded will be thrown away."""
        self._is_over, self._is_due = True, False

    def check_serving(self) -> None:
        """Raise ShuttingDownError after ``end``."""
        if self._is_over:
            raise ShuttingDownError("The server drains.")

    async def wait_closed(self) -> None:
        """Return when nothing that was replaced is open. Not while something is loaded."""
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
            self._task = None  # or no later SIGHUP would start another

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
    """The first digits of its digest."""
    return manifest.digest[:SHOWN_DIGITS]


def log_swapped(former: Manifest, new: Manifest, certificate: Certificate) -> None:
    """Say that requests that come now are answered from ``new``."""
    log.log(
        logging.INFO if certificate.passed else logging.WARNING,
        "%s is served from the artifact %s (%s, %s), no longer from %s; verification: %s",
        *(new.name, shown(new), new.target, new.precision),
        *(shown(former), certificate.verdict),
    )


def log_closed(former: Manifest) -> None:
    """Say that nobody asks ``former`` any more."""
    log.info("%s: the artifact %s has answered its last request and is closed", former.name, shown(former))


async def in_thread(work: Callable[..., ResultT], *args: object) -> ResultT:
    """``work(*args)`` in a thread of its own, which ends with it. Work that is offloaded for requests does not wait."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="bei-swap")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, work, *args)
    finally:
        executor.shutdown(wait=False)
