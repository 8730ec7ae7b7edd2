"""Positions on three axes: transformers' own counts, for sequences of every composition in one step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.vision_utils import get_vision_position_ids

from bei.core import Encoding, ImageFeatures, ImagePatches, Int32Array, PackedBatch
from bei.engine.grid_positions import axis_ids
from bei.engine.packing import can_share, graph_inputs, why_unshared

IMAGE = 9
NAMES = [axis_ids(axis, None) for axis in range(3)]


def image(rows: int, columns: int, before: int, after: int) -> Encoding:
    """An image of so many tokens, between others."""
    count = rows * columns
    ids = np.array([1] * before + [IMAGE] * count + [2] * after, np.int32)
    places = np.arange(before, before + count, dtype=np.int32)
    states = np.zeros((count, 4), np.float32)
    return Encoding(ids, features=(ImageFeatures(states, f"{rows} {columns}".encode(), places, (rows, columns)),))


def several(*grids: tuple[int, int]) -> Encoding:
    """Images of so many tokens, two or none before, between and behind them."""
    ids, features = [1, 1], []
    for number, (rows, columns) in enumerate(grids):
        places = np.arange(len(ids), len(ids) + rows * columns, dtype=np.int32)
        digest = f"{rows} {columns}".encode()
        features.append(ImageFeatures(np.zeros((rows * columns, 4), np.float32), digest, places, (rows, columns)))
        ids += [IMAGE] * (rows * columns) + [2, 2] * (number != len(grids) - 1)
    return Encoding(np.array(ids, np.int32), features=(*features,))


def text(count: int) -> Encoding:
    return Encoding(np.full(count, 3, np.int32))


@pytest.fixture(scope="module")
def library() -> Any:
    config = transformers.Qwen2VLConfig(
        text_config={
            **{"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
            **{"num_attention_heads": 2, "num_key_value_heads": 1},
        },
        vision_config={"embed_dim": 16, "depth": 1, "num_heads": 2, "hidden_size": 16, "spatial_merge_size": 1},
        image_token_id=IMAGE,
    )
    return transformers.Qwen2VLModel(config)


def theirs(library: Any, encoding: Encoding) -> Int32Array:
    """[3, tokens], one sequence at a time."""
    ids = torch.from_numpy(encoding.input_ids.astype(np.int64))[None]
    if not encoding.features:
        return np.stack([np.arange(encoding.num_tokens, dtype=np.int32)] * 3)
    grid = torch.tensor([[1, *one.grid] for one in encoding.features])
    found, _ = library.get_rope_index(ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=grid)
    positions: Int32Array = found[:, 0].numpy().astype(np.int32)
    return positions


@pytest.mark.parametrize(
    "encodings",
    [
        [image(3, 5, 4, 6)],
        [text(7), image(1, 1, 0, 0), image(6, 2, 1, 3), text(1), image(2, 9, 5, 1)],
        [image(1, 20, 3, 2), image(20, 1, 3, 2)],
        [text(5), text(2)],
        [several((2, 3), (4, 2)), text(3), several((1, 1), (3, 3), (2, 5)), image(2, 2, 1, 1)],
    ],
    ids=["image", "mixed", "stripes", "texts", "several"],
)
def test_positions_are_those_of_the_librarys_model(encodings: list[Encoding], library: Any) -> None:
    found = graph_inputs(PackedBatch.from_encodings(encodings), NAMES)
    expected = np.concatenate([theirs(library, encoding) for encoding in encodings], axis=1)
    for name, axis in zip(NAMES, expected, strict=True):
        np.testing.assert_array_equal(found[name][: expected.shape[1]], axis)
        assert not found[name][expected.shape[1] :].any()


def test_part_of_a_batch_keeps_its_positions(library: Any) -> None:
    encodings = [text(4), image(2, 3, 1, 2), image(3, 3, 2, 1)]
    batch = PackedBatch.from_encodings(encodings)
    assert batch.features is not None
    start = int(batch.cu_seqlens[2])
    own = batch.features.part(slice(start, batch.num_tokens))
    rest = PackedBatch(batch.input_ids[start:], batch.cu_seqlens[2:] - start, features=own)
    expected = theirs(library, encodings[2])
    found = graph_inputs(rest, NAMES)
    for name, axis in zip(NAMES, expected, strict=True):
        np.testing.assert_array_equal(found[name][: len(axis)], axis)


@pytest.mark.parametrize("side", [1, 2])
def test_patches_are_counted_as_by_the_library_block_by_block(side: int) -> None:
    grids = [(4, 6), (2, 2), (2, 10)]
    encodings = []
    for rows, columns in grids:
        levels = np.zeros((rows * columns, 3), np.uint8)
        encodings.append(Encoding(np.zeros(len(levels), np.int32), image=ImagePatches(levels, b"", (rows, columns))))
    names = [axis_ids(axis, side) for axis in (1, 2)]
    found = graph_inputs(PackedBatch.from_encodings(encodings), names)
    expected = get_vision_position_ids(torch.tensor([[1, *grid] for grid in grids]), side).numpy().T
    for name, axis in zip(names, expected, strict=True):
        np.testing.assert_array_equal(found[name][: len(axis)], axis)


def test_tokens_of_images_are_never_shared() -> None:
    """Their ids are equal, and their states are not."""
    names = ["input_ids", "pad_index", "feature_slots", "image_features_4", *NAMES]
    assert not can_share(names)
    assert "images" in (why_unshared(names, is_causal=True) or "")
