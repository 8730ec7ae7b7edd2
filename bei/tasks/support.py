"""Shared by the tasks: the check that a model has one, the outcome of inputs, and computation off the event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import TypeVar

import msgspec
import numpy as np

from bei.core import Float32Array, Row
from bei.errors import BeiError, TaskNotSupportedError
from bei.service.model_service import ModelService
from bei.tokenizer.adapters import check_named
from bei.tokenizer.encoder import EncodingOptions, TextEncoder
from bei.utils.threads import off_loop

T = TypeVar("T")

# More numbers are computed off the event loop: fewer take half a millisecond.
_MANY_NUMBERS = 100_000

_ALONE = EncodingOptions(truncate=True, add_special_tokens=False)

# What a model with a task can do, for messages.
PHRASES = {
    "embed": "embed",
    "embed_sparse": "make sparse embeddings",
    "embed_tokens": "embed tokens",
    "classify": "classify",
    "rerank": "rerank",
    "classify_tokens": "classify tokens",
    "extract": "extract spans",
    "decide": "decide",
    "zero_shot": "score labels of a request",
}


# By task, and what a model without it can do: how it is asked for something like it.
_INSTEAD = {
    ("rerank", "embed"): ' /v1/rerank with score_mode "dense" compares its vectors.',
    ("embed_tokens", "embed"): " 'bei build --token-embeddings' makes an artifact that can.",
}


class PartialResult(msgspec.Struct, frozen=True):
    """A task's result, some of whose inputs may have an error in its place.

    ``lengths``: the tokens of each input. ``truncated``: the places of inputs that were cut. ``errors``: of inputs, by
    their places, where the request asked for a partial answer (``ModelRequest.failed``).
    """

    lengths: Seq[int]
    truncated: list[int]
    errors: Mapping[int, BeiError] = msgspec.field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens of all inputs, special tokens included."""
        return sum(self.lengths)


def has_task(service: ModelService, task: str) -> bool:
    """True if the model may have ``task``: labels of a request are scored by some classifiers too (``zero_shot``)."""
    tasks = service.manifest.tasks
    return task in tasks or (task == "zero_shot" and "classify" in tasks)


def require(service: ModelService, task: str) -> None:
    """Raise TaskNotSupportedError, naming what the model can do, unless it can do ``task``."""
    tasks = service.manifest.tasks
    if not has_task(service, task):
        instead = "".join(_INSTEAD.get((task, one), "") for one in tasks)
        message = f"{service.name} cannot {PHRASES[task]}; it can do: {', '.join(tasks)}.{instead}"
        raise TaskNotSupportedError(message, "model")
    if not task.startswith("embed") and not service.adapter:  # vectors may name theirs: ``embed.check_task``
        check_named(service.manifest)


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

    return await off_loop_if_large(work, len(rows) * rows[0][output].size)


async def off_loop_if_large(work: Callable[[], T], num_numbers: int) -> T:
    """The result of ``work``, which makes ``num_numbers`` numbers: of many in a thread."""
    return await off_loop(work) if num_numbers > _MANY_NUMBERS else work()


def token_keys(encoder: TextEncoder, texts: Seq[str], options: EncodingOptions = _ALONE) -> list[bytes]:
    """The tokens of each of ``texts``, which are not cut before the model's limit, to be compared."""
    return [encoding.input_ids.tobytes() for encoding in encoder.encode(texts, options)]
