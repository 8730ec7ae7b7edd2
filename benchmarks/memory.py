"""Resident memory of a server over 100,000 texts of random lengths.

    python -m benchmarks.memory [--texts 100000]

The figure is RSS at the end over RSS after the first 5,000 texts.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import psutil
from tokenizers import Tokenizer

from bei.artifact.manifest import TOKENIZER
from benchmarks.common import mixed_lengths, random_texts, write
from benchmarks.load import closed_loop, embeddings_body
from benchmarks.models import built, minilm_folder
from benchmarks.server import serving

_STEP = 5_000
_TEXTS_A_REQUEST = 32
_CONCURRENCY = 4


def main() -> None:
    """Measure and write ``results/memory.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=100_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        artifact = built(minilm_folder(), Path(scratch))
        tokenizer = Tokenizer.from_file(str(artifact.path / TOKENIZER))
        with serving(artifact.path) as (port, process):
            rss = [_rss_mb(process.pid)]
            for step in range(options.texts // _STEP):
                texts = random_texts(tokenizer, mixed_lengths(_STEP, artifact.manifest.max_seq_len, step), step)
                groups = [texts[start : start + _TEXTS_A_REQUEST] for start in range(0, _STEP, _TEXTS_A_REQUEST)]
                closed_loop(port, _CONCURRENCY, [embeddings_body(group) for group in groups])
                rss.append(_rss_mb(process.pid))
    write("memory", {"end / after 5,000 texts": round(rss[-1] / rss[1], 3), "RSS, MB, every 5,000 texts": rss})


def _rss_mb(pid: int) -> float:
    return round(float(psutil.Process(pid).memory_info().rss) / 1e6, 1)


if __name__ == "__main__":
    main()
