"""By how much a low-rank adapter (LoRA, arXiv:2106.09685) changes the weights."""

from __future__ import annotations

import msgspec


class AdapterScale(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The factor of the product of an adapter's two matrices: ``alpha`` / ``rank``, or alpha / sqrt(rank) where it is
    rank-stabilized (rsLoRA, arXiv:2312.03732). ``rank_pattern`` and ``alpha_pattern``: of modules whose names end so.

    Other kinds (DoRA) are not built."""

    rank: int
    alpha: float
    is_rank_stabilized: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}

    def __str__(self) -> str:
        """In a line: ``alpha / sqrt(rank) = 32 / sqrt(16) = 8``."""
        root, scale = ("sqrt", self.alpha / self.rank**0.5) if self.is_rank_stabilized else ("", self.alpha / self.rank)
        others = len({*self.rank_pattern, *self.alpha_pattern})
        return f"alpha / {root}(rank) = {self.alpha:g} / {root}({self.rank}) = {scale:g}" + (
            f", and {others} patterns of modules have their own" if others else ""
        )
