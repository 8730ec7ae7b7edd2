"""Windows of images: squares of patches that attend to each other alone (Qwen2.5-VL, arXiv:2502.13923, section 2.1.1).

The grid of an image is cut into windows from its first row and column on; those at its ends may be smaller. Patches
keep their order: tensors of indices gather each window's, and put their results back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from bei.core import Float32Array, Int32Array, PackedBatch

_START = "image_window_"
_OF_BLOCKS = "_of_blocks_"
_PAD, _MASK, _UNPAD = "pad_index", "slot_mask", "unpad_index"
# Grids whose windows are kept, of up to 64 kB each.
_MOST_KEPT = 128


class Windows(NamedTuple):
    """Of ``side`` blocks a side, each of ``block_side`` patches a side; patches come block by block."""

    side: int
    block_side: int

    @property
    def num_patches(self) -> int:
        """Of a whole window."""
        return (self.side * self.block_side) ** 2

    @property
    def pad_index(self) -> str:
        """The name in ``bei.engine.packing.graph_inputs`` of the patch in each slot of each window, int32 [W', V'];
        slots behind a window's patches repeat its last one."""
        return self._name(_PAD)

    @property
    def slot_mask(self) -> str:
        """The name of float32 [W', V']: 1 where a slot holds a patch of its window, else 0."""
        return self._name(_MASK)

    @property
    def unpad_index(self) -> str:
        """The name of each patch's slot among those of all windows, W' * V', int32 [T']."""
        return self._name(_UNPAD)

    def _name(self, part: str) -> str:
        return f"{_START}{part}_{self.side}{_OF_BLOCKS}{self.block_side}"


def is_window(name: str) -> bool:
    """True for a name of one of the tensors of windows."""
    return name.startswith(_START)


def windows_of(name: str) -> Windows:
    """Those that such a name is of."""
    side, _, block_side = name.rpartition(_OF_BLOCKS)
    return Windows(int(side.rpartition("_")[2]), int(block_side))


def window_inputs(
    names: Collection[str], batch: PackedBatch, size: int, fits: Callable[[int], int]
) -> dict[str, Int32Array | Float32Array]:
    """The tensors of ``names`` that are of windows, for T' = ``size`` tokens; ``fits`` rounds W' and V' up. Filler
    windows have one patch, token 0; filler tokens have slot 0."""
    wanted = [name for name in names if is_window(name)]
    if not wanted:
        return {}
    windows = windows_of(wanted[0])
    numbers = _numbers(windows, batch)
    order, counts = np.argsort(numbers, kind="stable"), np.bincount(numbers)
    starts = np.cumsum(counts) - counts
    num_windows, width = fits(len(counts)), fits(int(counts.max()))
    slots = np.minimum(np.arange(width), counts[:, None] - 1)
    pad_index = np.zeros((num_windows, width), np.int32)
    pad_index[: len(counts)] = order[starts[:, None] + slots]
    slot_mask = np.zeros((num_windows, width), np.float32)
    slot_mask[: len(counts)] = np.arange(width) < counts[:, None]
    slot_mask[len(counts) :, 0] = 1.0
    unpad_index = np.zeros(size, np.int32)
    own = numbers[order]
    unpad_index[order] = own * width + np.arange(len(order)) - starts[own]
    found: dict[str, Int32Array | Float32Array] = {
        windows.pad_index: pad_index,
        windows.slot_mask: slot_mask,
        windows.unpad_index: unpad_index,
    }
    return {name: found[name] for name in wanted}


def _numbers(windows: Windows, batch: PackedBatch) -> Int32Array:
    """The number of each token's window, which count on from image to image. Of sequences without images, which
    measurements have, runs of tokens that are as long as a window."""
    found, first = np.zeros(batch.num_tokens, np.int32), 0
    for index, (start, end) in enumerate(pairwise(batch.cu_seqlens.tolist())):
        if batch.grids is None:
            own: Int32Array = np.arange(end - start, dtype=np.int32) // np.int32(windows.num_patches)
        else:
            rows, columns = batch.grids[index].tolist()
            own = _of_grid(windows, rows, columns)
        found[start:end] = first + own
        first += int(own.max()) + 1
    return found


@functools.lru_cache(_MOST_KEPT)
def _of_grid(windows: Windows, rows: int, columns: int) -> Int32Array:
    """The number of the window of each of ``rows`` times ``columns`` patches, block by block."""
    down, across = (np.arange(count // windows.block_side, dtype=np.int32) // windows.side for count in (rows, columns))
    of_blocks = down[:, None] * (across[-1] + 1) + across
    return np.repeat(of_blocks.reshape(-1), windows.block_side**2)
