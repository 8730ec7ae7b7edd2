"""Tokenizes long texts piece by piece, until the text ends or the model is full.

The tokenizers library takes 200 to 500 bytes a character while it holds a text's tokens (measured: 220 for English with
offsets), and conversion to Python holds the interpreter's lock. With pieces, only arrays are kept.

A cut is valid if the library gives the 1,024 characters around it the tokens of their two halves: the same ids and
offsets, and a new word after the cut. The library's models see one word at a time, and normalizers and pre-tokenizers,
which make the words, look a few characters ahead: so the same holds in the whole text.

Stretches without cuts may add no tokens: blanks, characters that a normalizer drops, the inside of an unknown word. As
many of their characters are kept as the library shows to be enough. Other stretches are read at once up to a limit, and
refused beyond it: no answer depends on how much of a text was read.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from itertools import compress, islice, pairwise
from typing import NamedTuple

import numpy as np
import tokenizers

from bei.core import Int32Array

# A piece takes the library 5 to 15 ms without the interpreter's lock, and its offsets 2 ms with it.
PIECE_CHARS = 16_384

# Cuts are searched in the last half of a piece, from its end backwards.
_WINDOW_CHARS = 512
_MOST_TRIES = 8
_MOST_PLACES = 64

# Candidates for cuts: before a space between letters, where words end for every tokenizer known; else before another
# blank; else between any two characters, as in scripts without blanks.
_PLACES = (re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])"), re.compile(r"(?<=\S)\s(?=\S)"), re.compile(r"(?<=\w)(?=\w)"))

# A placeholder for the rest of a text.
_GOES_ON = "a"

# A word without an end fills a model if its tokens are the same wherever it is broken off, at as many consecutive
# characters as SentencePiece's tokens have, so many tokens behind the last one that is kept. In the encoding of the
# whole word some token ends at one of these characters, and in BPE and unigram models the part before a token's end is
# tokenized as if nothing followed. WordPiece makes at most 100 tokens of a word.
_SETTLED_TOKENS = 128
_ENDS = 16

Encode = Callable[[str], tokenizers.Encoding]

_NOTHING = np.zeros(0, np.int32)


class Tokens(NamedTuple):
    """Tokens of a text: ``ids`` int32 [n]; if spans were requested, ``offsets`` int32 [n, 2] in characters and
    ``words`` int32 [n]."""

    ids: Int32Array
    offsets: Int32Array | None
    words: Int32Array | None

    @classmethod
    def of(cls, encoded: tokenizers.Encoding, *, with_spans: bool) -> Tokens:
        """The tokens of the library's encoding."""
        ids = np.array(encoded.ids, np.int32)
        if not with_spans:
            return cls(ids, None, None)
        return cls(ids, _offsets_of(encoded), np.array(encoded.word_ids, np.int32))

    def sliced(self, side: slice) -> Tokens:
        if self.offsets is None or self.words is None:
            return Tokens(self.ids[side], None, None)
        return Tokens(self.ids[side], self.offsets[side], self.words[side])


class AddedTokens(NamedTuple):
    """Added tokens of a tokenizer: the length of the longest, and whether one absorbs blanks before or after it."""

    longest: int
    take_blanks_before: bool
    take_blanks_behind: bool


NO_ADDED_TOKENS = AddedTokens(0, False, False)


class UncuttableTextError(Exception):
    """A text without valid cuts is too long for one piece."""


class PartialTokens(NamedTuple):
    """Tokens of a text; ``is_whole``: all of them."""

    tokens: Tokens
    is_whole: bool


def tokens_in_pieces(
    text: str,
    encode: Encode,
    *,
    with_spans: bool,
    most_chars: int,
    check: Callable[[], None],
    enough: int = sys.maxsize,
    from_end: bool = False,
    first_chars: int | None = None,
    added: AddedTokens = NO_ADDED_TOKENS,
) -> PartialTokens:
    """The tokens that ``encode(text)`` gives: all, or the first ``enough`` of them and at least one more.

    ``from_end``: the last ones instead. ``first_chars``: size of the first piece, if the rest is probably not needed.
    ``added``: a piece may end inside such a token, whose beginning tokenizes differently. ``check`` is called before
    each piece, and raises to end the work. Raises UncuttableTextError if a piece would exceed ``most_chars``.
    """
    reader = _Reader(text, encode, with_spans, most_chars, enough, from_end, added)
    parts = list(reader.parts(check, min(first_chars or PIECE_CHARS, PIECE_CHARS)))
    return PartialTokens(_joined(parts[::-1] if from_end else parts), reader.is_whole)


