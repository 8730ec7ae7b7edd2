"""A cache of the token ids of words, for tokenizers that treat each word separately.

Texts repeat words, and the library tokenizes each occurrence anew: 0.1 ms for a text of 74 tokens, which competes with
the engine on a machine of two cores (docs/decisions.md, "Words are tokenized once").
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

from tokenizers import Tokenizer

# The memory limit of the cache, and an entry's overhead beside characters and ids (a dict entry, two objects).
_MAX_BYTES = 32 << 20
_BYTES_PER_WORD = 200
# Up to this many characters, words are tokenized one by one with the interpreter's lock held (15 us each): a batch call
# releases the lock, and then has to wait to get it back.
_FEW_CHARS = 128

# The words of BERT's pre-tokenizer in printable ASCII, where every character but letters and digits is punctuation.
_PIECES = re.compile("[A-Za-z0-9]+|[^A-Za-z0-9 ]")


def treats_words_alone(tokenizer: Tokenizer) -> bool:
    """True if the ids of "a b" are always those of "a" and of "b": tokenization distributes over the ASCII space.

    This holds for BERT's pipeline: its normalizer maps single characters, its pre-tokenizer splits at every blank, and
    WordPiece sees one word. It does not hold if an added token contains a space.
    """
    parts = json.loads(tokenizer.to_str())
    kinds = [(parts[name] or {}).get("type") for name in ("normalizer", "pre_tokenizer", "model")]
    if kinds != ["BertNormalizer", "BertPreTokenizer", "WordPiece"]:
        return False
    added = [token["content"] for token in parts["added_tokens"]]
    return not any(" " in text for content in added for text in (content, tokenizer.normalizer.normalize_str(content)))


class WordCache:
    """Token ids by word, as bytes of int32. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """``tokenizer`` must satisfy ``treats_words_alone``."""
        self._tokenizer = tokenizer
        self._model = tokenizer.model
        self._is_lowercase = bool(json.loads(tokenizer.to_str())["normalizer"]["lowercase"])
        self._added = tuple(set(_matched(tokenizer)))
        self._known: dict[str, bytes] = {}
        self._num_bytes = 0

    def ids(self, text: str) -> bytes:
        """The ids of ``text`` without special tokens."""
        words = self._pieces(text)
        are_pieces = words is not None
        if words is None:  # the parts between spaces
            words = [piece for word in text.split(" ") for piece in self._pieces(word) or [word]]
        known = self._known  # stays valid while in use: it is replaced, never emptied
        try:
            return b"".join(map(known.__getitem__, words))
        except KeyError:
            self._learn(known, words, are_pieces=are_pieces)
            return b"".join(map(known.__getitem__, words))

    def _pieces(self, text: str) -> list[str] | None:
        """The words of a text that needs only splitting; None if it is normalized, or holds an added token."""
        if not (text.isascii() and text.isprintable()):
            return None
        lowered = text.lower()
        if any(map(lowered.__contains__, self._added)):
            return None
        return _PIECES.findall(lowered if self._is_lowercase else text)

    def _learn(self, known: dict[str, bytes], words: Iterable[str], *, are_pieces: bool) -> None:
        """Tokenize and store ``words``. ``are_pieces``: the model sees each as it is; otherwise each is checked."""
        others = []
        for word in set(words).difference(known):
            if are_pieces or self._pieces(word) == [word]:
                # The model alone takes a sixth of the whole pipeline's time.
                self._keep(known, word, array("i", [token.id for token in self._model.tokenize(word)]).tobytes())
            else:
                others.append(word)
        if others:
            self._learn_others(known, others)
        if self._num_bytes > _MAX_BYTES:
            self._known, self._num_bytes = {}, 0

    def _learn_others(self, known: dict[str, bytes], others: Seq[str]) -> None:
        if sum(map(len, others)) <= _FEW_CHARS:
            encodings = [self._tokenizer.encode(word, add_special_tokens=False) for word in others]
        else:
            encodings = self._tokenizer.encode_batch_fast(others, add_special_tokens=False)
        for word, encoded in zip(others, encodings, strict=True):
            self._keep(known, word, array("i", encoded.ids).tobytes())

    def _keep(self, known: dict[str, bytes], word: str, ids: bytes) -> None:
        known[word] = ids
        self._num_bytes += len(word) + len(ids) + _BYTES_PER_WORD


def _matched(tokenizer: Tokenizer) -> Iterator[str]:
    """The strings by which added tokens are matched: as written and as normalized, in lower case."""
    for token in tokenizer.get_added_tokens_decoder().values():
        for content in (token.content, tokenizer.normalizer.normalize_str(token.content)):
            if content:
                yield content.lower()
