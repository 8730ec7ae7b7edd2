"""Tokens of a text in pieces, between which images stand."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cached_property

from bei.tokenizer.encoder import EncodingOptions, TextEncoder

_BARE = EncodingOptions(add_special_tokens=False, whole=True)
_WHOLE = EncodingOptions(whole=True)
_TEXT = "a"


class PieceEncoder:
    """Of ``texts``, for a model that reads ``max_seq_len`` tokens with images among them."""

    def __init__(self, texts: TextEncoder, max_seq_len: int) -> None:
        self._texts = texts
        self.max_seq_len = max_seq_len

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """The special tokens before and behind every text."""
        whole, bare = (self._texts.encode([_TEXT], options)[0].input_ids.tolist() for options in (_WHOLE, _BARE))
        first = next(place for place in range(len(whole)) if whole[place : place + len(bare)] == bare)
        return whole[:first], whole[first + len(bare) :]

    def ids_of(self, pieces: Seq[Seq[str]], most: int) -> list[int]:
        """The first tokens of ``pieces``, each in parts, one after the other, without special tokens around them:
        ``most`` of each. Raises InvalidRequestError, also for a text with the place of an image in it."""
        texts = ["".join(parts) for parts in pieces]
        bare = EncodingOptions(truncate=True, direction="right", max_tokens=most, add_special_tokens=False)
        encodings = self._texts.encode([text for text in texts if text], bare)
        return [index for encoding in encodings for index in encoding.input_ids.tolist()]
