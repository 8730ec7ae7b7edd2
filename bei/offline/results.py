"""What the methods of ``bei.Model`` give, where it is not an array."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from bei.core import Float32Array, Int32Array
from bei.engine.postprocess import descending
from bei.errors import BeiError

InputT = TypeVar("InputT")
ResultT = TypeVar("ResultT")


class SparseVector(NamedTuple):
    """The entries of the vocabulary whose weights are above zero: ``indices`` int32 [k], ascending, ``values`` float32
    [k]."""

    indices: Int32Array
    values: Float32Array


@dataclass(frozen=True, slots=True)
class Rank:
    """A document by its place in the list that was ranked, and its score: a probability, or the logit."""

    index: int
    score: float


class LabelScore(NamedTuple):
    """A label and its score: a probability, or the logit."""

    label: str
    score: float


class Token(NamedTuple):
    """A token. ``start`` and ``stop`` count characters of the text, its prompt included; special tokens have none."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


@dataclass(frozen=True, eq=False)
class Predictions:
    """Scores of labels for n inputs: ``scores`` float32 [n, labels], its columns in the order of ``labels``.

    ``predictions[i]`` are the labels of input i with their scores, best first.
    """

    labels: list[str]
    scores: Float32Array

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, index: int) -> list[LabelScore]:
        row = self.scores[index]
        return [LabelScore(self.labels[column], float(row[column])) for column in descending(row)]

    def __iter__(self) -> Iterator[list[LabelScore]]:
        return (self[index] for index in range(len(self)))


@dataclass(frozen=True)
class Chunk(Generic[InputT, ResultT]):
    """Some inputs of a stream, one after the other, with their results. ``start``: how many came before them. With a
    report an input that has an error is an empty text here."""

    start: int
    inputs: list[InputT]
    results: ResultT


@dataclass
class Report:
    """What became of the inputs of one call, by their places. It is filled while the call runs.

    ``num_inputs`` and ``num_tokens``: those that are done, special tokens included. ``truncated``: those that were cut
    to what the model takes. ``errors``: those that have no result, of ``embed``, ``embed_sparse`` and ``embed_all``,
    which go on without them if they are given a report; elsewhere, and without a report, the first error is raised.
    """

    num_inputs: int = 0
    num_tokens: int = 0
    truncated: list[int] = field(default_factory=list)
    errors: dict[int, BeiError] = field(default_factory=dict)
