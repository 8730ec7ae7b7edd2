"""Results of ``bei.Model``'s methods that are not arrays; importable from ``bei``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from bei.core import Float32Array, Int32Array
from bei.engine.postprocess import descending
from bei.errors import BeiError
from bei.tasks.extract import Span
from bei.tasks.schema_classes import LabelScore
from bei.tasks.schema_spans import Instance

InputT = TypeVar("InputT")
ResultT = TypeVar("ResultT")


class SparseVector(NamedTuple):
    """The vocabulary entries with positive weights: ``indices`` int32 [k], ascending, ``values`` float32 [k]."""

    indices: Int32Array
    values: Float32Array


@dataclass(frozen=True, slots=True)
class Rank:
    """A document's place in the ranked list, and its score: a probability, or the logit."""

    index: int
    score: float


class Token(NamedTuple):
    """A token. ``start`` and ``stop`` count characters of the text, its prompt included; special tokens have none."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class Extracted(NamedTuple):
    """Of one text: spans for labels, and by their names what else was asked for. An instance has, by field, a ``Value``
    or None, or a list of them; relations have the fields head and tail. A classification has its best label, or with
    ``multi_label`` a list of them."""

    spans: list[Span]
    structures: dict[str, list[Instance]]
    relations: dict[str, list[Instance]]
    classifications: dict[str, LabelScore | list[LabelScore]]


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
    """Consecutive inputs of a stream, with their results. ``start``: the number of inputs before them. With a report
    an input with an error is an empty text here."""

    start: int
    inputs: list[InputT]
    results: ResultT


@dataclass
class Report:
    """Counts, truncations and errors of one call, filled while it runs.

    ``num_inputs`` and ``num_tokens``: done so far, special tokens included. ``truncated``: places of inputs that were
    cut to what the model takes. ``errors``: by place, of inputs without a result. Only ``embed``, ``embed_sparse`` and
    ``embed_all`` go on without such inputs; other methods, and calls without a report, raise the first error.
    """

    num_inputs: int = 0
    num_tokens: int = 0
    truncated: list[int] = field(default_factory=list)
    errors: dict[int, BeiError] = field(default_factory=dict)
