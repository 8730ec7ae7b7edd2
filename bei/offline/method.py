"""A method of ``bei.Model`` as data: its options, its task for a window of inputs, and how windows become a result."""

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
from bei.image.source import MixedInput
from bei.offline.input_checks import Check
from bei.offline.options import CallOptions
from bei.offline.results import Predictions, Rank
from bei.offline.windows import WINDOW
from bei.service.admission import Ticket
from bei.service.call import ModelInput

T = TypeVar("T")
InputT = TypeVar("InputT", bound="ModelInput | MixedInput")
PartT = TypeVar("PartT")
ResultT = TypeVar("ResultT")
PartT_contra = TypeVar("PartT_contra", contravariant=True)
ResultT_co = TypeVar("ResultT_co", covariant=True)

Vectors: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class WindowResult(Generic[PartT]):
    """The results of a window's inputs. ``truncated`` and the keys of ``errors`` are places in the window."""

    part: PartT
    num_tokens: int
    truncated: Seq[int]
    errors: Mapping[int, BeiError]


class Collector(Protocol[PartT_contra, ResultT_co]):
    """Joins the parts of all windows, at least one, which arrive in order."""

    def add(self, part: PartT_contra) -> None: ...

    def result(self) -> ResultT_co: ...


def _unchanged(inputs: Seq[Any]) -> Seq[ModelInput]:
    return inputs


@dataclass(frozen=True, kw_only=True)
class Method(Generic[InputT, PartT, ResultT]):
    """A task with the options of one call.

    ``check``: validates an input, given its place. ``run``: computes a window; its last argument holds the errors of
    inputs to be skipped, None where any error fails the call. ``collector``: takes the number of inputs, None where it
    is not known. ``model_inputs``: the texts, pairs or ids that the model reads for some inputs. ``stand_in``: takes
    the place of an invalid input; None: an invalid input fails the call. ``bytes_per_token``: growth of the results
    with each token. ``param``: the name of the inputs in errors. ``whole``: inputs are tokenized without truncation,
    and no engine runs. ``is_one``: the model reads all inputs together, so that they are one window.
    """

    name: str
    options: CallOptions
    check: Check[InputT]
    run: Callable[[Seq[InputT], Ticket, Mapping[int, BeiError] | None], Awaitable[WindowResult[PartT]]]
    collector: Callable[[int | None], Collector[PartT, ResultT]]
    model_inputs: Callable[[Seq[InputT]], Seq[ModelInput]] = _unchanged
    stand_in: InputT | None = None
    bytes_per_token: int = 0
    window_inputs: int = WINDOW
    param: str = "inputs"
    whole: bool = False
    is_one: bool = False


class RowCollector:
    """Joins arrays with a row for each of ``count`` inputs: [count, ...], allocated at the first part."""

    def __init__(self, count: int | None) -> None:
        self._count = count
        self._parts: list[Vectors] = []  # where the count is not known
        self._whole: Vectors | None = None
        self._num_rows = 0

    def add(self, part: Vectors) -> None:
        """Append the rows of a window."""
        if self._count is None:
            self._parts.append(part)
            return
        if self._whole is None:
            self._whole = np.empty((self._count, *part.shape[1:]), part.dtype)
        self._whole[self._num_rows : self._num_rows + len(part)] = part
        self._num_rows += len(part)

    def result(self) -> Vectors:
        return np.concatenate(self._parts) if self._whole is None else self._whole[: self._num_rows]


class ListCollector(Generic[T]):
    """Joins lists with an entry for each input."""

    def __init__(self, _: int | None) -> None:
        self._entries: list[T] = []

    def add(self, part: list[T]) -> None:
        """Append the entries of a window."""
        self._entries += part

    def result(self) -> list[T]:
        return self._entries


class PredictionCollector:
    """Joins scores of the same labels."""

    def __init__(self, labels: list[str], count: int | None) -> None:
        self._labels = labels
        self._rows = RowCollector(count)

    def add(self, part: Predictions) -> None:
        """Append the scores of a window."""
        self._rows.add(part.scores)

    def result(self) -> Predictions:
        return Predictions(self._labels, self._rows.result())


class RankCollector:
    """Turns document scores, [n] a window, into the ``top_n`` best ranks, best first; None or 0: all."""

    def __init__(self, top_n: int | None, count: int | None) -> None:
        self._top_n = top_n
        self._rows = RowCollector(count)

    def add(self, part: Float32Array) -> None:
        """Append the scores of a window."""
        self._rows.add(part)

    def result(self) -> list[Rank]:
        """The ranks of all documents so far."""
        scores = self._rows.result()
        return [Rank(index, float(scores[index])) for index in descending(scores)[: self._top_n or None]]
