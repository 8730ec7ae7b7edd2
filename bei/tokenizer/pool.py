"""Threads that tokenize texts or labels, or decode images. The tokenizers library and Pillow release the GIL, so
threads suffice.

Independent of batching: results go to a callback, in a thread of the pool.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeGuard

from bei.core import Encoding
from bei.errors import BeiError, EngineError
from bei.image.source import ImageInput, ImagesInText
from bei.tokenizer.common_text import CommonText
from bei.tokenizer.encoder import AS_CONFIGURED, EncodingOptions, Input

log = logging.getLogger(__name__)

# Texts of one request in a chunk: few enough that the engine starts early on a large request and threads share it, many
# enough that the hand-over is negligible beside tokenization (0.1 ms for a text of 74 tokens).
CHUNK = 32
_CHUNK_CHARS = 1 << 16

# Texts that are read to their ends are not urgent if they have more characters than this (5 to 15 ms in the library).
# Other texts may be read to their ends too, if only the end has tokens: this many then take 0.2 s.
_LONG_CHARS = 1 << 14
_MOST_URGENT_CHARS = 1 << 19

# Urgent texts of at most this many characters are tokenized by the caller: a fraction of a millisecond, where a thread
# of the pool costs two switches of the interpreter's lock.
_INLINE_CHARS = 512

# An engine on the CPU has a thread on every core, and its step ends with the last of them: beside a thread that decodes
# images, steps took twice their time. With this niceness such a thread has a tenth of a contended core; with much less
# it would hold the interpreter's lock for too long where it is interrupted.
_BULK_NICENESS = 10

OnEncoded = Callable[[int, list[Encoding]], None]
# Called with the place of the input that failed; of a chunk that fails as a whole, the place of its first input.
OnFailed = Callable[[int, BeiError], None]


AnyInput: TypeAlias = "Input | ImageInput | ImagesInText"


class InputEncoder(Protocol):
    """Makes encodings of texts and pairs (``TextEncoder``), images (``ImageEncoder``) or labels (``LabelEncoder``)."""

    def encode(
        self,
        inputs: Seq[Any],
        options: EncodingOptions = ...,
        common: CommonText | None = ...,
        check: Callable[[], None] = ...,
    ) -> list[Encoding]:
        """The encodings of ``inputs``. ``check`` is called now and then, and may raise. Raises BeiError."""


class Turns(Protocol):
    """Says when threads may do work that is not urgent."""

    def enter(self, is_cancelled: Callable[[], bool]) -> None:
        """Return when the calling thread may work, or ``is_cancelled``. Blocks."""

    def leave(self) -> None:
        """The calling thread has no work."""


class _CancelledError(Exception):
    """The chunk's request was cancelled."""


class _Job(NamedTuple):
    """A chunk of a request: its inputs, and the place of the first. ``one_by_one``: inputs fail separately."""

    start: int
    inputs: Seq[AnyInput]
    options: EncodingOptions
    on_encoded: OnEncoded
    on_failed: OnFailed
    is_cancelled: Callable[[], bool]
    common: CommonText
    one_by_one: bool

    def check(self) -> None:
        """Raise _CancelledError if the request was cancelled."""
        if self.is_cancelled():
            raise _CancelledError


