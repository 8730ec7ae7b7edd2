"""One batch, from the state that it is in to its last one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

from bei.errors import BeiError, DiskFullError, EngineDeadError
from bei.server.batches.answer_files import AnswerFiles, unanswered
from bei.server.batches.lines import LineProblem, RequestLine, read_lines
from bei.server.batches.records import BatchProblem, BatchRecord, Status
from bei.server.batches.runner import Ask, LineRunner
from bei.server.batches.store import BatchStore
from bei.server.batches.validation import validated

log = logging.getLogger(__name__)

# On a disk that is so full that not even the end of a batch can be written.
_RETRY_S = 5.0
# Lines without an answer that are written at a time.
_REST = 1_000

_EXPIRED = LineProblem(
    "batch_expired", "This request was not run before the completion window of its batch had ended: send it again."
)
_CANCELLED = LineProblem("batch_cancelled", "The batch was cancelled before this request was run.")


class BatchRun:
    """Runs ``batch`` at once, until it is finished or ``stop`` is called. ``task``: its result is True if the engine
    does not answer, and the rest is to be tried later. It raises where not even the batch's failure can be kept."""

    def __init__(self, batch: BatchRecord, store: BatchStore, ask: Ask, most_lines: int, most_body_bytes: int) -> None:
        self.batch = batch
        self._store = store
        self._ask = ask
        self._most_lines = most_lines
        self._most_body_bytes = most_body_bytes
        self._runner: LineRunner | None = None
        self._is_stopped = asyncio.Event()
        self.task = asyncio.ensure_future(self._run())

    def stop(self) -> None:
        """Begin no other line: the batch is cancelled, or the server drains."""
        self._is_stopped.set()
        if self._runner is not None:
            self._runner.stop()

    async def _run(self) -> bool:
        try:
            await self._advance()
        except EngineDeadError as error:
            log.error("batch %s waits: %s", self.batch.id, error)
            return True
        except (BeiError, OSError, ValueError) as error:
            await self._fail(_problem_of(error))
        except Exception:  # a border: a bug costs this batch its answers, and no other
            log.exception("batch %s meets an unexpected error", self.batch.id)
            await self._fail(
                _problem_of(BeiError("The server met an unexpected error: please report it with its log."))
            )
        return False

    async def _advance(self) -> None:
        if self.batch.status == "validating":
            await self._validate()
        if self.batch.status == "in_progress":
            await self._answer()
        if self.batch.status == "finalizing":
            await self._finish("expired" if self.batch.is_late else "completed", _EXPIRED)
        elif self.batch.status == "cancelling":
            await self._finish("cancelled", _CANCELLED)

    async def _validate(self) -> None:
        path, limits = self._store.content(self.batch.input_id), (self._most_lines, self._most_body_bytes)
        found = await asyncio.to_thread(validated, path, self.batch.endpoint, *limits)
        if found.problems:
            await self._end(lambda batch: batch.fail(found.problems, _now_s()))
            log.info("batch %s is not valid: %s", self.batch.id, found.problems[0]["message"])
            return

        def begin(batch: BatchRecord) -> None:
            if batch.status == "validating":  # it may have been cancelled
                batch.total = found.num_lines
                batch.move("in_progress", _now_s())

        await self._change(begin)

    async def _answer(self) -> None:
        """Answer the lines that are left, while there is time."""
        batch = self.batch
        log.info("batch %s: %d lines, %d of them answered", batch.id, batch.total, batch.checkpoint.num_lines)
        is_whole = False
        with await self._answer_files() as files:
            self._runner = LineRunner(self._ask, files)
            if self._is_stopped.is_set():
                self._runner.stop()
            left_s = max(0.0, batch.expires_s - time.time())
            expiry = asyncio.get_running_loop().call_later(left_s, self._runner.stop)
            try:
                with self._store.content(batch.input_id).open("rb") as file:
                    at = batch.checkpoint
                    lines = read_lines(file, self._most_body_bytes, at.input_bytes, at.num_lines)
                    is_whole = await self._runner.run(lines)
            finally:
                expiry.cancel()
        is_late = not is_whole and time.time() >= batch.expires_s

        def end(batch: BatchRecord) -> None:
            if batch.status == "in_progress" and (is_whole or is_late):
                batch.is_late = is_late
                batch.move("finalizing", _now_s())

        await self._change(end)

    async def _answer_files(self) -> AnswerFiles:
        batch, store = self.batch, self._store
        await asyncio.to_thread(store.begin_answers, batch)
        paths = store.content(batch.output_id), store.content(batch.error_id)
        return await asyncio.to_thread(AnswerFiles, *paths, batch.checkpoint, partial(store.save, batch))

    async def _finish(self, status: Status, problem: LineProblem) -> None:
        """Write an error for each line that has no answer, and hand the files to the client."""
        if self.batch.total:
            with await self._answer_files() as files:
                await asyncio.to_thread(self._write_rest, files, problem)
        await self._end(lambda batch: batch.move(status, _now_s()))
        log.info("batch %s is %s", self.batch.id, status)

    def _write_rest(self, files: AnswerFiles, problem: LineProblem) -> None:
        with self._store.content(self.batch.input_id).open("rb") as file:
            at = files.reached
            lines = read_lines(file, self._most_body_bytes, at.input_bytes, at.num_lines)
            while some := _some(lines):
                files.append([unanswered(line, problem) for line in some])
        files.commit()

    async def _fail(self, problem: BatchProblem) -> None:
        """Drop what was answered, which makes room on a full disk, and tell the client."""
        log.error("batch %s fails: %s", self.batch.id, problem["message"])
        while True:
            try:
                await asyncio.to_thread(self._drop_answers)
                await self._end(lambda batch: batch.fail([problem], _now_s()))
                return
            except (DiskFullError, OSError) as error:
                log.error("batch %s: that it has failed cannot be kept, and is tried again: %s", self.batch.id, error)
            try:
                await asyncio.wait_for(self._is_stopped.wait(), _RETRY_S)
                return
            except asyncio.TimeoutError:
                continue

    def _drop_answers(self) -> None:
        for file_id in (self.batch.output_id, self.batch.error_id):
            self._store.content(file_id).unlink(missing_ok=True)

    async def _change(self, change: Callable[[BatchRecord], object]) -> None:
        self.batch = await asyncio.to_thread(self._store.change, self.batch.owner, self.batch.id, change)

    async def _end(self, change: Callable[[BatchRecord], object]) -> None:
        self.batch = await asyncio.to_thread(self._store.finish, self.batch, change)


def _some(lines: Iterator[RequestLine]) -> list[RequestLine]:
    return [*islice(lines, _REST)]


def _now_s() -> int:
    return int(time.time())


def _problem_of(error: Exception) -> BatchProblem:
    code = error.code if isinstance(error, BeiError) else BeiError.code
    return {"code": code, "message": str(error), "param": None, "line": None}
