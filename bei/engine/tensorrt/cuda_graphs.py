"""Steps captured as CUDA graphs (``recorded_steps``): the sizes to capture, and the choice for a batch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from bei.artifact.manifest import PlanProfile
from bei.core import PackedBatch
from bei.engine.packing import Sizes, is_sized
from bei.engine.recorded_steps import equal_texts

_LEAST_TOKENS = 16


@dataclass(frozen=True)
class CapturedStep:
    """A captured step of ``sizes``: ``executable`` launches it; ``context``, from which it was captured, must stay
    alive."""

    sizes: Sizes
    executable: Any
    context: Any


def planned_sizes(profile: PlanProfile, max_seq_len: int, inputs: Collection[str] = ()) -> list[Sizes]:
    """Sizes to capture in ``profile``, the cheapest first: powers of two of tokens, with filler below half of each.
    None where steps of ``inputs`` have dimensions beside them.

    They are few, since TensorRT needs an execution context, and seconds of warm-up, for each on every stream: one
    sequence (or the fewest), and the most; of their lengths twice the mean, and all that there can be. Sequences of
    ``max_seq_len`` tokens can fill each.
    """
    if not is_sized(equal_texts(1, 1), inputs):
        return []
    tokens_least, _, tokens_most = profile.tokens
    of_sequences = _powers_of_two(profile.sequences[0], profile.sequences[2])
    found = set()
    for tokens in _powers_of_two(max(_LEAST_TOKENS, tokens_least), tokens_most):
        lengths = _powers_of_two(max(_LEAST_TOKENS, profile.longest[0]), min(tokens, profile.longest[2]))
        for sequences in {of_sequences[0], of_sequences[-1]} if of_sequences else ():
            holding = [longest for longest in lengths if sequences * min(longest, max_seq_len) >= tokens >= sequences]
            usual = [longest for longest in holding if longest * sequences >= 2 * tokens][:1]
            found |= {Sizes(tokens, sequences, longest) for longest in (*usual, *holding[-1:])}
    return sorted(found, key=_work)


def _powers_of_two(least: int, most: int) -> list[int]:
    return [power for power in (1 << exponent for exponent in range(20)) if least <= power <= most]


def _work(sizes: Sizes) -> int:
    """Estimated work of a step: its tokens and its slots."""
    return sizes.tokens + sizes.sequences * sizes.longest


def cheapest_sizes(planned: Iterable[Sizes], batch: PackedBatch, inputs: Collection[str]) -> Sizes | None:
    """The planned sizes of least work that hold ``batch`` for a plan with ``inputs``; None if none do."""
    if not is_sized(batch, inputs):
        return None
    return min((sizes for sizes in planned if sizes.holds(batch, inputs)), key=_work, default=None)


def cheapest(steps: Iterable[CapturedStep], batch: PackedBatch, inputs: Collection[str]) -> CapturedStep | None:
    """The captured step of least work that holds ``batch`` for a plan with ``inputs``; None if none does."""
    if not is_sized(batch, inputs):
        return None
    holding = (step for step in steps if step.sizes.holds(batch, inputs))
    return min(holding, key=lambda step: _work(step.sizes), default=None)
