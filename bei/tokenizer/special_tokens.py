"""Special tokens around one text, or around and between two, and truncation of the texts to the room that is left.

The tokenizers library could do both, but its truncation is state of the tokenizer, and its truncation of pairs takes
quadratic time (docs/decisions.md, "Pairs are cut here").
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from bei.core import Int32Array, TokenSpans
from bei.errors import InvalidRequestError
from bei.utils.untrusted_files import UnfitError


class Piece(NamedTuple):
    """A part of an encoding: special tokens ``ids``, or the place of text number ``text``."""

    ids: Int32Array
    text: int | None
    token_type: int = 0


def special_piece(ids: Seq[int], token_type: int = 0) -> Piece:
    """A part of special tokens."""
    return Piece(np.array(ids, np.int32), None, token_type)


_NO_IDS = np.zeros(0, np.int32)
TEXT = Piece(_NO_IDS, 0)


class TextFrame(NamedTuple):
    """Texts before and behind an input, each tokenized by itself, and the ids behind both."""

    prefix: str = ""
    suffix: str = ""
    last_ids: tuple[int, ...] = ()


class Layout:
    """The order of special tokens and texts in an input of one or two texts."""

    def __init__(self, pieces: Seq[Piece]) -> None:
        self.pieces = pieces
        self.num_special = sum(len(piece.ids) for piece in pieces)
        self.has_types = any(piece.token_type for piece in pieces)
        self._types = np.array([piece.token_type for piece in pieces], np.int32)

    def around(self, texts: Seq[Int32Array]) -> tuple[Int32Array, Int32Array | None]:
        """Token ids and token types of an input whose texts have these ids."""
        parts = [piece.ids if piece.text is None else texts[piece.text] for piece in self.pieces]
        types = np.repeat(self._types, [len(part) for part in parts]) if self.has_types else None
        return np.concatenate(parts), types

    def spans_around(self, texts: Seq[TokenSpans]) -> TokenSpans:
        """Spans of an input whose texts have these spans."""
        return TokenSpans.concatenated(
            [
                TokenSpans.of_special_tokens(len(piece.ids)) if piece.text is None else texts[piece.text]
                for piece in self.pieces
            ]
        )


def layout_of(tokenizer: Tokenizer, num_texts: int, *, with_special: bool) -> Layout:
    """The layout that ``tokenizer`` gives ``num_texts`` texts, derived from an example. Raises UnfitError where a text
    has no place in it."""
    encoded = tokenizer.encode("a", "b" if num_texts == 2 else None, add_special_tokens=with_special)
    pieces: list[Piece] = []
    for token_id, token_type, text in zip(encoded.ids, encoded.type_ids, encoded.sequence_ids, strict=True):
        if text is None:
            pieces.append(special_piece([token_id], token_type))
        elif all(piece.text != text for piece in pieces):
            pieces.append(Piece(_NO_IDS, text, token_type))
    if {piece.text for piece in pieces} - {None} != {*range(num_texts)}:
        raise UnfitError("its template leaves a text out, or it has no token for the letter a")
    return Layout(pieces)


def framed_layout(tokenizer: Tokenizer, frame: TextFrame) -> Layout:
    """The layout of one text in ``frame``."""
    prefix, suffix = (tokenizer.encode(text, add_special_tokens=False).ids for text in (frame.prefix, frame.suffix))
    return Layout([special_piece(prefix), TEXT, special_piece([*suffix, *frame.last_ids])])


def kept_lengths(lengths: Seq[int], room: int, *, whole_second: bool = False) -> list[int]:
    """The number of tokens each of one or two texts keeps: the longer one is cut first (the library's
    ``longest_first``), or the first one alone (``only_first``) unless the second one leaves no room for it."""
    if sum(lengths) <= room:
        return list(lengths)
    if len(lengths) == 1:
        return [room]
    if whole_second and lengths[1] < room:
        return [room - lengths[1], lengths[1]]
    shorter = min(*lengths, room // 2)
    return [shorter, room - shorter] if lengths[0] <= lengths[1] else [room - shorter, shorter]


def check_without(refused: Seq[str], inputs: Seq[str | tuple[str, str]]) -> None:
    """Raise InvalidRequestError where one of ``refused`` is in one of ``inputs``."""
    texts = [text for one in inputs for text in ((one,) if isinstance(one, str) else one)]
    for marker in refused:
        if any(marker in text for text in texts):
            raise InvalidRequestError(
                f"A text has {marker} in it, which this model does not read as text: leave it out.", "input"
            )
