"""Instances of structures with a mode, as the gliner2 library forms them of GLiNER2.5's candidates (its ``RecordHead``
and ``decode_group``)."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from bei.core import Float32Array
from bei.engine.postprocess import apply_function
from bei.engine.record_columns import CandidateRows, LabelRows
from bei.errors import InvalidRequestError
from bei.tasks.schema_forms import AskedField, AskedPart
from bei.tasks.span_choice import MOST_CANDIDATES, check_candidates

_EPS = np.finfo(np.float32).eps
# What no value costs where a field must have one, and a place that is another instance's, beside all others.
_UNWANTED, _IMPOSSIBLE = 50.0, 1000.0

# Instances of a structure squared, times the exclusive fields of one value: what shares them out takes under a second.
MOST_ASSIGNED = 1 << 17

# Of each field the numbers of its candidates, and the probabilities that they are the instance's.
Chosen: TypeAlias = "tuple[tuple[tuple[int, float], ...], ...]"


class Formed(NamedTuple):
    """An instance: its probability, and what its fields have."""

    score: float
    values: Chosen


class _Instances(NamedTuple):
    """Possible instances: their ``scores`` [N], what is compared of them with candidates, ``queries`` [N, D], what is
    added to their scores of candidates [N, C] or [N, 1], and of no value for fields [N, F]."""

    scores: Float32Array
    queries: Float32Array
    added: Float32Array
    nothing: Float32Array


def formed(part: AskedPart, anchors: Float32Array | None, candidates: CandidateRows, labels: LabelRows) -> list[Formed]:
    """The instances of ``part`` among ``candidates``. ``anchors`` [C]: their scores as values of its anchor. Raises
    InvalidRequestError for more than ``MOST_CANDIDATES`` values, and for too many instances with exclusive fields."""
    every = _learned(candidates, labels) if part.mode == "anchorless" else _of_candidates(anchors, candidates, labels)
    scores = apply_function(every.scores, "sigmoid")
    order = np.argsort(-scores, kind="stable")
    order = order[scores[order] >= part.threshold]
    if not len(order) or not len(candidates.seed):
        return []
    _check_exclusive(part, len(order))
    queries = every.queries[order][:, None] + labels.fields  # [n, F, D]
    values: Float32Array = np.matmul(queries, candidates.fields.T)
    values += every.added[order][:, None]
    logits: Float32Array = np.concatenate([every.nothing[order][:, :, None], values], axis=2)
    columns, num_values = [], 0
    for index, one in enumerate(part.fields):
        is_anchor = index == part.anchor
        columns.append(_anchors(order, scores) if is_anchor else _values(one, logits[:, index], part.threshold))
        num_values += sum(map(len, columns[-1]))
        check_candidates(num_values, MOST_CANDIDATES, "a text")
    rows = zip(order.tolist(), zip(*columns, strict=True), strict=True)
    found = [Formed(float(scores[place]), row) for place, row in rows]
    found = [one for one in found if any(one.values)]
    if part.anchor is None:
        return _without_equal(found)
    return [found[place] for place in _by_anchor(found, part.anchor)]


def _check_exclusive(part: AskedPart, num_instances: int) -> None:
    num_fields = sum(one.exclusive and one.has_one for one in part.fields)
    if num_instances**2 * num_fields > MOST_ASSIGNED:
        raise InvalidRequestError(
            f"The structure {part.name!r} has {num_instances} instances in a text, too many to share values of "
            f"{num_fields} exclusive fields out between them: raise threshold, or leave exclusive out.",
            "threshold",
        )


def _of_candidates(anchors: Float32Array | None, candidates: CandidateRows, labels: LabelRows) -> _Instances:
    """Each candidate as an instance: of its score as an anchor, or of its own as a seed."""
    return _Instances(
        candidates.seed if anchors is None else anchors,
        candidates.instances,
        np.zeros((len(candidates.seed), 1), np.float32),
        candidates.nothing[:, None] + labels.nothing,
    )


def _learned(candidates: CandidateRows, labels: LabelRows) -> _Instances:
    """The instances that the model has learned, with what they read of the candidates."""
    shares = apply_function(candidates.attention.T, "softmax")  # [I, C]
    return _Instances(
        labels.learned + shares @ candidates.objects,
        shares @ candidates.values,
        candidates.learned.T,
        labels.learned_nothing.T + (shares @ candidates.value_nothing)[:, None],
    )


def _anchors(order: npt.NDArray[np.intp], scores: Float32Array) -> list[tuple[tuple[int, float], ...]]:
    return [((int(place), float(scores[place])),) for place in order]


def _values(asked: AskedField, logits: Float32Array, threshold: float) -> list[tuple[tuple[int, float], ...]]:
    """What a field has in each instance. ``logits`` [n, 1 + C]: of no value, then of candidates."""
    if asked.has_one:
        chosen = _shared_out(asked, logits) if asked.exclusive else _best_of_each(asked, logits)
        shares = apply_function(logits, "softmax")
        return [
            ((place, score),)
            if place >= 0 and ((score := float(row[place + 1])) >= threshold or asked.must_be_there)
            else ()
            for place, row in zip(chosen, shares, strict=True)
        ]
    scores = apply_function(logits[:, 1:], "sigmoid")
    is_chosen = scores >= threshold
    if asked.exclusive:  # each candidate is the instance's that scores it highest
        is_chosen &= np.arange(len(scores))[:, None] == scores.argmax(axis=0)
    return [
        tuple((int(place), float(row[place])) for place in np.flatnonzero(own))
        for own, row in zip(is_chosen, scores, strict=True)
    ]


def _best_of_each(asked: AskedField, logits: Float32Array) -> list[int]:
    """The best candidate of each instance; -1: none."""
    best: list[int] = (logits[:, 1:] if asked.must_be_there else logits).argmax(axis=1).tolist()
    return best if asked.must_be_there else [place - 1 for place in best]


def _shared_out(asked: AskedField, logits: Float32Array) -> list[int]:
    """The candidate of each instance, each of at most one, so that the product of their probabilities is largest; -1:
    none."""
    shares = np.maximum(apply_function(logits, "softmax"), _EPS)
    costs = -np.log(shares.astype(np.float64))
    own = costs[:, 1:]
    nothing = np.full(len(own), own.max() + _UNWANTED) if asked.must_be_there else costs[:, 0]
    absent = np.full((len(own), len(own)), max(own.max(), nothing.max()) + _IMPOSSIBLE)
    np.fill_diagonal(absent, nothing)
    count = own.shape[1]
    return [place if place < count else -1 for place in assignment(np.concatenate([own, absent], axis=1))]


def assignment(costs: npt.NDArray[np.float64]) -> list[int]:
    """Of each row a column, no two the same, so that the sum of ``costs`` is least; there are as many columns as rows,
    or more (the Hungarian method with shortest augmenting paths). Of equal sums that of the first columns is taken, as
    far as a rounding tells."""
    num_rows, num_columns = costs.shape
    costs = costs + np.finfo(np.float64).eps * max(float(np.abs(costs).max()), 1.0) * np.arange(costs.size).reshape(
        costs.shape
    )
    of_rows, of_columns = np.zeros(num_rows), np.zeros(num_columns)
    owners = np.full(num_columns, -1)
    for first in range(num_rows):
        distances, before = np.full(num_columns, np.inf), np.full(num_columns, -1)
        is_done, row, column = np.zeros(num_columns, np.bool_), first, -1
        while True:
            through = costs[row] - of_rows[row] - of_columns
            is_nearer = ~is_done & (through < distances)
            distances[is_nearer], before[is_nearer] = through[is_nearer], column
            nearest = int(np.where(is_done, np.inf, distances).argmin())
            step = distances[nearest]
            of_rows[first] += step
            of_rows[owners[is_done]] += step
            of_columns[is_done] -= step
            distances[~is_done] -= step
            is_done[nearest], column = True, nearest
            if owners[nearest] < 0:
                break
            row = int(owners[nearest])
        while column >= 0:
            owners[column] = owners[before[column]] if before[column] >= 0 else first
            column = int(before[column])
    found = np.full(num_rows, -1)
    found[owners[owners >= 0]] = np.flatnonzero(owners >= 0)
    result: list[int] = found.tolist()
    return result


def _without_equal(found: Seq[Formed]) -> list[Formed]:
    """Of instances with the same candidates the best one."""
    best: dict[tuple[tuple[int, ...], ...], Formed] = {}
    for one in found:
        key = tuple(tuple(sorted(place for place, _ in values)) for values in one.values)
        if key not in best or one.score > best[key].score:
            best[key] = one
    return [*best.values()]


def _by_anchor(found: Seq[Formed], anchor: int) -> Iterator[int]:
    """The places of instances in the order of their anchors' candidates."""
    yield from sorted(range(len(found)), key=lambda place: found[place].values[anchor][0][0])
