"""Texts of requests: random English words, or lines of a file. By default all differ, so that neither caches nor
merging of equal inputs favour a server."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Protocol

import msgspec

from bei.errors import ConfigError
from bei.utils.named_files import MOST_TEXTS_BYTES, named_text
from bei.utils.ranges import shown

# Words at the beginning of a generated text that make it unique.
NUM_SERIAL_WORDS = 3

_POOL = 1 << 16  # drawn once; texts are slices of it, since drawing each word costs 50 times as much
_MOST_LENGTH = 100_000


@dataclass(frozen=True)
class LengthDistribution:
    """A distribution of positive integers: ``fixed`` (a), ``uniform`` (a to b) or ``lognormal`` (mean a, sigma of
    the logarithm b, at most c)."""

    kind: str
    a: float
    b: float = 0.0
    c: float = _MOST_LENGTH

    def draw(self, rng: random.Random) -> int:
        if self.kind == "fixed":
            return int(self.a)
        if self.kind == "uniform":
            return rng.randint(int(self.a), int(self.b))
        length = rng.lognormvariate(math.log(self.a) - self.b**2 / 2, self.b)
        return max(1, min(int(self.c), round(length)))

    @property
    def least(self) -> int:
        return 1 if self.kind == "lognormal" else int(self.a)


def lengths_of(text: str, setting: str) -> LengthDistribution:
    """Parse ``20``, ``fixed:20``, ``uniform:5:60`` or ``lognormal:58:0.85[:330]``. Raises ConfigError."""
    kind, *parts = text.split(":")
    if not parts:
        kind, parts = "fixed", [text]
    sizes = {"fixed": (1,), "uniform": (2,), "lognormal": (2, 3)}
    try:
        values = [float(part) for part in parts]
    except ValueError:
        values = []
    whole = values if kind != "lognormal" else values[2:]
    is_right = (
        len(values) in sizes.get(kind, ())
        and all(1 <= value <= _MOST_LENGTH and value == int(value) for value in whole)
        and (kind != "uniform" or values[0] <= values[1])
        and (kind != "lognormal" or (1 <= values[0] <= _MOST_LENGTH and 0 < values[1] <= 3))
    )
    if not is_right:
        raise ConfigError(
            f"{setting} must be a whole number, uniform:LEAST:MOST or lognormal:MEAN:SIGMA[:MOST], not {shown(text)}."
        )
    return LengthDistribution(kind, *values)


class TextsPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The source of texts. ``file`` None: random words. ``repeated``: the number of distinct texts; None: all
    differ."""

    seed: int = 0
    file: str | None = None
    sha256: str | None = None
    num_lines: int | None = None
    repeated: int | None = None


class Texts(Protocol):
    """An endless supply of texts."""

    def take(self, lengths: LengthDistribution) -> str:
        """The next text. ``lengths`` in words; lines of a file keep their lengths."""


def plan_of(file: Path | None, seed: int, repeated: int | None) -> TextsPlan:
    """The plan for ``file``, or for random words. Raises ConfigError."""
    if file is None:
        return TextsPlan(seed=seed, repeated=repeated)
    lines = lines_of(file)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return TextsPlan(seed=seed, file=str(file), sha256=digest, num_lines=len(lines), repeated=repeated)


def lines_of(file: Path) -> list[str]:
    """The distinct non-blank lines of ``file``, in order. Raises ConfigError."""
    content = named_text("The file of texts", file, MOST_TEXTS_BYTES)
    lines = list(dict.fromkeys(line.strip() for line in content.splitlines() if line.strip()))
    if not lines:
        raise ConfigError(f"{file} has no texts: it must have one a line.")
    return lines


def texts_of(plan: TextsPlan, worker: int, num_workers: int) -> Texts:
    """The texts of worker number ``worker``, distinct from other workers' unless texts are repeated. Raises
    ConfigError."""
    source: Texts
    if plan.file is not None:
        source = FileTexts(lines_of(Path(plan.file)), worker, num_workers)
    else:
        source = GeneratedTexts(plan.seed, worker, num_workers)
    if plan.repeated is None:
        return source
    one_supply = FileTexts(source.lines, 0, 1) if isinstance(source, FileTexts) else GeneratedTexts(plan.seed, 0, 1)
    return RepeatedTexts(one_supply, plan.repeated)


class WordNumbers:
    """Encodes numbers as unique sequences of words from a list; consecutive numbers have unrelated words."""

    def __init__(self, words: Sequence[str], num_words: int) -> None:
        self._words = words
        self._num_words = num_words
        self.size = len(words) ** num_words
        # A stride near the golden ratio spreads the numbers; without a common divisor it is a permutation.
        self._stride = int(self.size * 0.6180339887) | 1
        while math.gcd(self._stride, self.size) != 1:
            self._stride += 2

    def __getitem__(self, number: int) -> list[str]:
        """The words of ``number``, modulo ``size``."""
        rest = number * self._stride % self.size
        words = []
        for _ in range(self._num_words):
            rest, place = divmod(rest, len(self._words))
            words.append(self._words[place])
        return words


class GeneratedTexts:
    """Random English words with the frequencies of prose. The first three words of a text encode its number."""

    def __init__(self, seed: int, worker: int, num_workers: int) -> None:
        words, counts = zip(*_frequencies(), strict=True)
        self._rng = random.Random(f"{seed} {worker}")
        self._pool = self._rng.choices(words, counts, k=_POOL)
        self._numbered = WordNumbers(words, NUM_SERIAL_WORDS)
        self._numbers = itertools.count(worker, num_workers)

    def take(self, lengths: LengthDistribution) -> str:
        """A text of at least as many words as its number takes."""
        rest = lengths.draw(self._rng) - NUM_SERIAL_WORDS
        words = self._numbered[next(self._numbers)]
        while rest > 0:
            start = self._rng.randrange(_POOL)
            piece = self._pool[start : start + rest]
            words += piece
            rest -= len(piece)
        return " ".join(words)


class FileTexts:
    """Lines of a file in order. From the second pass on, a word at the beginning encodes the number of the pass."""

    def __init__(self, lines: Sequence[str], worker: int, num_workers: int) -> None:
        self.lines = lines
        self._laps = WordNumbers([word for word, _ in _frequencies()], 1)
        self._numbers = itertools.count(worker, num_workers)

    def take(self, lengths: LengthDistribution) -> str:
        lap, place = divmod(next(self._numbers), len(self.lines))
        return self.lines[place] if lap == 0 else f"{self._laps[lap][0]} {self.lines[place]}"


class RepeatedTexts:
    """The first ``count`` texts of ``source``, repeated."""

    def __init__(self, source: Texts, count: int) -> None:
        self._source = source
        self._count = count
        self._rounds: dict[LengthDistribution, Iterator[str]] = {}

    def take(self, lengths: LengthDistribution) -> str:
        """The next text of these lengths."""
        if lengths not in self._rounds:
            self._rounds[lengths] = itertools.cycle([self._source.take(lengths) for _ in range(self._count)])
        return next(self._rounds[lengths])


def _frequencies() -> list[tuple[str, int]]:
    lines = files("bei.cli.bench").joinpath("words.txt").read_text("utf-8").splitlines()
    pairs = [line.split(" ") for line in lines if not line.startswith("#")]
    return [(word, int(count)) for word, count in pairs]
