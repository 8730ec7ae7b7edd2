"""Batches that a device has no memory for are run in halves."""

from __future__ import annotations

import numpy as np
import pytest

from bei.core import Encoding, ImagePatches, LabelVectors, PackedBatch
from bei.engine.cuda.batch_split import halves


def _labels(batch: PackedBatch) -> list[list[list[float]]]:
    if batch.labels is None:
        return []
    rows, starts, counts = batch.labels
    return [rows[start : start + count].tolist() for start, count in zip(starts, counts, strict=True)]


@pytest.mark.parametrize("reads_images", [False, True])
def test_halves_of_a_batch_have_every_field_of_its_sequences(reads_images: bool) -> None:
    rng = np.random.default_rng(0)
    encodings = [
        Encoding(
            rng.integers(0, 50, length).astype(np.int32),
            token_type_ids=rng.integers(0, 2, length).astype(np.int32),
            num_keys=length - 1,
            num_unpooled=1,
            adapter=length % 3,
            image=ImagePatches(rng.integers(0, 255, (length, 12), np.uint8), bytes([length]), (1, length))
            if reads_images
            else None,
            label_vectors=None if reads_images else LabelVectors(rng.random((length, 4), np.float32), bytes([length])),
        )
        for length in (5, 2, 7, 3)
    ]
    parts = halves(PackedBatch.from_encodings(encodings))
    cut = parts[0].batch_size
    assert 0 < cut < 4
    assert bool(_labels(parts[0])) != reads_images
    for part, some in zip(parts, (encodings[:cut], encodings[cut:]), strict=True):
        wanted = PackedBatch.from_encodings(some)
        assert _labels(part) == _labels(wanted)
        for field in PackedBatch._fields:
            if field not in ("labels", "shared"):
                one, other = getattr(part, field), getattr(wanted, field)
                assert (one is None) == (other is None), field
                assert other is None or np.array_equal(one, other), field
