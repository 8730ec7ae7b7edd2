"""The answers of a batch: two files of JSON lines, one of answers and one of errors, that only grow.

A checkpoint says how far both are, and how far the input is read. What was written behind it when a process ended is
cut off and computed again: so every line of the input is answered once, wherever the process was.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import BinaryIO, NamedTuple
from uuid import uuid4

import msgspec

from bei.server.batches.in_process import LineAnswer
from bei.server.batches.lines import LineProblem, RequestLine
from bei.utils.full_disk import naming_full_disk

# Between two checkpoints: so much is computed again after a crash.
_CHECKPOINT_S = 1.0


class LineResponse(msgspec.Struct):
    """What a route has answered. ``body`` is the answer itself."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, omit_defaults=True):
    """Why a line has no answer. ``line``: its number, of an input that was not validated before."""

    code: str
    message: str
    line: int | None = None


class AnsweredLine(msgspec.Struct):
    """A line of a batch's output, in OpenAI's form."""

    id: str
    custom_id: str | None
    response: LineResponse | None
    error: LineError | None


class LineResult(NamedTuple):
    """What became of a line, and what is written of it."""

    line: RequestLine
    content: bytes
    is_error: bool


def answered(line: RequestLine, answer: LineAnswer) -> LineResult:
    """The result of a line that a route has answered. Other statuses than 2xx are errors."""
    response = LineResponse(answer.status, answer.request_id, msgspec.Raw(answer.body))
    return _result(line, response, None, is_error=not 200 <= answer.status < 300)


def unanswered(line: RequestLine, problem: LineProblem, *, is_numbered: bool = False) -> LineResult:
    """The result of a line that no route was asked for."""
    error = LineError(problem.code, problem.message, line.number if is_numbered else None)
    return _result(line, None, error, is_error=True)


def _result(line: RequestLine, response: LineResponse | None, error: LineError | None, *, is_error: bool) -> LineResult:
    written = AnsweredLine(f"batch_req_{uuid4().hex}", line.custom_id, response, error)
    return LineResult(line, msgspec.json.encode(written) + b"\n", is_error)


class Checkpoint(msgspec.Struct, frozen=True):
    """How far a batch is: ``num_lines`` of its input, ``input_bytes`` in all, are answered."""

    input_bytes: int = 0
    num_lines: int = 0
    completed: int = 0
    failed: int = 0
    output_bytes: int = 0
    error_bytes: int = 0


class AnswerFiles:
    """``output`` and ``errors``, cut off at the checkpoint ``at``. ``save`` keeps another one for good, once what it
    counts is on the disk. Of one thread at a time. A context manager, which does not commit.

    Raises ValueError if a file is shorter than ``at`` says, OSError.
    """

    def __init__(self, output: Path, errors: Path, at: Checkpoint, save: Callable[[Checkpoint], None]) -> None:
        self._folder = output.parent
        self._save = save
        self._saved_s = time.monotonic()
        self._saved = self.reached = at
        self._output = _cut_off(output, at.output_bytes)
        try:
            self._errors = _cut_off(errors, at.error_bytes)
        except BaseException:  # raised again: the file is not left open
            self._output.close()
            raise

    def __enter__(self) -> AnswerFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._output.close()
        self._errors.close()

    def append(self, results: Seq[LineResult]) -> None:
        """Write ``results``, in the order of the input. Raises DiskFullError, OSError, and what ``save`` raises."""
        at = self.reached
        for result in results:
            size = len(result.content)
            with naming_full_disk(self._folder):
                write_all(self._errors if result.is_error else self._output, result.content)
            at = Checkpoint(
                result.line.end,
                result.line.number,
                at.completed + (not result.is_error),
                at.failed + result.is_error,
                at.output_bytes + (0 if result.is_error else size),
                at.error_bytes + (size if result.is_error else 0),
            )
        self.reached = at
        if time.monotonic() - self._saved_s >= _CHECKPOINT_S:
            self.commit()

    def commit(self) -> None:
        """Make sure that what was written is on the disk, and keep the checkpoint."""
        if self.reached != self._saved:
            with naming_full_disk(self._folder):
                os.fsync(self._output.fileno())
                os.fsync(self._errors.fileno())
            self._save(self.reached)
            self._saved = self.reached
        self._saved_s = time.monotonic()


def _cut_off(path: Path, size: int) -> BinaryIO:
    """``path``, open at its end, which is at ``size``."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    file = os.fdopen(descriptor, "r+b", buffering=0)
    try:
        if os.fstat(descriptor).st_size < size:
            raise ValueError(f"{path} is shorter than the {size} bytes that were written to it")
        file.truncate(size)
        file.seek(size)
    except BaseException:  # raised again: the file is not left open
        file.close()
        raise
    return file


def write_all(file: io.FileIO | BinaryIO, content: bytes) -> None:
    """Write all of ``content``: a file without a buffer may take less, on a disk that becomes full."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]
