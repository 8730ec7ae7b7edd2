"""What a call asks for, as data: a task for any window of inputs, and how the windows' answers become one result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from bei.core import Float32Array
from bei.engine.postprocess import descending
from bei.errors import BeiError
from bei.offline.input_checks import Check
from bei.offline.results import Predictions, Rank
from bei.offline.windows import WINDOW
from bei.port import Lane
from bei.service.admission import Ticket
from bei.service.call import ModelInput

T = TypeVar("T")
InputT = TypeVar("InputT")
PartT = TypeVar("PartT")
ResultT = TypeVar("ResultT")
PartT_contra = TypeVar("PartT_contra", contravariant=True)
ResultT_co = TypeVar("ResultT_co", covariant=True)

Vectors: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class Answered(Generic[PartT]):
    """The answer to a window: its part of the result, and what became of its inputs (``bei.tasks.partial.Fates``)."""

    part: PartT
    num_tokens: int
    truncated: Seq[int]
    errors: Mapping[int, BeiError]


class Collector(Protocol[PartT_contra, ResultT_co]):
    """Makes one result of the parts of all windows, one at least, which come in order."""

    def add(self, part: PartT_contra) -> None: ...

    def result(self) -> ResultT_co: ...


@dataclass(frozen=True, kw_only=True)
class Job(Generic[InputT, PartT, ResultT]):
    """A task with its options.

    ``check``: of an input and its place. ``run``: of a window, its ticket and, where a part of the answer will do, the
    errors of inputs that are not to be tried. ``collector``: for so many inputs; None: nobody knows how many.
    ``model_inputs``: what the model reads of inputs. ``stand_in``: what stands in the place of an input that is not to
    be tried; None: every error is one of the whole call. ``bytes_per_token``: what answers grow by. ``param``: what
    inputs are called. ``whole``: inputs are only tokenized, and to their ends.
    """

    name: str
    check: Check[InputT]
    run: Callable[[Seq[InputT], Ticket, Mapping[int, BeiError] | None], Awaitable[Answered[PartT]]]
    collector: Callable[[int | None], Collector[PartT, ResultT]]
    model_inputs: Callable[[Seq[InputT]], Seq[ModelInput]]
    lane: Lane | None
    timeout_s: float | None
    stand_in: InputT | None = None
    bytes_per_token: int = 0
    window_inputs: int = WINDOW
    param: str = "inputs"
    whole: bool = False


class Rows:
    """Arrays with a row for each input become one: [count, ...], made when the first part says how wide it is."""

    def __init__(self, count: int | None) -> None:
        self._count = count
        self._parts: list[Vectors] = []  # of as many inputs as come
        self._whole: Vectors | None = None
        self._num_rows = 0

    def add(self, part: Vectors) -> None:
        """The rows of the next window."""
        if self._count is None:
            self._parts.append(part)
            return
        if self._whole is None:
            self._whole = np.empty((self._count, *part.shape[1:]), part.dtype)
        self._whole[self._num_rows : self._num_rows + len(part)] = part
        self._num_rows += len(part)

    def result(self) -> Vectors:
        """All rows."""
        return np.concatenate(self._parts) if self._whole is None else self._whole[: self._num_rows]


class Entries(Generic[T]):
    """Lists with an entry for each input become one."""

    def __init__(self, _: int | None) -> None:
        self._entries: list[T] = []

    def add(self, part: list[T]) -> None:
        """The entries of the next window."""
        self._entries += part

    def result(self) -> list[T]:
        """All entries."""
        return self._entries


class Labelled:
    """Scores of labels."""

    def __init__(self, labels: list[str], count: int | None) -> None:
        self._labels = labels
        self._rows = Rows(count)

    def add(self, part: Predictions) -> None:
        """Those of the next window."""
        self._rows.add(part.scores)

    def result(self) -> Predictions:
        """All of them."""
        return Predictions(self._labels, self._rows.result())


class Ranking:
    """Scores of documents, [n] of a window, become ranks: the ``top_n`` best, best first; None or 0: all."""

    def __init__(self, top_n: int | None, count: int | None) -> None:
        self._top_n = top_n
        self._rows = Rows(count)

    def add(self, part: Float32Array) -> None:
        """Those of the next window."""
        self._rows.add(part)

    def result(self) -> list[Rank]:
        """All of them."""
        scores = self._rows.result()
        return [Rank(index, float(scores[index])) for index in descending(scores)[: self._top_n or None]]
