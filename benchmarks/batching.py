"""What it costs to cut batches from the requests in flight, and which way of cutting costs least. The engine alone.

    python -m benchmarks.batching [--repetitions 9]

MiniLM, 2,048 texts of mixed lengths in requests of 32 at concurrency 4: batches cut late or one ahead, from
requests whose longest text counts as the oldest or whose first does, each against batches cut from all texts at once.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from bei.core import Encoding, Engine, PackedBatch
from bei.engine.load import load_engine
from bei.scheduler.cost_measurement import measure as measure_costs
from benchmarks.common import alternate, batches_in_flight, mixed_lengths, ratio, seconds, sorted_batches, write
from benchmarks.models import built, minilm_folder

_TEXTS = 2048
_ALL_KNOWN = "all texts known"


def main() -> None:
    """Measure and write ``results/batching.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        artifact = built(minilm_folder(), Path(scratch))
        engine = load_engine(artifact.engine_dir, artifact.manifest)
        engine.warmup()
        limits = engine.info.limits
        rng = np.random.default_rng(0)
        lengths = mixed_lengths(_TEXTS, limits.max_seq_len, seed=1)
        encodings = [Encoding(rng.integers(1000, 20000, length, np.int32)) for length in lengths]
        costs = measure_costs(engine)
        batches = {_ALL_KNOWN: sorted_batches(encodings, limits, costs)} | {
            f"cut {'ahead' if num_ahead else 'late'}, {'longest' if longest_first else 'first'} text first": (
                batches_in_flight(encodings, limits, costs, 32, 4, num_ahead=num_ahead, longest_first=longest_first)
            )
            for num_ahead in (0, 1)
            for longest_first in (True, False)
        }
        texts_per_s = alternate(
            {name: partial(_rate, engine, cut) for name, cut in batches.items()}, options.repetitions
        )
    write(
        "batching",
        {
            "of the rate with all texts known": {
                name: ratio(texts_per_s, name, _ALL_KNOWN) for name in batches if name != _ALL_KNOWN
            },
            "batches": {name: len(cut) for name, cut in batches.items()},
            "texts/s": texts_per_s,
        },
    )


def _rate(engine: Engine, batches: list[PackedBatch]) -> float:
    return _TEXTS / seconds(lambda: [engine.run(batch) for batch in batches])


if __name__ == "__main__":
    main()
