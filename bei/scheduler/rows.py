"""From an engine's outputs for a batch to one row a sequence, each with the outputs that were asked for."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet

from bei.core import Outputs, PackedBatch, Row, is_held, rows_of_sequences
from bei.engine.postprocess import unit_length
from bei.errors import BeiError
from bei.port import UNIT_EMBEDDING


def engine_outputs(wanted: AbstractSet[str]) -> AbstractSet[str]:
    """The outputs that the engine must compute for ``wanted``."""
    return (wanted - {UNIT_EMBEDDING}) | {"embedding"} if UNIT_EMBEDDING in wanted else wanted


def rows_of_batch(
    outputs: Outputs, batch: PackedBatch, wanted: Seq[AbstractSet[str]], per_token: AbstractSet[str]
) -> list[Row]:
    """Row i has the outputs ``wanted[i]``.

    Rows of outputs per token are copies: a view would keep the tokens of the whole batch in memory until the last
    sequence of the batch is answered. Those in memory of another process (``Held``) are views: it bounds what they
    keep, and they go on to the next process without a copy.
    """
    asked = frozenset[str]().union(*wanted)
    parts = {
        name: rows_of_sequences(rows, batch, per_token=name in per_token)
        for name, rows in outputs.items()
        if name in asked
    }
    if UNIT_EMBEDDING in asked:
        parts[UNIT_EMBEDDING] = list(unit_length(outputs["embedding"]))
    copied = {name for name in per_token & outputs.keys() if not is_held(outputs[name])}
    return [
        {name: parts[name][index].copy() if name in copied else parts[name][index] for name in names}
        for index, names in enumerate(wanted)
    ]


def part_of(answer: Row | BeiError, outputs: AbstractSet[str]) -> Row | BeiError:
    """The outputs that were asked for; an equal sequence may have been computed with more."""
    if isinstance(answer, BeiError) or len(answer) == len(outputs):
        return answer
    return {name: answer[name] for name in outputs}
