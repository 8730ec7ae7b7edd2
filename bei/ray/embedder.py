"""A class for ``map_batches`` of Ray Data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bei.offline.model import Model
from bei.offline.settings import ModelSettings

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing's, of Python 3.11

    from bei.offline.options import EmbedOptions


class Embedder:
    """Adds a column of vectors to batches, in an actor that keeps its engine.

        import ray
        from bei.ray import Embedder

        texts = ray.data.read_parquet("s3://bucket/corpus")
        vectors = texts.map_batches(
            Embedder, fn_constructor_kwargs={"model": "all-MiniLM-L6-v2"}, concurrency=4, batch_size=1024
        )

    The job is Ray Data's: what was done twice or not at all after a fault is as it says. ``bei embed --ray`` is done
    exactly once.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        column: str = "text",
        output_column: str = "embedding",
        settings: ModelSettings | None = None,
        **options: Unpack[EmbedOptions],
    ) -> None:
        """``model``: as for ``bei.Model``, on each node. ``column``: texts; ``output_column`` gets their vectors,
        float32 [n, width] unless ``options`` (those of ``Model.embed``) say otherwise. ``settings``: of the Model.

        Raises what ``bei.Model`` raises.
        """
        given: ModelSettings = {"tune": "off"}
        given.update(settings or {})
        self._model = Model(model, **given)
        self._column = column
        self._output_column = output_column
        self._options: Any = options

    def __call__(self, batch: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """``batch`` with the column of vectors. Raises InvalidRequestError for a text that is empty or null, and
        KeyError where there is no such column."""
        texts = np.asarray(batch[self._column]).tolist()
        return {**batch, self._output_column: self._model.embed(texts, **self._options)}