def common_start(first: str, second: str, encode: Encode) -> int:
    """The place at which both texts can be cut after their common beginning; 0: none."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    places = _cut_candidates(first, 1, low - _WINDOW_CHARS, from_end=False)
    return next((place for place in islice(places, _MOST_TRIES) if _valid_cut(first, place, encode)), 0)


class _TextWindow(NamedTuple):
    """Characters that are tokenized together, and their ``places`` int32 [n] in the text."""

    string: str
    places: Int32Array

    def only(self, kept: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> _TextWindow:
        return _TextWindow("".join(compress(self.string, kept.tolist())), self.places[kept])

    def offsets_in_text(self, offsets: Int32Array) -> Int32Array:
        """``offsets`` [n, 2] in ``string``, converted to offsets in the text."""
        starts, stops = offsets.T
        places = np.append(self.places, self.places[-1] + np.int32(1))
        ends = np.where(stops > starts, self.places[np.maximum(stops, 1) - 1] + np.int32(1), places[starts])
        return np.stack([places[starts], ends], axis=1)


class _Reader:
    """Reads a text in pieces. ``is_whole``: the whole text was read."""

    def __init__(
        self,
        text: str,
        encode: Encode,
        with_spans: bool,
        most_chars: int,
        enough: int,
        from_end: bool,
        added: AddedTokens,
    ) -> None:
        self.is_whole = False
        self._text = text
        self._encode = encode
        self._with_spans = with_spans
        self._most_chars = most_chars
        self._enough = enough
        self._from_end = from_end
        self._added = added

    def parts(self, check: Callable[[], None], size: int) -> Iterator[Tokens]:
        """The tokens of the pieces in order; the first piece has ``size`` characters."""
        held, num_read, num_tokens = _TextWindow("", _NOTHING), 0, 0
        while num_tokens <= self._enough:
            check()
            size = min(size, self._most_chars - len(held.string))
            first, last = self._range(num_read, size)
            is_new, num_read = not held.string, num_read + last - first
            held = self._more(held, first, last)
            if num_read == len(self._text):
                self.is_whole = True
                yield self._tokens(held, self._encode(held.string), is_open=False)
                return
            encoded = self._open(held.string)
            if self._fills(held, encoded, self._enough - num_tokens):
                yield self._tokens(held, encoded, is_open=True)
                return
            half = (last - first) // 2 if is_new else 0
            cut = self._cut(held, encoded, first + (0 if self._from_end else half), last - self._from_end * half)
            if cut is not None:
                place, token = cut
                side = slice(token, None) if self._from_end else slice(0, token)
                part = self._tokens(held, encoded, is_open=True).sliced(side)
                num_tokens += len(part.ids)
                yield part
                num_read = len(self._text) - place if self._from_end else place
                held, size = _TextWindow("", _NOTHING), PIECE_CHARS
                continue
            held, adds_nothing = self._shortened(held, encoded)
            if adds_nothing:
                held, num_repeated = self._skip_repetition(held, num_read)
                num_read += num_repeated
            if len(held.string) >= self._most_chars:
                raise UncuttableTextError
            size = max(PIECE_CHARS, len(held.string))

    def _range(self, num_read: int, size: int) -> tuple[int, int]:
        """The range of the next ``size`` characters."""
        if self._from_end:
            last = len(self._text) - num_read
            return max(0, last - size), last
        return num_read, min(len(self._text), num_read + size)

    def _more(self, held: _TextWindow, first: int, last: int) -> _TextWindow:
        string, places = self._text[first:last], np.arange(first, last, dtype=np.int32)
        if self._from_end:
            return _TextWindow(string + held.string, np.concatenate([places, held.places]))
        return _TextWindow(held.string + string, np.concatenate([held.places, places]))

    def _open(self, string: str) -> tokenizers.Encoding:
        """The encoding of ``string`` with the placeholder for the rest of the text."""
        return self._encode(_GOES_ON + string if self._from_end else string + _GOES_ON)

    def _tokens(self, held: _TextWindow, encoded: tokenizers.Encoding, *, is_open: bool) -> Tokens:
        """The tokens of ``held`` with offsets in the text; an ``_open`` encoding has one token more, or a longer last
        one."""
        tokens = Tokens.of(encoded, with_spans=self._with_spans)
        if tokens.offsets is None or not held.string:
            return tokens
        return tokens._replace(offsets=held.offsets_in_text(self._offsets(held, tokens.offsets, is_open=is_open)))

    def _offsets(self, held: _TextWindow, offsets: Int32Array, *, is_open: bool) -> Int32Array:
        """``offsets`` of the encoded string, converted to offsets in ``held``."""
        found: Int32Array = np.clip(offsets - np.int32(is_open and self._from_end), 0, len(held.string))
        return found

    def _fills(self, held: _TextWindow, encoded: tokenizers.Encoding, room: int) -> bool:
        """True if there are more than ``room`` tokens, and the first ``room`` are those of the whole text."""
        ids = encoded.ids
        if len(ids) <= room:
            return False
        lost = len(ids) - 1 - room if self._from_end else room
        broken, word = encoded.token_to_word(0 if self._from_end else len(ids) - 1), encoded.token_to_word(lost)
        if not self._is_before_added(held.string, encoded.offsets[lost]):
            return False
        if broken is not None and word is not None and abs(broken - word) > 2:  # whole words lie between them
            return True
        settled = lost - _SETTLED_TOKENS if self._from_end else lost + _SETTLED_TOKENS
        if not 0 < settled < len(ids) - 1:
            return False
        start, stop = encoded.offsets[settled]
        if self._from_end:
            wanted = ids[lost:]
            return all(self._encode(held.string[start - 1 + by :]).ids[-len(wanted) :] == wanted for by in range(_ENDS))
        wanted = ids[: lost + 1]
        return all(self._encode(held.string[: stop - by]).ids[: len(wanted)] == wanted for by in range(_ENDS))

    def _is_before_added(self, string: str, offsets: tuple[int, int]) -> bool:
        """True if a token ends there before anything that may be the beginning of an added token, including the blanks
        that it absorbs."""
        if self._from_end:
            rest = string[self._added.longest :]
            rest = rest.lstrip() if self._added.take_blanks_behind else rest
            return offsets[0] - 1 >= len(string) - len(rest)
        rest = string[: max(0, len(string) - self._added.longest)]
        rest = rest.rstrip() if self._added.take_blanks_before else rest
        return offsets[1] <= len(rest)

    def _cut(self, held: _TextWindow, encoded: tokenizers.Encoding, first: int, last: int) -> tuple[int, int] | None:
        """A valid cut between ``first`` and ``last``, and the first token after it; None: there is none."""
        ids, num_tries = encoded.ids, 0
        for place in _cut_candidates(self._text, first, last, from_end=self._from_end):
            index = int(np.searchsorted(held.places, place)) + self._from_end
            word = encoded.char_to_word(index - 1)
            if word is None or word == encoded.char_to_word(index):
                continue
            there = next(filter(None, map(encoded.char_to_token, range(index, index + _WINDOW_CHARS))), 0)
            sides = _valid_cut(self._text, place, self._encode)
            for token in (there, there - 1):  # a blank without a token of its own belongs to no character
                if token <= 0 or (ids[token - 1], ids[token]) != sides:
                    continue
                # Equal words have equal tokens: check that these two lie at the cut.
                if encoded.offsets[token - 1][1] <= index <= encoded.offsets[token][0]:
                    return place, token
            num_tries += 1
            if num_tries == _MOST_TRIES:
                return None
        return None

    def _shortened(self, held: _TextWindow, encoded: tokenizers.Encoding) -> tuple[_TextWindow, bool]:
        """``held`` without the inside of stretches in which no token begins or ends, if its tokens stay the same; and
        whether such a stretch continues in the next piece.

        The first and the last of each kind of character are kept: a blank separates words, a dropped character does
        not, and a token begins or ends at the others.
        """
        string, offsets = held.string, self._offsets(held, _offsets_of(encoded), is_open=True)
        kept = np.ones(len(string), np.bool_)
        goes_on = False
        for start, stop in pairwise(np.unique(np.append(offsets, [0, len(string)])).tolist()):
            if stop - start > 3 * _WINDOW_CHARS:
                first, last = start + _WINDOW_CHARS, stop - _WINDOW_CHARS
                kept[first:last] = False
                codes = np.frombuffer(string[first:last].encode("utf-32-le"), np.uint32)
                kept[first + np.unique(codes, return_index=True)[1]] = True
                kept[last - 1 - np.unique(codes[::-1], return_index=True)[1]] = True
                # The last of several blanks may belong to the next token.
                goes_on |= start <= 1 if self._from_end else stop >= len(string) - 1
        if kept.all():
            return held, False
        shorter = held.only(kept)
        again = self._open(shorter.string)
        there = shorter.offsets_in_text(self._offsets(shorter, _offsets_of(again), is_open=True))
        if not (
            again.ids == encoded.ids
            and again.word_ids == encoded.word_ids
            and np.array_equal(there, held.offsets_in_text(offsets))
        ):
            return held, False
        return shorter, goes_on

    def _skip_repetition(self, held: _TextWindow, num_read: int) -> tuple[_TextWindow, int]:
        """Skip repetitions of the character that fills the window before it, of which ``held`` has enough.

        The outermost one in ``held`` then stands for the last one skipped. Also returns the number of characters read.
        """
        near = held.string[:_WINDOW_CHARS] if self._from_end else held.string[-_WINDOW_CHARS:]
        count, places = 0, held.places.copy()
        while len(set(near)) == 1:
            first, last = self._range(num_read + count, PIECE_CHARS)
            chunk = self._text[first:last]
            rest = chunk.rstrip(near) if self._from_end else chunk.lstrip(near)
            count += len(chunk) - len(rest)
            if rest or not chunk:
                break
        places[0 if self._from_end else -1] += -count if self._from_end else count
        return held._replace(places=places), count


def _joined(parts: Seq[Tokens]) -> Tokens:
    ids = np.concatenate([part.ids for part in parts])
    if not all(part.offsets is not None for part in parts):
        return Tokens(ids, None, None)
    words, num_words = [], 0
    for part in parts:
        if part.words is not None and len(part.words):
            words.append(part.words - part.words[0] + np.int32(num_words))
            num_words = int(words[-1][-1]) + 1
    offsets = np.concatenate([part.offsets for part in parts if part.offsets is not None])
    return Tokens(ids, offsets, np.concatenate([*words, _NOTHING]))


def _offsets_of(encoded: tokenizers.Encoding) -> Int32Array:
    return np.array(encoded.offsets, np.int32).reshape(-1, 2)


def _cut_candidates(text: str, first: int, last: int, *, from_end: bool) -> Iterator[int]:
    """Candidates for cuts of ``text``: backwards from ``last``, or forwards from ``first``."""
    most = 16 * _WINDOW_CHARS
    for pattern in _PLACES:
        if from_end:
            matches = pattern.finditer(text, first, min(last, first + most))
            yield from (match.start() for match in islice(matches, _MOST_PLACES))
        else:
            found = [match.start() for match in pattern.finditer(text, max(first, last - most), last)]
            yield from reversed(found[-_MOST_PLACES:])


def _valid_cut(text: str, place: int, encode: Encode) -> tuple[int, int] | None:
    """The tokens left and right of ``place`` if it is a valid cut; None if not."""
    first, last = max(0, place - _WINDOW_CHARS), place + _WINDOW_CHARS
    both, left, right = encode(text[first:last]), encode(text[first:place]), encode(text[place:last])
    if not left.ids or not right.ids:  # nothing shows that a new word begins
        return None
    shift, num_words = place - first, max((word for word in left.word_ids if word is not None), default=-1) + 1
    is_cut = (
        both.ids == left.ids + right.ids
        and both.offsets == left.offsets + [(start + shift, stop + shift) for start, stop in right.offsets]
        and both.word_ids == left.word_ids + [None if word is None else word + num_words for word in right.word_ids]
    )
    return (left.ids[-1], right.ids[0]) if is_cut else None
