"""Token ids of words seen before, for tokenizers that treat every word by itself.

Texts repeat their words, and the library tokenizes each of them anew: 0.1 ms for a text of 74 tokens, which two cores
that compute an engine feel (docs/decisions.md, "Words are tokenized once").
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

from tokenizers import Tokenizer

# About what the known words may occupy, and what one costs beside its characters and ids (a dict's entry, two objects).
_MAX_BYTES = 32 << 20
_BYTES_PER_WORD = 200
# Up to so many characters words are tokenized one by one, with the interpreter's lock held: a word takes 15 us, and
# whoever lets go of the lock, as a batch does, has to wait until it gets it back.
_FEW_CHARS = 128

# What BERT's pre-tokenizer makes of printable ASCII, in which every character but letters and digits is punctuation.
_PIECES = re.compile("[A-Za-z0-9]+|[^A-Za-z0-9 ]")


def treats_words_alone(tokenizer: Tokenizer) -> bool:
    """Whether the ids of "a b" are always those of "a" and those of "b": tokenizing distributes over the ASCII space.

    Known to hold for BERT's pipeline: its normalizer decomposes and drops single characters, its pre-tokenizer splits
    at every blank, WordPiece sees one word. It does not where an added token reaches over a space.
    """
    parts = json.loads(tokenizer.to_str())
    kinds = [(parts[name] or {}).get("type") for name in ("normalizer", "pre_tokenizer", "model")]
    if kinds != ["BertNormalizer", "BertPreTokenizer", "WordPiece"]:
        return False
    added = [token["content"] for token in parts["added_tokens"]]
    return not any(" " in text for content in added for text in (content, tokenizer.normalizer.normalize_str(content)))


class WordCache:
    """Ids of words, as the bytes of int32. Safe in threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """``tokenizer``: one that ``treats_words_alone``."""
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
        if words is None:  # of these, what stands between spaces
            words = [piece for word in text.split(" ") for piece in self._pieces(word) or [word]]
        known = self._known  # stays whole while it is used: it is replaced, never emptied
        try:
            return b"".join(map(known.__getitem__, words))
        except KeyError:
            self._learn(known, words, are_pieces=are_pieces)
            return b"".join(map(known.__getitem__, words))

    def _pieces(self, text: str) -> list[str] | None:
        """What the model sees of a text that takes no more than to be split; None where something of it is decomposed,
        dropped or an added token."""
        if not (text.isascii() and text.isprintable()):
            return None
        lowered = text.lower()
        if any(map(lowered.__contains__, self._added)):
            return None
        return _PIECES.findall(lowered if self._is_lowercase else text)

    def _learn(self, known: dict[str, bytes], words: Iterable[str], *, are_pieces: bool) -> None:
        """``are_pieces``: all of them are what the model sees. Of the others each is looked at."""
        others = []
        for word in set(words).difference(known):
            if are_pieces or self._pieces(word) == [word]:
                # The model alone takes a sixth of the time of the whole pipeline.
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
    """What added tokens are found by, as written and as normalized, in lower case."""
    for token in tokenizer.get_added_tokens_decoder().values():
        for content in (token.content, tokenizer.normalizer.normalize_str(token.content)):
            if content:
                yield content.lower()
