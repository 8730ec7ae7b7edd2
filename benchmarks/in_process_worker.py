"""The process of ``benchmarks.in_process`` that has a Model: embeds the texts of a file, says how long it took.

    python -m benchmarks.in_process_worker ARTIFACT TEXTS list|stream

TEXTS holds a JSON string a line. ``list``: one call of ``embed`` for all of them. ``stream``: ``embed_iter``, which
reads the file as it needs it, and whose vectors are dropped. Prints an object: when the call began and ended, on
time.monotonic's clock, the number of vectors, and the bytes of the result.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bei import Model

_WARM_INPUTS = 512


def main() -> None:
    """Embed, and print the object."""
    artifact, path, form = sys.argv[1:]
    with Model(artifact) as model:
        warm(model)
        texts = list(lines(Path(path))) if form == "list" else []
        began_s = time.monotonic()
        if form == "list":
            vectors = model.embed(texts)
            count, num_bytes = len(vectors), vectors.nbytes
        else:
            count, num_bytes = sum(len(chunk.results) for chunk in model.embed_iter(lines(Path(path)))), 0
        ended_s = time.monotonic()
    print(json.dumps({"began_s": began_s, "ended_s": ended_s, "count": count, "result_bytes": num_bytes}))


def lines(path: Path) -> Iterator[str]:
    """The texts, one after the other."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def warm(model: Model) -> None:
    """Run steps of many shapes without showing the tokenizer a word, as the engine alone has run them."""
    rng = random.Random(0)
    most = min(256, model.manifest.max_seq_len)
    model.embed([[rng.randrange(1000, 20_000) for _ in range(rng.randint(8, most))] for _ in range(_WARM_INPUTS)])


if __name__ == "__main__":
    main()
