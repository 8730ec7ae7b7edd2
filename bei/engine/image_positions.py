"""Positions of patches in images of any proportions, by a table for a square of patches (SigLIP 2's NaFlex).

The table's rows are resized to the image's grid. That is linear: the position of a patch is a sum of the table's rows,
each times a share, and the graph multiplies the shares by the table.
"""

from __future__ import annotations

import functools

import numpy as np

from bei.core import Float32Array, PackedBatch

NAME = "position_shares_"
# Axes of grids whose shares are kept: at most MOST_PATCHES by ``side`` numbers each.
_MOST_KEPT = 128


def position_shares(side: int) -> str:
    """The name in ``bei.engine.packing.graph_inputs`` of shares of a table of ``side`` by ``side`` rows."""
    return f"{NAME}{side}"


def side_in(name: str) -> int | None:
    """The side in a name made by ``position_shares``; None: it is another name."""
    side = name.removeprefix(NAME)
    return int(side) if side != name and side.isdecimal() else None


def shares_of(side: int, batch: PackedBatch, size: int) -> Float32Array:
    """The shares of each token's patch, float32 [size, side * side]; zeros for filler, and without images."""
    found = np.zeros((size, side * side), np.float32)
    if batch.grids is not None:
        for start, (rows, columns) in zip(batch.cu_seqlens[:-1].tolist(), batch.grids.tolist(), strict=True):
            down, across = _of_axis(side, rows), _of_axis(side, columns)
            of_image = found[start : start + rows * columns].reshape(rows, columns, side, side)
            np.multiply(down[:, None, :, None], across[None, :, None, :], out=of_image)
    return found


@functools.lru_cache(_MOST_KEPT)
def _of_axis(side: int, count: int) -> Float32Array:
    """[count, side]: torch's ``interpolate`` of mode "bilinear" with antialias: a triangle as wide as ``side`` is
    larger, around the middle of each of ``count`` places."""
    scale = side / count
    centers = (np.arange(count) + 0.5) * scale - 0.5
    distances = np.abs(np.arange(side) - centers[:, None]) / max(scale, 1.0)
    weights = np.clip(1 - distances, 0, None)
    shares: Float32Array = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    return shares
