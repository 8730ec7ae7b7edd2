"""A text and its tokens, and those of a text that many pairs of a request share."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from bei.core import Int32Array
from bei.tokenizer.long_text import Tokens


class TokenizedText(NamedTuple):
    """A text and its tokens: all of them, or the first (or last) ones."""

    text: str
    tokens: Tokens
    is_whole: bool

    @property
    def ids(self) -> Int32Array:
        return self.tokens.ids


class Tokenize(Protocol):
    """Tokenizes texts: ``TextEncoder._tokenize_texts`` with one request's options."""

    def __call__(self, texts: Seq[str], *, enough: int | None = None) -> list[TokenizedText]: ...


class CommonText:
    """Tokens of the query with which all pairs of a request begin: computed once, for all of its chunks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # the second of two chunks waits for the first one's result
        self._text: str | None = None
        self._by_enough: dict[int | None, TokenizedText] = {}  # by the number of tokens

    def matches(self, groups: Seq[tuple[str, ...]]) -> bool:
        """True if ``groups`` are pairs that begin with the query of the chunks before."""
        text = groups[0][0]
        if any(len(group) != 2 or group[0] != text for group in groups):
            return False
        with self._lock:
            self._text = text if self._text is None else self._text
            return self._text == text

    def tokenize(self, tokenize: Tokenize, texts: Seq[str], *, enough: int | None = None) -> list[TokenizedText]:
        """The result of ``tokenize``, with the query's tokens from the cache."""
        with self._lock:
            if self._text in texts and enough not in self._by_enough:
                assert self._text is not None
                (self._by_enough[enough],) = tokenize([self._text], enough=enough)
            common = self._by_enough.get(enough)
        others = iter(tokenize([text for text in texts if text != self._text], enough=enough))
        return [common if common is not None and text == self._text else next(others) for text in texts]
