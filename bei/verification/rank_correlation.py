"""Rank correlations in numpy: Spearman's rho and Kendall's tau-b, both with ties."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def average_ranks(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Ranks of ``values`` [n], from 1, as float64 [n]; equal values share the mean of their ranks."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: npt.NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[which.reshape(-1)]
    return ranks


def spearman(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> float:
    """Spearman's rho of two series of n values.

    A constant series has no order: two of them agree (1), a constant one and another do not (0).
    """
    sides = [average_ranks(values) for values in (first, second)]
    centred = [ranks - ranks.mean() for ranks in sides]
    return _share(float(centred[0] @ centred[1]), *(float(ranks @ ranks) for ranks in centred))


def kendall_tau(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> float:
    """Tau-b (Kendall, 1945) of two series of n values: concordant minus discordant pairs, divided by the geometric mean
    of the pairs that each series orders. Constant series: as in ``spearman``.

    Needs memory for n * n numbers.
    """
    signs = [np.sign(np.subtract.outer(values, values)).astype(np.float64) for values in (first, second)]
    return _share(float((signs[0] * signs[1]).sum()), *(float((sign * sign).sum()) for sign in signs))


def _share(product: float, first: float, second: float) -> float:
    if not first or not second:
        return float(first == second)
    # sqrt(x * x) would not be exactly x for equal factors.
    return product / first if first == second else product / float(np.sqrt(first) * np.sqrt(second))
