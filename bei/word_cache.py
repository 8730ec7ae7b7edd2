"""Token ids of words seen before, for tokenizers that treat every word by itself.

Texts repeat their words, and the library tokenizes each of them anew: 0.1 ms for a text of 74 tokens, which two cores
that compute an engine feel (docs/decisions.md, "Words are tokenized once").
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np
from tokenizers import Tokenizer

# About what the known words may occupy, and what one costs beside its characters and ids (a dict's entry, two objects).
_MAX_BYTES = 32 << 20
_BYTES_PER_WORD = 200
# Up to so many characters words are tokenized one by one, with the interpreter's lock held: a word takes 15 us, and
# whoever lets go of the lock, as a batch does, has to wait until it gets it back.
_FEW_CHARS = 128


def treats_words_alone(tokenizer: Tokenizer) -> bool:
    """Whether the ids of "a b" are always those of "a" and those of "b": tokenizing distributes over the ASCII space.

    Known to hold for BERT's pipeline: its normalizer decomposes and drops single characters, its pre-tokenizer splits
    at every blank, WordPiece sees one word. It does not where an added token reaches over a space.
    """
    parts = json.loads(tokenizer.to_str())
    kinds = [(parts[name] or {}).get("type") for name in ("normalizer", "pre_tokenizer", "model")]
    added = [token["content"] for token in parts["added_tokens"]]
    return kinds == ["BertNormalizer", "BertPreTokenizer", "WordPiece"] and not any(" " in content for content in added)


class WordCache:
    """Ids of words separated by single spaces, as the bytes of int32. Safe in threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, bytes] = {}
        self._num_bytes = 0

    def ids(self, text: str) -> bytes:
        """The ids of ``text`` without special tokens."""
        words = text.split(" ")
        known = self._known  # stays whole while it is used: it is replaced, never emptied
        try:
            return b"".join(map(known.__getitem__, words))
        except KeyError:
            self._learn(known, words)
            return b"".join(map(known.__getitem__, words))

    def _learn(self, known: dict[str, bytes], words: Iterable[str]) -> None:
        missing = [word for word in dict.fromkeys(words) if word not in known]
        if sum(map(len, missing)) <= _FEW_CHARS:
            encodings = [self._tokenizer.encode(word, add_special_tokens=False) for word in missing]
        else:
            encodings = self._tokenizer.encode_batch_fast(missing, add_special_tokens=False)
        for word, encoded in zip(missing, encodings, strict=True):
            known[word] = np.array(encoded.ids, np.int32).tobytes()
            self._num_bytes += len(word) + len(known[word]) + _BYTES_PER_WORD
        if self._num_bytes > _MAX_BYTES:
            self._known, self._num_bytes = {}, 0
