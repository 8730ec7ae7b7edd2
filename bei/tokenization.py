"""Text to encodings, in a pool of threads. The tokenizers library releases the GIL, so threads are enough.

Knows nothing of batches: results go to a callback, in the pool's thread.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import tokenizers
from tokenizers import Tokenizer

from bei.core import Encoding, TokenSpans
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

# A text, or a pair of texts that the model reads together.
Input: TypeAlias = "str | tuple[str, str]"


@dataclass(frozen=True)
class EncodingOptions:
    """How one request wants its inputs encoded.

    ``truncate`` None is as the server is configured. ``max_tokens`` lowers the model's limit, special tokens counted.
    ``direction`` is the side that is cut off. ``framed``: inputs stand between the tokens of the model's frame, and
    only they are cut. ``with_spans``: encodings say where in the text their tokens lie.
    """

    truncate: bool | None = None
    direction: Literal["left", "right"] = "right"
    max_tokens: int | None = None
    add_special_tokens: bool = True
    framed: bool = False
    with_spans: bool = False


AS_CONFIGURED = EncodingOptions()


class TextEncoder:
    """Tokenizes as the checkpoint does, truncated to ``max_seq_len`` with special tokens kept. Safe in threads.

    ``frame``: texts in front of and behind ``framed`` inputs.
    """

    def __init__(
        self, path: Path, max_seq_len: int, *, auto_truncate: bool = True, frame: tuple[str, str] = ("", "")
    ) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the pool's threads are the parallelism
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ArtifactManifestError(f"{path} is not a readable tokenizer ({error}). Build it again.") from error
        self._frame = tuple(self._tokenizer.encode(text, add_special_tokens=False).ids for text in frame)
        self._untruncated = Tokenizer.from_str(self._tokenizer.to_str())
        self._uncommon = Tokenizer.from_str(self._tokenizer.to_str())  # its truncation is set anew for every use
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
        self._uncommon_lock = threading.Lock()

    def encode(self, inputs: Seq[Input], options: EncodingOptions = AS_CONFIGURED) -> list[Encoding]:
        """One encoding an input. Raises InvalidRequestError where one is too long and may not be cut."""
        truncate = self._auto_truncate if options.truncate is None else options.truncate
        if options.framed:
            encodings = [self._encode_framed(text, options) for text in inputs if isinstance(text, str)]
        elif options in (AS_CONFIGURED, _CUT, _UNCUT) and all(isinstance(text, str) for text in inputs):
            texts = [text for text in inputs if isinstance(text, str)]
            if self._words is None:
                encodings = self._encode_whole(texts)
            else:
                encodings = [self._encode_by_word(text, self._words) or self._encode_whole([text])[0] for text in texts]
        else:
            encodings = self._encode_with(inputs, options)
        for encoding in encodings:
            self._check(encoding, truncate, options)
        return encodings

    def decode(self, ids: Seq[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``."""
        text: str = self._untruncated.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token_id: int) -> str:
        """The token called ``token_id``."""
        return self._untruncated.id_to_token(token_id) or ""

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens."""
        added = self._untruncated.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def _encode_by_word(self, text: str, words: WordCache) -> Encoding | None:
        """As the library would, from known words; None if the beginning of a long text does not fill the model."""
        first = self._max_seq_len * _CHARS_PER_TOKEN
        shown = text if len(text) <= first else text[: text.rfind(" ", 0, first) + 1]
        ids = words.ids(shown)
        room = (self._max_seq_len - self._num_special) * np.dtype(np.int32).itemsize
        if len(shown) < len(text) and len(ids) <= room:
            return None
        kept = self._before + ids[:room] + self._behind
        return Encoding(np.frombuffer(kept, np.int32), None, truncated=len(ids) > room)

    def _encode_whole(self, texts: Seq[str]) -> list[Encoding]:
        first = self._max_seq_len * _CHARS_PER_TOKEN
        most = self._most_chars(self._max_seq_len)
        raw = self._tokenizer.encode_batch_fast([text[:first] for text in texts])
        encodings = []
        for text, encoded in zip(texts, raw, strict=True):
            shown = first
            while shown < min(len(text), most) and not self._is_settled(encoded):  # few, long tokens: show more
                shown = min(4 * shown, most)
                encoded = self._tokenizer.encode_batch_fast([text[:shown]])[0]
            truncated = bool(encoded.overflowing) or shown < len(text)
            types = np.array(encoded.type_ids, np.int32) if self._has_types else None
            encodings.append(Encoding(np.array(encoded.ids, np.int32), types, truncated))
        return encodings

    def _encode_with(self, inputs: Seq[Input], options: EncodingOptions) -> list[Encoding]:
        """Whatever the options ask for; pairs lose tokens of their longer side."""
        most = self._most_chars(self._limit(options))
        side = slice(0, most) if options.direction == "right" else slice(-most, None)
        shown = [text[side] if isinstance(text, str) else (text[0][side], text[1][side]) for text in inputs]
        raw = self._encode_shown(shown, options)
        encodings = []
        for text, encoded in zip(inputs, raw, strict=True):
            is_pair = not isinstance(text, str)
            types = np.array(encoded.type_ids, np.int32) if is_pair or self._has_types else None
            truncated = bool(encoded.overflowing) or any(len(part) > most for part in (text if is_pair else (text,)))
            spans = _spans(encoded) if options.with_spans else None
            encodings.append(Encoding(np.array(encoded.ids, np.int32), types, truncated, spans))
        return encodings

    def _encode_shown(self, shown: Seq[Input], options: EncodingOptions) -> list[tokenizers.Encoding]:
        def encode(tokenizer: Tokenizer) -> list[tokenizers.Encoding]:
            encode_batch = tokenizer.encode_batch if options.with_spans else tokenizer.encode_batch_fast
            encoded: list[tokenizers.Encoding] = encode_batch(shown, add_special_tokens=options.add_special_tokens)
            return encoded

        limit = self._limit(options)
        if (limit, options.direction) == (self._max_seq_len, "right"):
            return encode(self._tokenizer)
        least = self._uncommon.num_special_tokens_to_add(is_pair=any(not isinstance(text, str) for text in shown))
        if limit <= least:
            raise InvalidRequestError(f"{limit} tokens leave no room beside the {least} special ones: allow more.")
        with self._uncommon_lock:  # truncation is state of the library's object, and a copy takes a second to make
            self._uncommon.enable_truncation(limit, direction=options.direction)
            return encode(self._uncommon)

    def _encode_framed(self, text: str, options: EncodingOptions) -> Encoding:
        prefix, suffix = self._frame
        room = self._limit(options) - len(prefix) - len(suffix)
        if room < 1:
            raise InvalidRequestError(
                f"The model's frame of {len(prefix) + len(suffix)} tokens leaves no room: allow more tokens."
            )
        shown = text[: self._most_chars(room)]
        ids = self._untruncated.encode_batch_fast([shown], add_special_tokens=False)[0].ids
        truncated = len(ids) > room or len(shown) < len(text)
        return Encoding(np.array([*prefix, *ids[:room], *suffix], np.int32), None, truncated)

    def _limit(self, options: EncodingOptions) -> int:
        return min(self._max_seq_len, options.max_tokens or self._max_seq_len)

    def _most_chars(self, limit: int) -> int:
        return max(_LEAST_CHARS, limit * _MOST_CHARS_PER_TOKEN)

    def _check(self, encoding: Encoding, truncate: bool, options: EncodingOptions) -> None:
        if encoding.truncated and not truncate:
            remedy = "allow truncation" if options.truncate is False else "start the server with --auto-truncate"
            raise InvalidRequestError(
                f"An input has more than {'the model' if options.max_tokens is None else 'the request'}'s "
                f"{self._limit(options)} tokens: shorten it, or {remedy}.",
                param="input",
            )
        if not encoding.num_tokens:
            raise InvalidRequestError("An input has no tokens: leave it out.", param="input")

    def _is_settled(self, encoded: tokenizers.Encoding) -> bool:
        """Whether the text was cut too far behind the kept tokens to change them."""
        return sum(len(part) - self._num_special for part in encoded.overflowing) >= _SETTLED_TOKENS


_CUT = EncodingOptions(truncate=True)
_UNCUT = EncodingOptions(truncate=False)


def _spans(encoded: tokenizers.Encoding) -> TokenSpans:
    words = [-1 if word is None else word for word in encoded.word_ids]
    return TokenSpans(
        np.array(encoded.offsets, np.int32).reshape(-1, 2),
        np.array(words, np.int32),
        np.array(encoded.special_tokens_mask, np.bool_),
    )


def _special_tokens_around(tokenizer: Tokenizer) -> tuple[bytes, bytes]:
    """The ids that stand before and behind every text, as the bytes of int32."""
    letter = tokenizer.encode("a")
    first = letter.special_tokens_mask.index(0)
    last = len(letter.ids) - letter.special_tokens_mask[::-1].index(0)
    return np.array(letter.ids[:first], np.int32).tobytes(), np.array(letter.ids[last:], np.int32).tobytes()


OnEncoded = Callable[[int, list[Encoding]], None]
OnFailed = Callable[[BeiError], None]
_Job = tuple[int, Seq[Input], EncodingOptions, OnEncoded, OnFailed, Callable[[], bool]]


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
        self,
        inputs: Seq[Input],
        on_encoded: OnEncoded,
        on_failed: OnFailed,
        is_cancelled: Callable[[], bool],
        options: EncodingOptions = AS_CONFIGURED,
    ) -> None:
        """Tokenize ``inputs`` in chunks; ``on_encoded(start, encodings)`` is called once a chunk, in a pool thread."""
        for start in range(0, len(inputs), CHUNK):
            self._jobs.put((start, inputs[start : start + CHUNK], options, on_encoded, on_failed, is_cancelled))

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
            start, inputs, options, on_encoded, on_failed, is_cancelled = job
            if is_cancelled():
                continue
            try:
                on_encoded(start, self._encoder.encode(inputs, options))
            except BeiError as error:
                on_failed(error)
            except BaseException:  # a border; the library's Rust panics are not Exceptions, and must not end the thread
                log.exception("tokenizer failed")
                on_failed(EngineError("The tokenizer failed on an input."))
