"""What a graph gives of boundaries and labels, from which instances of structures are formed (GLiNER2.5).

A candidate, a pair of boundaries, is a vector that is linear in the states of both, and all that is computed of it is
linear again: of D = ``Records.width`` numbers as an instance, as what fields are compared with, and as a part of the
I = ``Records.num_queries`` instances that the model has learned, with I numbers each of attention and of comparison,
and 4 scores. So a graph gives the share of each boundary as a start and as an end, in the row of the token with its
number in the sequence, and of each label its D numbers, I + 1 scores of no value and I of the learned instances, in the
row of its token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bei.artifact.label_layouts import Records
from bei.core import Float32Array, Int32Array
from bei.engine.words import LABEL, kinds_of


class CandidateRows(NamedTuple):
    """Of C candidates: as ``instances`` and compared with ``fields`` and as parts of learned ones (``values``) [C, D];
    the ``attention`` of learned instances to them and what these score them, ``learned`` [C, I]; scores as a ``seed``
    of an instance, as a part of one (``objects``), of no value beside them as an instance (``nothing``) and as a part
    of one (``value_nothing``) [C]."""

    instances: Float32Array
    fields: Float32Array
    values: Float32Array
    attention: Float32Array
    learned: Float32Array
    seed: Float32Array
    objects: Float32Array
    nothing: Float32Array
    value_nothing: Float32Array


class LabelRows(NamedTuple):
    """Of F labels: the ``fields`` [F, D], their scores of no value beside ``learned_nothing`` [F, I] instances and
    ``nothing`` else [F], and the scores ``learned`` [I] of these instances."""

    fields: Float32Array
    learned_nothing: Float32Array
    nothing: Float32Array
    learned: Float32Array


def candidate_rows(rows: Float32Array, spans: npt.NDArray[np.int64], records: Records) -> CandidateRows:
    """Of the candidates between the boundaries ``spans`` [C, 2], of a sequence's ``rows`` [tokens, columns]."""
    width = records.candidate_columns
    total = rows[spans[:, 0], :width] + rows[spans[:, 1], width : 2 * width]
    wide = np.cumsum([records.width] * 3 + [records.num_queries] * 2)
    parts = np.split(total, wide, axis=1)
    instances, fields, values, attention, learned, scores = parts
    return CandidateRows(instances, fields, values, attention, learned, *scores.T)


def label_rows(rows: Float32Array, token_types: Int32Array, labels: slice, records: Records) -> LabelRows:
    """Of the ``labels`` of a sequence, of its ``rows`` [tokens, columns]."""
    own = rows[np.flatnonzero(kinds_of(token_types) == LABEL)[labels], 2 * records.candidate_columns :]
    width, count = records.width, records.num_queries
    fields, learned_nothing, nothing, learned = np.split(own, np.cumsum([width, count, 1]), axis=1)
    return LabelRows(fields, learned_nothing, nothing[:, 0], learned[0])
