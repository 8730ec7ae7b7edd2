"""``bei serve`` that also writes down the steps of its engine: a line of JSON each, tokens, texts, longest, seconds.

    BENCHMARK_STEPS=FILE python -m benchmarks.recorded serve ARTIFACT ...

Seconds are those that the server's own metrics count, of which /metrics has no more than sums.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bei.cli.main import main
from bei.metrics.registry import ModelMetrics
from bei.scheduler.cost_model import Sample

FILE = "BENCHMARK_STEPS"


def read_steps(path: Path, start: int) -> tuple[list[Sample], int]:
    """The steps from byte ``start`` of the file on, and where the next ones will begin."""
    with path.open("rb") as file:
        file.seek(start)
        content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    return [Sample(*json.loads(line)) for line in whole.splitlines()], start + len(whole)


def _record(path: Path) -> None:
    file = path.open("a", buffering=1)
    batch = ModelMetrics.batch

    def recorded(self: ModelMetrics, lengths: Sequence[int], *, engine_s: float, **others: Any) -> None:
        file.write(json.dumps([sum(lengths), len(lengths), max(lengths), engine_s]) + "\n")
        batch(self, lengths, engine_s=engine_s, **others)

    ModelMetrics.batch = recorded  # type: ignore[method-assign]


if __name__ == "__main__":
    _record(Path(os.environ[FILE]))
    main(sys.argv[1:])
