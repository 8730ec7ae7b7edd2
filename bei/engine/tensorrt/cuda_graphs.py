"""Steps captured as CUDA graphs: the sizes to capture, and the choice for a batch.

For a small step the host takes longer to launch its kernels than the GPU to run them; a captured step is a single
launch of fixed sizes, to which batches are padded. The gain has not been measured yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from bei.artifact.manifest import PlanProfile
from bei.core import PackedBatch
from bei.engine.packing import Sizes

_LEAST_TOKENS = 16
# Memory limit on each stream for all captured sizes: an execution context each, and its kernels' parameters.
_MOST_GRAPHS = 48


@dataclass(frozen=True)
class CapturedStep:
    """A captured step of ``sizes``: ``executable`` launches it; ``context``, from which it was captured, must stay
    alive."""

    sizes: Sizes
    executable: Any
    context: Any


def planned_sizes(profile: PlanProfile) -> list[Sizes]:
    """Sizes to capture in ``profile``, the cheapest first: powers of two, with filler below half of each.

    Only sizes that a batch can need: the longest of B sequences with T tokens has T / B to T tokens.
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
    """Estimated work of a step: its tokens and its slots."""
    return sizes.tokens + sizes.sequences * sizes.longest


def cheapest_sizes(planned: Iterable[Sizes], batch: PackedBatch, inputs: Collection[str]) -> Sizes | None:
    """The planned sizes of least work that hold ``batch`` for a plan with ``inputs``; None if none do."""
    return min((sizes for sizes in planned if sizes.holds(batch, inputs)), key=_work, default=None)


def cheapest(steps: Iterable[CapturedStep], batch: PackedBatch, inputs: Collection[str]) -> CapturedStep | None:
    """The captured step of least work that holds ``batch`` for a plan with ``inputs``; None if none does."""
    holding = (step for step in steps if step.sizes.holds(batch, inputs))
    return min(holding, key=lambda step: _work(step.sizes), default=None)
