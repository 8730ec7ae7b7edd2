"""Windows of images: those of transformers, for images of any grid in one step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.vision_utils import get_vision_window_index

from bei.core import Encoding, ImagePatches, PackedBatch
from bei.engine.grid_windows import Windows
from bei.engine.packing import graph_inputs

GRIDS = [(2, 2), (2, 30), (34, 2), (8, 8), (16, 24), (10, 14), (18, 2), (62, 44), (6, 6)]


def image(rows: int, columns: int) -> Encoding:
    count = rows * columns
    patches = ImagePatches(np.zeros((count, 3), np.uint8), f"{rows} {columns}".encode(), (rows, columns))
    return Encoding(np.zeros(count, np.int32), image=patches)


def theirs(side: int) -> list[frozenset[int]]:
    """The patches of each window, by transformers."""
    grids = torch.tensor([[1, *grid] for grid in GRIDS])
    index, starts = get_vision_window_index(grids, 2, side * 2 * 14, 14)
    order = (index[:, None] * 4 + torch.arange(4)).flatten().tolist()
    return [frozenset(order[first:end]) for first, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]


@pytest.mark.parametrize("side", [1, 2, 4, 7])
def test_windows_are_those_of_transformers(side: int) -> None:
    windows = Windows(side, 2)
    batch = PackedBatch.from_encodings([image(*grid) for grid in GRIDS])
    names = [windows.pad_index, windows.slot_mask, windows.unpad_index]
    pads, mask, unpads = graph_inputs(batch, names).values()
    expected = theirs(side)
    assert mask.sum() == batch.num_tokens + len(mask) - len(expected)  # filler windows have a token each
    found = [frozenset(row[own > 0].tolist()) for row, own in zip(pads, mask, strict=True)][: len(expected)]
    assert set(found) == set(expected)
    np.testing.assert_array_equal(pads.reshape(-1)[unpads[: batch.num_tokens]], np.arange(batch.num_tokens))
    assert (mask.sum(1) > 0).all()  # else a softmax would have no key
    assert pads.max() < batch.num_tokens


def test_sequences_without_images_have_windows_too() -> None:
    """Measurements and warm-up have no pixels."""
    windows = Windows(2, 2)
    batch = PackedBatch.from_encodings([Encoding(np.zeros(count, np.int32)) for count in (1, 16, 37)])
    pads, mask = graph_inputs(batch, [windows.pad_index, windows.slot_mask]).values()
    assert [int(count) for count in mask.sum(1)][:5] == [1, 16, 16, 16, 5]
    assert pads[4].tolist() == [49, 50, 51, 52, 53] + [53] * 11
