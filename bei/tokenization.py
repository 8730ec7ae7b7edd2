"""Text to encodings, in a pool of threads. The tokenizers library releases the GIL, so threads are enough.

Knows nothing of batches: results go to a callback, in the pool's thread.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Tokenizer

from bei.core import Encoding
from bei.errors import ArtifactManifestError, BeiError, EngineError, InvalidRequestError
from bei.word_cache import WordCache, treats_words_alone

log = logging.getLogger(__name__)

# Texts of one request that a thread takes at a time: small enough that the engine starts on a large request early
# and that threads share it, large enough that the hand-over is nothing beside tokenizing (0.1 ms a text of 74 tokens).
CHUNK = 32

# A long text is first cut to this many characters a token, so that a book costs what its first page costs; if they
# turn out not to fill the model, more is shown, up to the second figure. Beyond it a text (megabytes of blanks, say)
# counts as truncated whatever it holds.
_CHARS_PER_TOKEN = 16
_MOST_CHARS_PER_TOKEN = 256
_LEAST_CHARS = 1 << 16

# The cut goes through a word, whose tokens it changes. So many tokens behind the last kept one are proof that it went
# through another word: WordPiece makes at most 100 of one.
_SETTLED_TOKENS = 128


class TextEncoder:
    """Tokenizes as the checkpoint does, truncated to ``max_seq_len`` with special tokens kept. Safe in threads."""

    def __init__(self, path: Path, max_seq_len: int, *, auto_truncate: bool = True) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the pool's threads are the parallelism
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ArtifactManifestError(f"{path} is not a readable tokenizer ({error}). Build it again.") from error
        self._tokenizer.enable_truncation(max_seq_len)
        self._num_special = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        self._max_seq_len = max_seq_len
        self._auto_truncate = auto_truncate
        # Nearly every tokenizer gives a single text type 0 throughout; reading that back costs as much as the ids.
        self._has_types = any(self._tokenizer.encode("a").type_ids)
        self._words: WordCache | None = None
        if treats_words_alone(self._tokenizer) and not self._has_types:
            self._words = WordCache(self._tokenizer)
            self._before, self._behind = _special_tokens_around(self._tokenizer)

    def encode(self, texts: Seq[str]) -> list[Encoding]:
        """One encoding a text. Raises InvalidRequestError where a text is too long and ``auto_truncate`` is off."""
        if self._words is None:
            return self._encode_whole(texts)
        return [self._encode_by_word(text, self._words) or self._encode_whole([text])[0] for text in texts]

    def _encode_by_word(self, text: str, words: WordCache) -> Encoding | None:
        """The same from known words; None if the beginning of a long text does not fill the model."""
        first = self._max_seq_len * _CHARS_PER_TOKEN
        shown = text if len(text) <= first else text[: text.rfind(" ", 0, first) + 1]
        ids = words.ids(shown)
        room = (self._max_seq_len - self._num_special) * np.dtype(np.int32).itemsize
        if len(shown) < len(text) and len(ids) <= room:
            return None
        kept = self._before + ids[:room] + self._behind
        return self._checked(Encoding(np.frombuffer(kept, np.int32), None, truncated=len(ids) > room))

    def _encode_whole(self, texts: Seq[str]) -> list[Encoding]:
        first = self._max_seq_len * _CHARS_PER_TOKEN
        most = max(_LEAST_CHARS, self._max_seq_len * _MOST_CHARS_PER_TOKEN)
        raw = self._tokenizer.encode_batch_fast([text[:first] for text in texts])
        encodings = []
        for text, encoded in zip(texts, raw, strict=True):
            shown = first
            while shown < min(len(text), most) and not self._is_settled(encoded):  # few, long tokens: show more
                shown = min(4 * shown, most)
                encoded = self._tokenizer.encode_batch_fast([text[:shown]])[0]
            truncated = bool(encoded.overflowing) or shown < len(text)
            types = np.array(encoded.type_ids, np.int32) if self._has_types else None
            encodings.append(self._checked(Encoding(np.array(encoded.ids, np.int32), types, truncated)))
        return encodings

    def _checked(self, encoding: Encoding) -> Encoding:
        """``encoding``, or InvalidRequestError where it cannot be answered."""
        if encoding.truncated and not self._auto_truncate:
            raise InvalidRequestError(
                f"An input has more than the model's {self._max_seq_len} tokens: shorten it, "
                "or start the server with --auto-truncate.",
                param="input",
            )
        if not encoding.num_tokens:
            raise InvalidRequestError("An input has no tokens: leave it out.", param="input")
        return encoding

    def _is_settled(self, encoded: tokenizers.Encoding) -> bool:
        """Whether the text was cut too far behind the kept tokens to change them."""
        return sum(len(part) - self._num_special for part in encoded.overflowing) >= _SETTLED_TOKENS


def _special_tokens_around(tokenizer: Tokenizer) -> tuple[bytes, bytes]:
    """The ids that stand before and behind every text, as the bytes of int32."""
    letter = tokenizer.encode("a")
    first = letter.special_tokens_mask.index(0)
    last = len(letter.ids) - letter.special_tokens_mask[::-1].index(0)
    return np.array(letter.ids[:first], np.int32).tobytes(), np.array(letter.ids[last:], np.int32).tobytes()


OnEncoded = Callable[[int, list[Encoding]], None]
OnFailed = Callable[[BeiError], None]
_Job = tuple[int, Seq[str], OnEncoded, OnFailed, Callable[[], bool]]


class TokenizerPool:
    """``num_threads`` threads that tokenize chunks of requests, in the order of submission.

    Its queue is bounded by the service's admission limit, which counts every text from acceptance to answer.
    """

    def __init__(self, encoder: TextEncoder, num_threads: int) -> None:
        self._encoder = encoder
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"bei-tokenizer-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, texts: Seq[str], on_encoded: OnEncoded, on_failed: OnFailed, is_cancelled: Callable[[], bool]
    ) -> None:
        """Tokenize ``texts`` in chunks; ``on_encoded(start, encodings)`` is called once a chunk, in a pool thread."""
        for start in range(0, len(texts), CHUNK):
            self._jobs.put((start, texts[start : start + CHUNK], on_encoded, on_failed, is_cancelled))

    @property
    def is_alive(self) -> bool:
        """Whether every thread still works."""
        return all(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Finish what is queued, then end the threads."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            start, texts, on_encoded, on_failed, is_cancelled = job
            if is_cancelled():
                continue
            try:
                on_encoded(start, self._encoder.encode(texts))
            except BeiError as error:
                on_failed(error)
            except BaseException:  # a border; the library's Rust panics are not Exceptions, and must not end the thread
                log.exception("tokenizer failed")
                on_failed(EngineError("The tokenizer failed on an input."))
