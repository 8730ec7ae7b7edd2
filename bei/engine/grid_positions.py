"""Positions of tokens on three axes: time, rows and columns of images (M-RoPE of Qwen2-VL, arXiv:2409.12191, section
2.1), and rows and columns of patches in their image.

A text's tokens have their place in the sequence on all three. The tokens of an image in a decoder's sequence have one
time, the place of the first of them, and count rows and columns from there; what is behind them goes on from the
largest of these.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from bei.core import Int32Array, PackedBatch

_NAMES = ("time_ids", "row_ids", "column_ids")
_OF_PATCHES = "_of_blocks_"


def axis_ids(axis: int, side: int | None) -> str:
    """The name in ``bei.engine.packing.graph_inputs`` of tokens' positions on ``axis`` (0 time, 1 rows, 2 columns);
    with ``side`` of patches, which are in order of blocks of ``side`` patches a side."""
    return _NAMES[axis] if side is None else f"{_NAMES[axis]}{_OF_PATCHES}{side}"


def is_axis(name: str) -> bool:
    """True for a name made by ``axis_ids``."""
    return name.startswith(_NAMES)


def axis_inputs(names: Collection[str], batch: PackedBatch, position_ids: Int32Array) -> dict[str, Int32Array]:
    """The tensors of ``names`` that are such positions, as long as ``position_ids`` of the packed tokens."""
    wanted = [name for name in names if is_axis(name)]
    if not wanted:
        return {}
    _, _, side = wanted[0].partition(_OF_PATCHES)
    found = _of_patches(int(side), batch, len(position_ids)) if side else _of_tokens(batch, position_ids)
    return {name: found[_NAMES.index(name.partition(_OF_PATCHES)[0])] for name in wanted}


def _of_tokens(batch: PackedBatch, position_ids: Int32Array) -> Int32Array:
    """[3, T'] of sequences of texts and images."""
    found = np.stack([position_ids] * 3)
    if batch.features is None:
        return found
    # From the last one on: what stands behind an image in its sequence moves with the place of the image.
    for first, rows, columns in batch.features.spans[::-1].tolist():
        behind, end = first + rows * columns, batch.cu_seqlens[np.searchsorted(batch.cu_seqlens, first, "right")]
        start = position_ids[first]
        found[:, behind:end] -= rows * columns - max(rows, columns)
        found[0, first:behind] = start
        found[1:, first:behind] = start + places_in_blocks(rows, columns, 1)
    return found


def _of_patches(side: int, batch: PackedBatch, size: int) -> Int32Array:
    """[3, size] of images' patches; zeros for filler, and without images."""
    found = np.zeros((3, size), np.int32)
    if batch.grids is not None:
        for start, (rows, columns) in zip(batch.cu_seqlens[:-1].tolist(), batch.grids.tolist(), strict=True):
            found[1:, start : start + rows * columns] = places_in_blocks(rows, columns, side)
    return found


def places_in_blocks(rows: int, columns: int, side: int) -> Int32Array:
    """The row and the column of each of ``rows`` times ``columns`` places, [2, n], block by block of ``side`` by
    ``side``."""
    places = np.indices((rows, columns), np.int32)
    blocks = places.reshape(2, rows // side, side, columns // side, side).transpose(0, 1, 3, 2, 4)
    ordered: Int32Array = np.ascontiguousarray(blocks).reshape(2, -1)
    return ordered