class TokenizerPool:
    """Threads that tokenize chunks of requests: ``num_threads`` for urgent chunks, and as many for others.

    Urgent chunks have threads of their own, so they never wait for others; each kind is served in the order of
    submission, whatever the deadlines. The operating system shares the cores among the threads; those of others have a
    lower priority, and take ``turns`` where these are given. Short texts (``is_short``) need no thread
    (``encode_inline``). Admission bounds the queues: it counts every text until it is answered.
    """

    def __init__(
        self,
        encoder: InputEncoder,
        num_threads: int,
        name: str = "tokenizer",
        turns: Turns | None = None,
    ) -> None:
        self._encoder = encoder
        self._turns = turns
        self._name = name
        self._urgent: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._others: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=f"bei-{name}-{kind}-{index}", daemon=True)
            for kind, work in (("urgent", self._work_urgently), ("bulk", self._work_on_others))
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        inputs: Seq[AnyInput],
        on_encoded: OnEncoded,
        on_failed: OnFailed,
        is_cancelled: Callable[[], bool],
        options: EncodingOptions = AS_CONFIGURED,
        *,
        is_urgent: bool = False,
        one_by_one: bool = False,
    ) -> None:
        """Tokenize ``inputs`` in chunks; ``on_encoded(start, encodings)`` is called for each chunk, in a pool thread.

        ``one_by_one``: if a chunk fails, its inputs are tokenized one by one, and fail separately. ``is_cancelled`` is
        checked before each chunk and each piece of a long text; after cancellation no callback is called.
        """
        common = CommonText()
        jobs = self._urgent if is_urgent else self._others
        for start, stop in chunks_of(inputs, chars_around(options)):
            part = inputs[start:stop]
            jobs.put(_Job(start, part, options, on_encoded, on_failed, is_cancelled, common, one_by_one))

    def encode_inline(self, value: Input, options: EncodingOptions = AS_CONFIGURED) -> Encoding:
        """Tokenize ``value`` in the calling thread. Raises the errors of ``TextEncoder.encode``, EngineError."""
        try:
            return self._encoder.encode([value], options)[0]
        except BeiError:
            raise
        except BaseException as error:  # a boundary, as in ``_run``: the library's Rust panics are not Exceptions
            raise _broken(self._name) from error

    @property
    def is_alive(self) -> bool:
        """True if all threads are running."""
        return all(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Finish what is queued, then end the threads."""
        for _ in range(len(self._threads) // 2):
            self._urgent.put(None)
            self._others.put(None)
        for thread in self._threads:
            thread.join()

    def _work_urgently(self) -> None:
        while (job := self._urgent.get()) is not None:
            if not job.is_cancelled():
                self._run(job)

    def _work_on_others(self) -> None:
        _lower_priority()
        try:
            while (job := self._next_of_others()) is not None:
                if self._turns is not None:
                    self._turns.enter(job.is_cancelled)
                if not job.is_cancelled():
                    self._run(job)
        finally:
            if self._turns is not None:
                self._turns.leave()

    def _next_of_others(self) -> _Job | None:
        try:
            return self._others.get_nowait()
        except queue.Empty:
            if self._turns is not None:
                self._turns.leave()
            return self._others.get()

    def _run(self, job: _Job) -> None:
        try:
            job.on_encoded(job.start, self._encoder.encode(job.inputs, job.options, job.common, job.check))
        except _CancelledError:
            return
        except BeiError as error:
            self._failed(job, error)
        except BaseException:  # a boundary: the library's Rust panics are not Exceptions, and must not end the thread
            self._failed(job, _broken(self._name))

    def _failed(self, job: _Job, error: BeiError) -> None:
        if not job.one_by_one or len(job.inputs) == 1:
            job.on_failed(job.start, error)
            return
        for place, value in enumerate(job.inputs, job.start):
            if not job.is_cancelled():
                self._run(job._replace(start=place, inputs=[value]))


def _lower_priority() -> None:
    """Add ``_BULK_NICENESS`` to that of the calling thread, where threads have one of their own."""
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may refuse it, and the server is as right without it
            niceness = os.getpriority(os.PRIO_PROCESS, 0)  # of a thread, on Linux
            os.setpriority(os.PRIO_PROCESS, 0, niceness + _BULK_NICENESS)


def _broken(name: str) -> EngineError:
    """The error of a broken tokenizer or decoder; the library's own message goes to the log."""
    log.exception("%s failed", name)
    return EngineError(f"The {name} failed on an input.")


def is_short(value: AnyInput | list[int], options: EncodingOptions = AS_CONFIGURED) -> TypeGuard[Input]:
    """True if tokenizing ``value`` in the calling thread takes less time than waking a thread of the pool."""
    if isinstance(value, list | ImageInput | ImagesInText):
        return False
    return _num_chars(value) + chars_around(options) <= _INLINE_CHARS


def is_long(inputs: Seq[AnyInput], options: EncodingOptions) -> bool:
    """True if ``inputs`` that are read to their ends have so many characters that other requests would wait."""
    num_chars = sum(map(_num_chars, inputs)) + len(inputs) * chars_around(options)
    return num_chars > (_LONG_CHARS if options.whole else _MOST_URGENT_CHARS)


def chars_around(options: EncodingOptions) -> int:
    """Characters that are read with every input: what stands around it, a request's labels, or a question."""
    prompt = options.labels or options.question
    return sum(map(len, options.kept)) + (prompt.num_chars if prompt else 0)


def _num_chars(value: AnyInput) -> int:
    if isinstance(value, ImageInput | ImagesInText):  # each is a chunk of its own: decoding an image takes milliseconds
        return _CHUNK_CHARS * (len(value.images) if isinstance(value, ImagesInText) else 1)
    return len(value) if isinstance(value, str) else len(value[0]) + len(value[1])


def chunks_of(inputs: Seq[AnyInput], around: int = 0) -> Iterator[tuple[int, int]]:
    """Begin and end of each chunk of ``inputs``: at most ``CHUNK`` inputs, and a limited number of characters, of which
    every input has ``around`` more."""
    if len(inputs) == 1:
        yield 0, 1
        return
    start = num_chars = 0
    for index, value in enumerate(inputs):
        length = _num_chars(value) + around
        if index > start and (index - start >= CHUNK or num_chars + length > _CHUNK_CHARS):
            yield start, index
            start, num_chars = index, 0
        num_chars += length
    yield start, len(inputs)
