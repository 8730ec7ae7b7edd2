"""Tokens of long texts, piece by piece.

The tokenizers library takes 200 to 500 bytes a character while it holds a text's tokens (measured: 220 for English
with offsets), and handing them to Python holds the interpreter's lock. A piece at a time, only arrays are kept.

A cut is taken where the library gives the 1,024 characters around it the tokens of their two halves: same ids, same
places, and another word begins there. The library's models see one word at a time, and normalizers and pre-tokenizers,
which make the words, look a few characters far: so the same holds in the whole text. A tokenizer that makes one word
of everything has no cuts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import tokenizers

from bei.core import Int32Array

# A piece takes the library 5 to 15 ms, without the interpreter's lock, and its offsets 2 ms with it.
PIECE_CHARS = 16_384

# Cuts are looked for in the last half of a piece, and tried from the last one on.
_WINDOW_CHARS = 512
_MOST_TRIES = 8

# In front of a space between letters, where words end for every tokenizer known; else in front of any other blank; else
# between any two characters, as in scripts without blanks.
_PLACES = (re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])"), re.compile(r"(?<=\S)\s(?=\S)"), re.compile(r"(?<=\w)(?=\w)"))

Encode = Callable[[str], tokenizers.Encoding]


class Tokens(NamedTuple):
    """``ids`` int32 [n]; where spans are asked for, ``offsets`` int32 [n, 2] in characters and ``words`` int32 [n]."""

    ids: Int32Array
    offsets: Int32Array | None
    words: Int32Array | None

    @classmethod
    def of(cls, encoded: tokenizers.Encoding, *, with_spans: bool) -> Tokens:
        """What the library has found."""
        ids = np.array(encoded.ids, np.int32)
        if not with_spans:
            return cls(ids, None, None)
        offsets = np.array(encoded.offsets, np.int32).reshape(-1, 2)
        return cls(ids, offsets, np.array(encoded.word_ids, np.int32))


class UncuttableTextError(Exception):
    """A text has no places to cut it, and is too long for one piece."""


def tokens_in_pieces(
    text: str, encode: Encode, *, with_spans: bool, most_chars: int, check: Callable[[], None]
) -> Tokens:
    """As ``encode(text)`` gives them. Raises UncuttableTextError where a piece would have more than ``most_chars``.

    ``check`` is called in front of every piece: what it raises ends the work.
    """
    parts: list[Tokens] = []
    num_words = 0
    for start, stop in _pieces_of(text, encode, most_chars):
        check()
        part = Tokens.of(encode(text[start:stop]), with_spans=with_spans)
        if part.offsets is not None and part.words is not None:
            words = part.words + np.int32(num_words)
            num_words = int(words[-1]) + 1 if len(words) else num_words
            part = Tokens(part.ids, part.offsets + np.int32(start), words)
        parts.append(part)
    ids = np.concatenate([part.ids for part in parts])
    if not with_spans:
        return Tokens(ids, None, None)
    offsets = np.concatenate([part.offsets for part in parts if part.offsets is not None])
    return Tokens(ids, offsets, np.concatenate([part.words for part in parts if part.words is not None]))


def _pieces_of(text: str, encode: Encode, most_chars: int) -> Iterator[tuple[int, int]]:
    start, size = 0, PIECE_CHARS
    while len(text) - start > size:
        cut = next(
            (place for place in _places(text, start + size // 2, start + size) if _is_cut(text, place, encode)), None
        )
        if cut is not None:
            yield start, cut
            start, size = cut, PIECE_CHARS
        elif size >= most_chars:
            raise UncuttableTextError
        else:
            size = min(2 * size, most_chars)
    yield start, len(text)


def _places(text: str, first: int, last: int) -> Iterator[int]:
    """Where ``text`` may perhaps be cut."""
    for pattern in _PLACES:
        begin = max(first, last - 16 * _WINDOW_CHARS)
        found = [match.start() for match in pattern.finditer(text, begin, last)]
        yield from reversed(found[-_MOST_TRIES:])


def _is_cut(text: str, place: int, encode: Encode) -> bool:
    """Whether the tokens around ``place`` are those on its left and those on its right."""
    first, last = max(0, place - _WINDOW_CHARS), place + _WINDOW_CHARS
    both, left, right = encode(text[first:last]), encode(text[first:place]), encode(text[place:last])
    shift, num_words = place - first, max((word for word in left.word_ids if word is not None), default=-1) + 1
    return bool(
        both.ids == left.ids + right.ids
        and both.offsets == left.offsets + [(start + shift, stop + shift) for start, stop in right.offsets]
        and both.word_ids == left.word_ids + [None if word is None else word + num_words for word in right.word_ids]
    )
