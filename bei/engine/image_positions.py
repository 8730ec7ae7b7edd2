"""Positions of patches in images of any proportions, by a table for a square of patches (SigLIP 2's NaFlex, Qwen3-VL).

The table's rows are resized to the image's grid. That is linear: the position of a patch is a sum of the table's rows,
each times a share, and the graph multiplies the shares by the table.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from bei.core import Float32Array, PackedBatch
from bei.engine.grid_positions import places_in_blocks

NAME = "position_shares_"
_ALIGNED = "_aligned_"
# Axes of grids whose shares are kept: at most MOST_PATCHES by ``side`` numbers each.
_MOST_KEPT = 128


class Shares(NamedTuple):
    """Of a table of ``side`` by ``side`` rows, for patches in order of blocks of ``block_side`` patches a side.
    ``aligned``: the first and the last patch of a row have the first and the last row of the table, without antialias
    (Qwen3-VL); else patches are as wide as their part of the table, with antialias (SigLIP 2)."""

    side: int
    aligned: bool = False
    block_side: int = 1

    @property
    def name(self) -> str:
        """In ``bei.engine.packing.graph_inputs``."""
        return f"{NAME}{self.side}{f'{_ALIGNED}{self.block_side}' if self.aligned else ''}"

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return self.side**2


def shares_in(name: str) -> Shares | None:
    """What ``name`` is of; None: it is another name."""
    side, _, block_side = name.removeprefix(NAME).partition(_ALIGNED)
    if not name.startswith(NAME) or not side.isdecimal():
        return None
    return Shares(int(side), True, int(block_side)) if block_side else Shares(int(side))


def shares_of(shares: Shares, batch: PackedBatch, size: int) -> Float32Array:
    """The shares of each token's patch, float32 [size, side * side]; zeros for filler, and without images."""
    side = shares.side
    found = np.zeros((size, shares.num_rows), np.float32)
    if batch.grids is not None:
        for start, (rows, columns) in zip(batch.cu_seqlens[:-1].tolist(), batch.grids.tolist(), strict=True):
            down, across = (_of_axis(side, count, shares.aligned) for count in (rows, columns))
            row, column = places_in_blocks(rows, columns, shares.block_side)
            of_image = found[start : start + rows * columns].reshape(-1, side, side)
            np.multiply(down[row][:, :, None], across[column][:, None, :], out=of_image)
    return found


@functools.lru_cache(_MOST_KEPT)
def _of_axis(side: int, count: int, aligned: bool) -> Float32Array:
    """[count, side]: torch's ``interpolate`` of mode "bilinear", ``aligned`` or with antialias: a triangle as wide as
    ``side`` is larger, around the middle of each of ``count`` places."""
    if aligned:
        sources = np.arange(count, dtype=np.float32) * np.float32(side - 1) / np.float32(max(count - 1, 1))
        near: Float32Array = np.clip(1 - np.abs(np.arange(side, dtype=np.float32) - sources[:, None]), 0, None)
        return near
    scale = side / count
    centers = (np.arange(count) + 0.5) * scale - 0.5
    distances = np.abs(np.arange(side) - centers[:, None]) / max(scale, 1.0)
    weights = np.clip(1 - distances, 0, None)
    shares: Float32Array = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    return shares
