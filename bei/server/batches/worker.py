"""Runs the batches of a server. Of all its processes one does, which holds a lock.

What it knows is in the store. Wherever it ends, another process, or the next start, goes on at the last checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from starlette.types import ASGIApp

from bei.config.settings import ServeConfig
from bei.errors import BeiError, UnauthorizedError
from bei.server.auth.keys import Keyring, flow_of
from bei.server.batches.batch_run import BatchRun
from bei.server.batches.in_process import BatchClient, LineAnswer, post
from bei.server.batches.lines import RequestLine
from bei.server.batches.records import BatchRecord
from bei.server.batches.store import BatchStore
from bei.utils.file_lock import FileLock, try_acquire

log = logging.getLogger(__name__)

# How often the store is asked for what clients of all processes want.
_POLL_S = 0.3
_CLEAN_EVERY_S = 3_600.0
# Batches that run side by side, each of another API key: a large one does not keep others waiting.
_MOST_RUNNING = 8
# After an engine that does not answer, a folder that cannot be used, and an unexpected error.
_RETRY_S = 10.0


class BatchWorker:
    """Of the event loop on which ``app`` runs. ``keys``: as of the server; None: it asks for none."""

    def __init__(self, store: BatchStore, app: ASGIApp, keys: Keyring | None, config: ServeConfig) -> None:
        self._store = store
        self._app = app
        self._keys = keys
        self._config = config
        self._is_ending = asyncio.Event()
        self._running: dict[str, BatchRun] = {}  # by id
        self._not_before_s: dict[str, float] = {}  # by id
        self._trouble = ""  # of the last round
        self._task: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Close the store. When all is drained."""
        self._store.close()

    def start(self) -> None:
        """Run batches from now on."""
        self._task = asyncio.ensure_future(self._work())

    def begin_drain(self) -> None:
        """Begin no other line. Those under way end, if the server still answers them."""
        self._is_ending.set()
        for run in self._running.values():
            run.stop()

    async def wait_drained(self) -> None:
        """Return when nothing is under way and all answers are on the disk. Raises nothing."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _work(self) -> None:
        while not self._is_ending.is_set():
            lock = await self._locked()
            if lock is not None:
                with lock:
                    await self._run_batches()
            await self._pause(_POLL_S)

    async def _locked(self) -> FileLock | None:
        try:
            return await asyncio.to_thread(try_acquire, self._store.lock_path)
        except OSError as error:
            log.error("batches wait: %s cannot be locked: %s", self._store.lock_path, error)
            await self._pause(_RETRY_S)
            return None

    async def _pause(self, seconds: float) -> None:
        """Until a run or the server ends, at most."""
        ending = asyncio.ensure_future(self._is_ending.wait())
        runs = [run.task for run in self._running.values()]
        await asyncio.wait([ending, *runs], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()

    async def _run_batches(self) -> None:
        """Until the drain."""
        clean_s = 0.0
        while not self._is_ending.is_set():
            try:
                self._attend(await asyncio.to_thread(self._store.open_batches))
                if time.monotonic() >= clean_s:
                    await asyncio.to_thread(self._store.clean)
                    clean_s = time.monotonic() + _CLEAN_EVERY_S
                self._trouble = ""
                pause_s = _POLL_S
            except Exception as error:  # a border: what one round meets, the next may not
                self._report(error)
                pause_s = _RETRY_S
            await self._pause(pause_s)
            self._forget_ended()
        while self._running:
            await asyncio.wait([run.task for run in self._running.values()])
            self._forget_ended()

    def _report(self, error: Exception) -> None:
        """Log it, once: the rounds that follow may meet it, too."""
        is_known = isinstance(error, (BeiError, OSError))
        trouble = str(error) if is_known else repr(error)
        if trouble != self._trouble:
            self._trouble = trouble
            log.error("batches wait: %s", trouble, exc_info=None if is_known else error)

    def _attend(self, batches: list[BatchRecord]) -> None:
        """Stop what is cancelled, and start the oldest batch of each client that has none running."""
        busy = {run.batch.owner for run in self._running.values()}
        for batch in batches:
            run = self._running.get(batch.id)
            if run is not None:
                if batch.status == "cancelling":
                    run.stop()
            elif batch.owner not in busy and len(self._running) < _MOST_RUNNING:
                busy.add(batch.owner)
                if time.monotonic() >= self._not_before_s.get(batch.id, 0.0):
                    self._running[batch.id] = self._begun(batch)

    def _begun(self, batch: BatchRecord) -> BatchRun:
        limits = self._config.batch_line_limit, self._config.payload_limit
        return BatchRun(batch, self._store, partial(self._ask, batch), *limits)

    def _forget_ended(self) -> None:
        for batch_id, run in [*self._running.items()]:
            if run.task.done():
                del self._running[batch_id]
                error = run.task.exception()
                if error is not None:  # a border: what one batch meets keeps no other waiting
                    log.error("batch %s meets an unexpected error, and is tried again", batch_id, exc_info=error)
                if error is not None or run.task.result():
                    self._not_before_s[batch_id] = time.monotonic() + _RETRY_S
                else:
                    self._not_before_s.pop(batch_id, None)

    async def _ask(self, batch: BatchRecord, line: RequestLine) -> LineAnswer:
        if self._keys is None:
            client = BatchClient(flow_of(batch.id))  # a batch is a client of its own
        else:
            key = self._keys.named(batch.owner)
            if key is None:
                raise UnauthorizedError(f"The API key {batch.owner} is not one of this server's any more.")
            client = BatchClient(key.flow, key)
        return await post(self._app, line.url, line.body, client)


def worker_of(store: BatchStore | None, app: ASGIApp, keys: Keyring | None, config: ServeConfig) -> BatchWorker | None:
    """A worker that runs; None: the server has no batches."""
    if store is None:
        return None
    worker = BatchWorker(store, app, keys, config)
    worker.start()
    return worker
