"""The engine's steps of a shard: a pure function of its lengths, so that a shard has the same bytes in every run."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from bei.core import Limits

# A step of so many tokens reaches an engine's rate; a larger one only takes more memory.
_STEP_TOKENS = 8192


def plan_steps(lengths: Seq[int], limits: Limits) -> list[list[int]]:
    """The places of the sequences that run together, for each step: neighbours in length, so that little is padded.

    Every place is in one step. Sequences longer than ``limits.max_num_tokens`` must not be among them.
    """
    most = min(limits.max_num_tokens, max(_STEP_TOKENS, limits.max_seq_len))
    steps: list[list[int]] = []
    room = 0
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if lengths[place] > room or len(steps[-1]) == limits.max_batch_size:
            steps.append([])
            room = most
        steps[-1].append(place)
        room -= lengths[place]
    return steps
