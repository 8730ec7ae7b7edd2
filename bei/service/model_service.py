"""A model as the tasks see it, and what both kinds of service have."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from functools import cached_property
from typing import Protocol

from bei.artifact.manifest import Manifest
from bei.config.settings import ServeConfig
from bei.core import Encoding
from bei.service.admission import Ticket
from bei.service.call import InferenceResult, ModelRequest, Reduce
from bei.service.readers import InputReaders
from bei.tokenizer.encoder import TextEncoder
from bei.tokenizer.prompts import ChosenPrompt, choose_prompt


class ModelService(Protocol):
    """The facts of one model, and the engine's rows for inputs. ``InferenceService`` answers requests as they come,
    ``bei.bulk.shard_service`` answers whole shards."""

    @property
    def name(self) -> str:
        """As clients call it."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def encoder(self) -> TextEncoder: ...

    @property
    def untrained_dimensions(self) -> str:
        """The setting of that name."""

    @property
    def embedding_width(self) -> int:
        """Components of its dense vectors; 0 if it has none."""

    @property
    def adapter(self) -> int:
        """The adapter of all requests; 0: as each says."""

    @property
    def default_prompt(self) -> ChosenPrompt:
        """The prompt of requests that name none. Raises InvalidRequestError where they have to."""

    async def infer(
        self, request: ModelRequest, *, ticket: Ticket, outputs: AbstractSet[str], reduce: Reduce | None = None
    ) -> InferenceResult:
        """Run the inputs of ``request`` (at least one); ``reduce``, in any thread, makes the answer's rows of the
        engine's. Raises InvalidRequestError, EngineError, and what the class names besides."""

    async def encode(self, request: ModelRequest, *, ticket: Ticket) -> list[Encoding]:
        """Tokenize the inputs of ``request`` (at least one). Raises as ``infer`` does."""


class ModelFacts:
    """The facts of a ``ModelService``: of what reads an artifact's inputs, and of the server's settings."""

    adapter = 0  # what names no adapter is read by the base model's weights, or has to name one

    def __init__(self, manifest: Manifest, readers: InputReaders, config: ServeConfig) -> None:
        self.manifest = manifest
        self.name = manifest.name  # as clients call it
        self.untrained_dimensions = config.untrained_dimensions
        self._readers = readers

    @property
    def encoder(self) -> TextEncoder:
        """The tokenizer. Raises InvalidRequestError where the model reads no texts."""
        return self._readers.encoder

    @cached_property
    def embedding_width(self) -> int:
        """Components of its dense vectors; 0 if it has none."""
        return self.manifest.dimension("embedding") or 0

    @cached_property
    def default_prompt(self) -> ChosenPrompt:
        """The prompt of requests that name none. Raises InvalidRequestError where they have to."""
        return choose_prompt(self.manifest)
