"""Threads that tokenize. The tokenizers library releases the GIL, so threads are enough.

Knows nothing of batches: results go to a callback, in the pool's thread.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple, TypeGuard

from bei.core import Encoding
from bei.errors import BeiError, EngineError
from bei.tokenizer.encoder import AS_CONFIGURED, CommonText, EncodingOptions, Input, TextEncoder

log = logging.getLogger(__name__)

# Texts of one request that a thread takes at a time: small enough that the engine starts on a large request early
# and that threads share it, large enough that the hand-over is nothing beside tokenizing (0.1 ms a text of 74 tokens).
CHUNK = 32
_CHUNK_CHARS = 1 << 16

# Texts that are read to their ends are not urgent if they have more characters: so many take the library 5 to 15 ms.
# Any other may be read to its end too, if only its end has tokens: so many take 0.2 s where nothing else does.
_LONG_CHARS = 1 << 14
_MOST_URGENT_CHARS = 1 << 19

# An urgent text of at most so many characters is tokenized where it is submitted: that takes a fraction of a
# millisecond, and a thread of the pool costs two switches between threads that want the interpreter's lock.
_AT_ONCE_CHARS = 512

OnEncoded = Callable[[int, list[Encoding]], None]
# Gets the place of the input that failed; of a chunk that is not tokenized one by one, of its first.
OnFailed = Callable[[int, BeiError], None]


class _CancelledError(Exception):
    """Nobody waits for a chunk any more."""


class _Job(NamedTuple):
    """A chunk of a request: its inputs, and the place of the first one. ``one_by_one``: where the chunk fails."""

    start: int
    inputs: Seq[Input]
    options: EncodingOptions
    on_encoded: OnEncoded
    on_failed: OnFailed
    is_cancelled: Callable[[], bool]
    common: CommonText
    one_by_one: bool

    def check(self) -> None:
        """Raise _CancelledError where nobody waits for it any more."""
        if self.is_cancelled():
            raise _CancelledError


class TokenizerPool:
    """Threads that tokenize chunks of requests: ``num_threads`` for urgent chunks, and as many for all others.

    Urgent chunks have threads of their own, so they never wait for one that is not urgent; among themselves both kinds
    are served in the order of submission, whatever their deadlines. The operating system shares the cores between the
    threads. What ``takes_little`` waits for no thread (``encoded_at_once``). The queues are bounded by admission, which
    counts every text until it is answered.
    """

    def __init__(self, encoder: TextEncoder, num_threads: int) -> None:
        self._encoder = encoder
        self._urgent: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._others: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(jobs,), name=f"bei-tokenizer-{kind}-{index}", daemon=True)
            for kind, jobs in (("urgent", self._urgent), ("bulk", self._others))
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        inputs: Seq[Input],
        on_encoded: OnEncoded,
        on_failed: OnFailed,
        is_cancelled: Callable[[], bool],
        options: EncodingOptions = AS_CONFIGURED,
        *,
        is_urgent: bool = False,
        one_by_one: bool = False,
    ) -> None:
        """Tokenize ``inputs`` in chunks; ``on_encoded(start, encodings)`` is called once a chunk, in a pool thread.

        ``one_by_one``: where a chunk fails, its inputs are tokenized each by itself, and each fails by itself.
        ``is_cancelled`` is asked before every chunk and every piece of a long text: from then on nothing is called.
        """
        common = CommonText()
        jobs = self._urgent if is_urgent else self._others
        for start, stop in chunks_of(inputs):
            part = inputs[start:stop]
            jobs.put(_Job(start, part, options, on_encoded, on_failed, is_cancelled, common, one_by_one))

    def encoded_at_once(self, value: Input, options: EncodingOptions = AS_CONFIGURED) -> Encoding:
        """``value``, tokenized in this thread. Raises what ``TextEncoder.encode`` does, EngineError."""
        try:
            return self._encoder.encode([value], options)[0]
        except BeiError:
            raise
        except BaseException as error:  # a border, as in ``_run``: the library's Rust panics are not Exceptions
            raise _broken() from error

    @property
    def is_alive(self) -> bool:
        """Whether every thread still works."""
        return all(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Finish what is queued, then end the threads."""
        for _ in range(len(self._threads) // 2):
            self._urgent.put(None)
            self._others.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, jobs: queue.SimpleQueue[_Job | None]) -> None:
        while (job := jobs.get()) is not None:
            if not job.is_cancelled():
                self._run(job)

    def _run(self, job: _Job) -> None:
        try:
            job.on_encoded(job.start, self._encoder.encode(job.inputs, job.options, job.common, job.check))
        except _CancelledError:
            return
        except BeiError as error:
            self._failed(job, error)
        except BaseException:  # a border; the library's Rust panics are not Exceptions, and must not end the thread
            self._failed(job, _broken())

    def _failed(self, job: _Job, error: BeiError) -> None:
        if not job.one_by_one or len(job.inputs) == 1:
            job.on_failed(job.start, error)
            return
        for place, value in enumerate(job.inputs, job.start):
            if not job.is_cancelled():
                self._run(job._replace(start=place, inputs=[value]))


def _broken() -> EngineError:
    """What the library has raised is for the log."""
    log.exception("tokenizer failed")
    return EngineError("The tokenizer failed on an input.")


def takes_little(value: Input | list[int]) -> TypeGuard[Input]:
    """Whether ``value`` is so short that to tokenize it at once takes less than to wake a thread."""
    return not isinstance(value, list) and _num_chars(value) <= _AT_ONCE_CHARS


def takes_long(inputs: Seq[Input], options: EncodingOptions) -> bool:
    """Whether ``inputs`` have so many characters that others would wait for them, where they are read to their ends."""
    return sum(map(_num_chars, inputs)) > (_LONG_CHARS if options.whole else _MOST_URGENT_CHARS)


def _num_chars(value: Input) -> int:
    return len(value) if isinstance(value, str) else len(value[0]) + len(value[1])


def chunks_of(inputs: Seq[Input]) -> Iterator[tuple[int, int]]:
    """Where the chunks of ``inputs`` begin and end: at most ``CHUNK`` inputs, and not many characters."""
    if len(inputs) == 1:
        yield 0, 1
        return
    start = num_chars = 0
    for index, value in enumerate(inputs):
        length = _num_chars(value)
        if index > start and (index - start >= CHUNK or num_chars + length > _CHUNK_CHARS):
            yield start, index
            start, num_chars = index, 0
        num_chars += length
    yield start, len(inputs)
