"""The engine without a server: what HTTP is measured against."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from bei.core import Engine, PackedBatch
from bei.tokenizer.encoder import TextEncoder
from benchmarks.common import seconds


def engine_rate(engine: Engine, batches: Sequence[PackedBatch], num_texts: int) -> float:
    """Texts a second with every stream of the engine busy."""
    with ThreadPoolExecutor(engine.info.num_streams) as streams:
        return num_texts / seconds(lambda: list(streams.map(engine.run, batches)))


def engine_latency_ms(engine: Engine, encoder: TextEncoder, texts: Sequence[str]) -> float:
    """Median of single texts, one after the other."""
    batches = [PackedBatch.from_encodings([encoding]) for encoding in encoder.encode(texts)]
    return statistics.median(seconds(partial(engine.run, batch)) for batch in batches) * 1e3
