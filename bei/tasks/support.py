"""Shared by the tasks: the check that a model has one, and computation on rows off the event loop."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from bei.core import Float32Array, Row
from bei.errors import TaskNotSupportedError
from bei.service.service import InferenceService
from bei.utils.threads import off_loop

# More numbers are computed off the event loop: fewer take half a millisecond.
MANY_NUMBERS = 100_000

# What a model with a task can do, for messages.
PHRASES = {
    "embed": "embed",
    "embed_sparse": "make sparse embeddings",
    "embed_tokens": "embed tokens",
    "classify": "classify",
    "rerank": "rerank",
    "classify_tokens": "classify tokens",
}


def require(service: InferenceService, task: str) -> None:
    """Raise TaskNotSupportedError, naming what the model can do, unless it can do ``task``."""
    tasks = service.manifest.tasks
    if task not in tasks:
        raise TaskNotSupportedError(f"{service.name} cannot {PHRASES[task]}; it can do: {', '.join(tasks)}.", "model")


async def computed(
    rows: Seq[Row], output: str, function: Callable[[Float32Array], Float32Array] | None
) -> Float32Array:
    """``function`` of the ``output`` of all ``rows``, float32 [n, width]; None: as it is."""
    if len(rows) == 1:
        row = rows[0][output][None]
        return row if function is None else function(row)

    def work() -> Float32Array:
        stacked = np.stack([row[output] for row in rows])
        return stacked if function is None else function(stacked)

    return await off_loop(work) if len(rows) * rows[0][output].size > MANY_NUMBERS else work()
