"""Samples of layers' inputs, by which scales are chosen."""

from __future__ import annotations

from collections.abc import Set
from typing import cast

import numpy as np
import pytest

from bei.core import Encoding, Engine, Outputs, PackedBatch
from bei_build.quantization.activation_stats import collect_stats

NUM_TOKENS = 21


class Places:
    """Each token's input is its place in its text."""

    def run(self, batch: PackedBatch, outputs: Set[str] | None = None) -> Outputs:
        rows = np.repeat(np.arange(batch.num_tokens, dtype=np.float32)[:, None], 4, axis=1)
        return dict.fromkeys(outputs or (), rows)


@pytest.mark.parametrize("num_texts", [1, 16, 128, 384, 1000])
def test_most_samples_are_tokens_between_the_ends_however_many_texts_there_are(num_texts: int) -> None:
    texts = [Encoding(np.zeros(NUM_TOKENS, np.int32))] * num_texts
    found = collect_stats(cast(Engine, Places()), texts, {"group": 4}, seed=0)["group"]
    assert len(found.sample) == min(768, num_texts * NUM_TOKENS)
    assert np.isin(found.sample[:, 0], (0, NUM_TOKENS - 1)).mean() <= 1 / 3
    np.testing.assert_array_equal(found.channel_amax, np.full(4, NUM_TOKENS - 1, np.float32))
