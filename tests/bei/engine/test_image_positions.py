"""Shares of a position table: torch's resizing of it, for images of many grids in one step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bei.core import PackedBatch
from bei.engine.image_positions import Shares, shares_in
from bei.engine.packing import graph_inputs

GRIDS = [(16, 16), (1, 200), (31, 8), (3, 3), (40, 1), (16, 7)]


def batch_of(grids: list[tuple[int, int]]) -> PackedBatch:
    lengths = [rows * columns for rows, columns in grids]
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    return PackedBatch(np.zeros(cu_seqlens[-1], np.int32), cu_seqlens, grids=np.array(grids, np.int32))


@pytest.mark.parametrize("side", [16, 4])
def test_the_table_is_resized_as_by_torch(side: int) -> None:
    table = np.random.default_rng(0).normal(size=(side * side, 3)).astype(np.float32)
    square = torch.from_numpy(table).reshape(1, side, side, 3).permute(0, 3, 1, 2)
    batch, name = batch_of(GRIDS), Shares(side).name
    shares = graph_inputs(batch, [name])[name]
    found = np.split(shares[: batch.num_tokens] @ table, batch.cu_seqlens[1:-1])
    for grid, rows in zip(GRIDS, found, strict=True):
        resized = torch.nn.functional.interpolate(square, size=grid, mode="bilinear", antialias=True)
        expected = resized.permute(0, 2, 3, 1).reshape(-1, 3).numpy()
        np.testing.assert_allclose(rows, expected, atol=2e-5, err_msg=str(grid))
    assert not shares[batch.num_tokens :].any()


def test_a_batch_without_images_has_no_shares() -> None:
    name = Shares(4).name
    batch = PackedBatch(np.zeros(3, np.int32), np.array([0, 3], np.int32))
    assert not graph_inputs(batch, [name])[name].any()


def test_names() -> None:
    assert shares_in(Shares(16).name) == Shares(16)
    assert shares_in(Shares(48, True, 2).name) == Shares(48, True, 2)
    assert shares_in("position_ids") is None
    assert shares_in("position_shares_x") is None
