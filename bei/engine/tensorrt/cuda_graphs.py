"""Steps recorded once and launched as a whole: which sizes are worth it, and which of them a batch gets.

A small step takes the GPU less time than the host takes to launch its kernels one by one; a recorded one is launched in
one call. It is of fixed sizes, so a batch is filled up to the nearest. What that gains has not been measured yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bei.artifact.manifest import PlanProfile
from bei.core import PackedBatch
from bei.engine.packing import Sizes

_LEAST_TOKENS = 16
# Of all sizes together, on each stream: an execution context each, and its kernels' parameters.
_MOST_GRAPHS = 48


@dataclass(frozen=True)
class CapturedStep:
    """A step of ``sizes``: ``executable`` launches it. ``context``: what it was recorded from, and needs."""

    sizes: Sizes
    executable: Any
    context: Any


def planned_sizes(profile: PlanProfile) -> list[Sizes]:
    """Sizes to record in ``profile``, the cheapest first: powers of two, filler less than half of each.

    Only what a batch can need: the longest of B sequences with T tokens has no more than T and no less than T / B.
    """
    tokens_least, _, tokens_most = profile.tokens
    sizes = [
        Sizes(tokens, sequences, longest)
        for tokens in _powers_of_two(max(_LEAST_TOKENS, tokens_least), tokens_most)
        for sequences in _powers_of_two(profile.sequences[0], profile.sequences[2])
        for longest in _powers_of_two(max(_LEAST_TOKENS, profile.longest[0]), min(tokens, profile.longest[2]))
        if sequences * longest >= tokens >= sequences
    ]
    return sorted(sizes, key=_work)[:_MOST_GRAPHS]


def _powers_of_two(least: int, most: int) -> list[int]:
    return [power for power in (1 << exponent for exponent in range(20)) if least <= power <= most]


def _work(sizes: Sizes) -> int:
    """About what a step computes: its tokens and its slots."""
    return sizes.tokens + sizes.sequences * sizes.longest


def cheapest_sizes(planned: Iterable[Sizes], batch: PackedBatch) -> Sizes | None:
    """Those of the least work that hold ``batch``; None where none do."""
    return min((sizes for sizes in planned if sizes.holds(batch)), key=_work, default=None)


def cheapest(steps: Iterable[CapturedStep], batch: PackedBatch) -> CapturedStep | None:
    """The step of the least work that holds ``batch``; None where none does."""
    return min((step for step in steps if step.sizes.holds(batch)), key=lambda step: _work(step.sizes), default=None)
