"""Padded sizes of steps: a little padding for eager steps, few fixed sizes for recorded ones (``recorded_steps``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from bei.core import Limits, PackedBatch
from bei.engine.packing import Sizes, bucket, is_sized
from bei.engine.recorded_steps import equal_texts

# torch.export specializes sizes 0 and 1, so packages take at least two sequences.
LEAST_SEQUENCES = 2

# The limit for recorded steps: a larger step keeps the GPU busy for longer than its launches take.
_MOST_TOKENS = 1024
_LEAST_TOKENS = 16
# Filler sequences own tokens: with this room a text of a power of two fits into the step of that power.
_ROOM = 8
_SEQUENCES = (LEAST_SEQUENCES, 8, 32)

StepT = TypeVar("StepT")


def pads(inputs: Sequence[str]) -> bool:
    """True if a package with ``inputs`` pads its attention, so that its work grows with sequences times the longest."""
    return "pad_index" in inputs


def eager_sizes(batch: PackedBatch) -> Sizes:
    """Sizes as ``bei.engine.packing.graph_inputs`` chooses them, for at least two sequences; filler ones own a token
    each."""
    sequences = max(LEAST_SEQUENCES, bucket(batch.batch_size, min_step=1))
    tokens = bucket(batch.num_computed + sequences - batch.batch_size)
    return Sizes(tokens, sequences, bucket(int(np.diff(batch.cu_seqlens).max())))


def recorded_sizes(limits: Limits, inputs: Sequence[str]) -> list[Sizes]:
    """Sizes to record, the smallest steps first: they gain most. None where steps have dimensions beside them.

    Without padding, the longest sequence adds no cost, so that it may be as long as all tokens together.
    """
    if not is_sized(equal_texts(1, 1), inputs):
        return []
    found = []
    for tokens in _powers_of_two(_LEAST_TOKENS, min(_MOST_TOKENS, limits.max_num_tokens)):
        tokens += _ROOM
        most = min(tokens, bucket(limits.max_seq_len))
        for index, sequences in enumerate(_SEQUENCES):
            is_needed = index == 0 or limits.max_batch_size > _SEQUENCES[index - 1]
            if not is_needed or sequences > tokens // 2 or sequences * min(most, limits.max_seq_len) < tokens:
                continue
            usual = min(most, max(_LEAST_TOKENS, 2 * tokens // sequences))
            found += [Sizes(tokens, sequences, longest) for longest in ({usual, most} if pads(inputs) else {most})]
    return sorted(found, key=lambda sizes: _work(sizes, inputs))


def _powers_of_two(least: int, most: int) -> list[int]:
    return [1 << exponent for exponent in range(least.bit_length() - 1, most.bit_length())]


def smallest_fitting(
    recorded: Iterable[tuple[Sizes, StepT]], batch: PackedBatch, inputs: Sequence[str]
) -> StepT | None:
    """The step of least work among those that hold ``batch``; None if none does."""
    if not is_sized(batch, inputs):
        return None
    holding = [(_work(sizes, inputs), step) for sizes, step in recorded if sizes.holds(batch, inputs)]
    return min(holding, key=lambda one: one[0])[1] if holding else None


def _work(sizes: Sizes, inputs: Sequence[str]) -> int:
    """Estimated work of a step: its tokens, and its slots if attention is padded."""
    return sizes.tokens + sizes.sequences * (sizes.longest if pads(inputs) else 1)
