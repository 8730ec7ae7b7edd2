"""Texts: English prose that a server has not met (BEIR's SciFact and FiQA), and random words of a vocabulary.

    python -m tests.real.fetch scifact fiqa

The documents of both corpora (5,183 abstracts, 57,638 forum answers) are shuffled together and read as one stream of
8.77 million words; a passage is the next words of it, so it may begin within a sentence and go on into the next
document. No passage is handed out twice. Where the stream ends, ``Prose`` refuses: whoever wants more starts a new lap
and restarts the servers, whose caches would know the words. MiniLM's tokenizer makes 1.3 tokens of a word of FiQA and
1.6 of one of SciFact.
"""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from tests.real.models import cache_dir

T = TypeVar("T")

CORPORA = ("scifact", "fiqa")


class ProseExhaustedError(Exception):
    """All texts were handed out."""


@dataclass(frozen=True)
class Words:
    """Words of a passage: log-normal of this ``mean``, ``spread`` its sigma (0: all alike), at most ``most``."""

    mean: float
    spread: float = 0.0
    most: int = 100_000

    def draw(self, rng: random.Random) -> int:
        """The length of one passage, at least 3 words."""
        if not self.spread:
            return round(self.mean)
        length = rng.lognormvariate(math.log(self.mean) - self.spread**2 / 2, self.spread)
        return max(3, min(self.most, round(length)))


SHORT = Words(20, 0.35, 60)  # a query or a sentence: about 29 tokens with the special ones
PASSAGES = Words(58, 0.85, 330)  # a retrieval corpus, as ``mixed_lengths``: about 78 tokens, long tail
LONG = Words(225)  # more than 256 tokens of nearly every text: models of 256 cut it there


def groups(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def mixed_lengths(count: int, longest: int) -> list[int]:
    """Token counts of a retrieval corpus: log-normal, mean about 78, cut at ``longest``."""
    lengths = np.random.default_rng(0).lognormal(mean=4.0, sigma=0.85, size=count)
    return [int(length) for length in np.clip(np.rint(lengths), 4, longest)]


class Prose:
    """The supply of texts. ``repeats``: begin again where it ends, for runs in which texts need not be new."""

    def __init__(self, documents: Sequence[str], seed: int = 0, *, repeats: bool = False) -> None:
        self._documents = list(documents)
        self._seed = seed
        self._repeats = repeats
        self._returned: dict[Words, deque[str]] = defaultdict(deque)
        self.lap = 0
        self.num_taken = 0
        self._begin()

    def take(self, count: int, length: Words) -> list[str]:
        """``count`` texts that were not handed out in this lap. Raises ProseExhaustedError, and then takes none."""
        returned = self._returned[length]
        texts = [returned.popleft() for _ in range(min(count, len(returned)))]
        while len(texts) < count:
            try:
                texts.append(self._cut(length))
            except StopIteration:
                if not self._repeats:
                    returned.extend(texts)
                    raise ProseExhaustedError(f"{self.num_taken} texts were handed out, and no more are left") from None
                self.new_lap()
        self.num_taken += count
        return texts

    def give_back(self, texts: Sequence[str], length: Words) -> None:
        """Texts that were taken and never sent: they are handed out again."""
        self._returned[length].extend(texts)
        self.num_taken -= len(texts)

    def new_lap(self) -> None:
        """Begin again, documents in another order: texts come that servers may have met."""
        self.lap += 1
        self._begin()

    def _begin(self) -> None:
        self._rng = random.Random(f"{self._seed} {self.lap}")
        order = list(self._documents)
        self._rng.shuffle(order)
        self._words = (word for document in order for word in document.split())
        self._given: set[int] = set()
        self._returned.clear()

    def _cut(self, length: Words) -> str:
        while True:
            count = length.draw(self._rng)
            text = " ".join([next(self._words) for _ in range(count)])  # StopIteration where the stream ends
            if hash(text) not in self._given:  # some documents stand in the corpora twice
                self._given.add(hash(text))
                return text


def read_prose(
    seed: int = 0, *, repeats: bool = False, most_documents: int | None = None, folder: Path | None = None
) -> Prose:
    """The prose of the fetched corpora, or of the first ``most_documents`` of each.

    Ends the program with the command that fetches them if they are not there.
    """
    folder = folder or cache_dir()
    documents: list[str] = []
    for name in CORPORA:
        path = folder / name / "corpus.jsonl"
        if not path.is_file():
            raise SystemExit(f"{path} is not there: python -m tests.real.fetch {' '.join(CORPORA)}")
        with path.open(encoding="utf-8") as file:
            rows = (json.loads(line) for line in file)
            texts = dict.fromkeys(f"{row['title']} {row['text']}".strip() for row in rows)
            documents += list(texts)[:most_documents]
    return Prose(documents, seed, repeats=repeats)
