"""Instances of structures with a mode, as the gliner2 library forms them of GLiNER2.5's candidates (its ``RecordHead``
and ``decode_group``)."""

from __future__ import annotations

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
    """The instances of ``part`` among ``candidates``, best first; equal ones are ranked as the candidates, which are in
    the order of the pool. ``anchors`` [C]: their scores as values of its anchor. Raises InvalidRequestError for more
    than ``MOST_CANDIDATES`` values, and for too many instances with exclusive fields."""
    every = _learned(candidates, labels) if part.mode == "anchorless" else _of_candidates(anchors, candidates, labels)
    scores = _probabilities(every.scores)
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
    return found if part.mode == "natural" else _without_equal(found)


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


def _probabilities(logits: Float32Array) -> Float32Array:
    """The sigmoid, computed in 32 bits: near 1 the same logits have equal ones as in the library, which ranks them by
    their places."""
    with np.errstate(over="ignore"):
        found: Float32Array = np.reciprocal(1 + np.exp(-logits))
    return found


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
    scores = _probabilities(logits[:, 1:])
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
    none. A probability below FP32's epsilon counts as that, so many sums are equal, and costs have 32 bits as in the
    library, so that equal ones are equal there too."""
    costs: Float32Array = -np.log(np.maximum(apply_function(logits, "softmax"), _EPS))
    own = costs[:, 1:]
    nothing = np.full(len(own), own.max() + _UNWANTED) if asked.must_be_there else costs[:, 0]
    absent = np.full((len(own), len(own)), max(own.max(), nothing.max()) + _IMPOSSIBLE, np.float32)
    np.fill_diagonal(absent, nothing)
    count = own.shape[1]
    columns = assignment(ranked_by_place(np.concatenate([own, absent], axis=1).astype(np.float64)))
    return [place if place < count else -1 for place in columns]


def ranked_by_place(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """``costs`` of which equal ones differ by their places, as the library makes them differ."""
    least = np.finfo(np.float64).eps * max(float(costs.max()), 1.0)
    return costs + least * np.arange(costs.size, dtype=np.float64).reshape(costs.shape)


def assignment(costs: npt.NDArray[np.float64]) -> list[int]:
    """Of each row a column, no two the same, so that the sum of ``costs`` is least; there are as many columns as rows,
    or more. Of equal sums the one that scipy's ``linear_sum_assignment`` takes, with which the library shares values
    out: the Hungarian method with shortest augmenting paths, which looks at columns from the last one on."""
    num_rows, num_columns = costs.shape
    of_rows, of_columns = np.zeros(num_rows), np.zeros(num_columns)
    found, owners = np.full(num_rows, -1), np.full(num_columns, -1)
    for first in range(num_rows):
        distances, before = np.full(num_columns, np.inf), np.full(num_columns, -1)
        left = np.arange(num_columns)[::-1].copy()
        done, row, least = [], first, 0.0
        while True:
            through = least + costs[row, left] - of_rows[row] - of_columns[left]
            is_nearer = through < distances[left]
            distances[left[is_nearer]], before[left[is_nearer]] = through[is_nearer], row
            least = distances[left].min()
            nearest = np.flatnonzero(distances[left] == least)
            free = nearest[owners[left[nearest]] < 0]
            place = free[-1] if len(free) else nearest[0]
            column = int(left[place])
            left[place] = left[-1]
            left = left[:-1]
            done.append(column)
            if owners[column] < 0:
                break
            row = int(owners[column])
        steps = least - distances[done]
        of_rows[first] += least
        of_rows[owners[done[:-1]]] += steps[:-1]
        of_columns[done] -= steps
        while column >= 0:  # the first row had none
            row = int(before[column])
            owners[column] = row
            found[row], column = column, int(found[row])
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
