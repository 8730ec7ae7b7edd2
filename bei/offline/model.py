"""``bei.Model``: a model without a server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

from bei.artifact.certificate.record import Certificate
from bei.artifact.manifest import Manifest
from bei.core import Float32Array
from bei.offline import methods
from bei.offline.input_checks import TextOrIds
from bei.offline.method import Vectors
from bei.offline.options import (
    EmbedOptions,
    EntityOptions,
    PromptOptions,
    RerankOptions,
    ScoreOptions,
    SparseOptions,
    TokenizeOptions,
    ZeroShotOptions,
)
from bei.offline.progress import Progress
from bei.offline.results import Chunk, Predictions, Rank, Report, SparseVector, Token
from bei.offline.runner import Caller
from bei.offline.service_thread import Host
from bei.offline.settings import ModelSettings, configured
from bei.offline.windows import WINDOW
from bei.service.resolve import artifact_for, cache_of, default_artifact
from bei.tasks.entities import Entity
from bei.tokenizer.encoder import Input

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack  # typing's, of Python 3.11

Stream: TypeAlias = "Iterable[TextOrIds] | AsyncIterable[TextOrIds]"
TextStream: TypeAlias = "Iterable[str] | AsyncIterable[str]"
InputStream: TypeAlias = "Iterable[Input] | AsyncIterable[Input]"


class Model:
    """A model in this process: the engine, queue and tasks of ``bei serve`` without HTTP.

        with Model("all-MiniLM-L6-v2") as model:
            vectors = model.embed(["one text", "another"])  # float32 [2, 384]

    Every method may be called from any thread, also from one with a running event loop; calls that are made at once
    share the engine's steps, single texts first. Methods that begin with ``a`` are the same for callers on an event
    loop: to cancel one takes its work back. Those that end in ``_iter`` read their inputs as they need them and give
    chunks of results, for inputs without end. All others take any iterable too, and one text counts as a list of one.
    However many inputs there are, a call has at most some thousand of them under way: what it holds beside them and its
    result does not grow, and it waits where a server would refuse.

    ``report`` is filled with what became of the inputs. With a report ``embed``, ``embed_sparse`` and ``embed_all`` go
    on without inputs that are wrong, or that the engine fails on. ``progress``: True draws a bar on standard error; a
    function gets how many inputs are done, and how many there are (None: unknown). The other options are the fields of
    HTTP's requests (``bei.offline.options``); what cannot be honoured is refused by name.

    All methods raise InvalidRequestError and its subclasses for what is wrong with a call, TaskNotSupportedError,
    DeadlineExceededError, EngineError, ShuttingDownError once the Model is closed, and ForkedProcessError in a process
    that was forked from the one that made it (``bei.errors``).
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **settings: Unpack[ModelSettings]) -> None:
        """Load ``model``, verify it, and wait until it answers as it did at build time.

        ``model`` is what ``bei serve`` takes: the path of an artifact, or a checkpoint (a folder, an installed package,
        a repository of the hub), built first and kept; None: all-MiniLM-L6-v2. ``settings`` are those of ``bei serve``
        that are not about a network, over its ``BEI_*`` variables. The first time on a machine the engine's steps are
        measured, for up to 25 s (``tune="off"``: not at all).

        Raises ConfigError, ArtifactError, CheckpointError and what else a start of ``bei serve`` ends with.
        """
        config = configured(settings)
        with ExitStack() as stack:
            found = default_artifact(config, stack) if model is None else artifact_for(os.fspath(model), config, stack)
            if not isinstance(found, Path):
                cache_of(config).enforce_limit(config.cache_max_bytes)  # now, as this one is in use
            host = Host(found, config, stack.pop_all())
        self._caller = Caller(host, config.interactive_inputs)

    @property
    def name(self) -> str:
        """What ``bei serve`` calls the model."""
        return self.manifest.name

    @property
    def manifest(self) -> Manifest:
        """What the model is: its tasks, prompts, labels, the width of its vectors, the most tokens of an input."""
        return self._caller.service.manifest

    @property
    def certificate(self) -> Certificate:
        """How far the engine is from the reference."""
        return self._caller.service.certificate

    def close(self) -> None:
        """End the threads and free the engine; blocks until then, for a step at most. Calls that are under way in
        other threads end with ShuttingDownError. In a fork it does nothing. May be called twice."""
        self._caller.host.close()

    async def aclose(self) -> None:
        """As ``close``, for a caller on an event loop."""
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # Vectors.

    def embed(
        self,
        inputs: Iterable[TextOrIds],
        *,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[EmbedOptions],
    ) -> Vectors:
        """Vectors of texts, or of lists of token ids, which are used exactly as given.

        float32 [n, width] unless ``output_dtype`` says otherwise, row i for input i; [n, width / 8] where it is binary
        or ubinary. With a report the row of an input with an error is made of zeros.
        """
        return self._caller.gathered(methods.embedding(self._caller.service, options), inputs, report, progress)

    async def aembed(
        self,
        inputs: Iterable[TextOrIds],
        *,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[EmbedOptions],
    ) -> Vectors:
        """As ``embed``."""
        job = methods.embedding(self._caller.service, options)
        return await self._caller.async_gathered(job, inputs, report, progress)

    def embed_iter(
        self,
        inputs: Iterable[TextOrIds],
        *,
        chunk_size: int = WINDOW,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[EmbedOptions],
    ) -> Iterator[Chunk[TextOrIds, Vectors]]:
        """As ``embed``, in chunks."""
        job = methods.embedding(self._caller.service, options)
        return self._caller.chunks(job, inputs, chunk_size, report, progress)

    def aembed_iter(
        self,
        inputs: Stream,
        *,
        chunk_size: int = WINDOW,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[EmbedOptions],
    ) -> AsyncIterator[Chunk[TextOrIds, Vectors]]:
        """As ``embed_iter``; ``inputs`` may be asynchronous too."""
        job = methods.embedding(self._caller.service, options)
        return self._caller.async_chunks(job, inputs, chunk_size, report, progress)

    def embed_sparse(
        self,
        inputs: Iterable[TextOrIds],
        *,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[SparseOptions],
    ) -> list[SparseVector]:
        """Weights of entries of the vocabulary, those above zero. With a report an input with an error has none."""
        return self._caller.gathered(methods.sparse_embedding(self._caller.service, options), inputs, report, progress)

    async def aembed_sparse(
        self,
        inputs: Iterable[TextOrIds],
        *,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[SparseOptions],
    ) -> list[SparseVector]:
        """As ``embed_sparse``."""
        job = methods.sparse_embedding(self._caller.service, options)
        return await self._caller.async_gathered(job, inputs, report, progress)

    def embed_sparse_iter(
        self,
        inputs: Iterable[TextOrIds],
        *,
        chunk_size: int = WINDOW,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[SparseOptions],
    ) -> Iterator[Chunk[TextOrIds, list[SparseVector]]]:
        """As ``embed_sparse``, in chunks."""
        job = methods.sparse_embedding(self._caller.service, options)
        return self._caller.chunks(job, inputs, chunk_size, report, progress)

    def aembed_sparse_iter(
        self,
        inputs: Stream,
        *,
        chunk_size: int = WINDOW,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[SparseOptions],
    ) -> AsyncIterator[Chunk[TextOrIds, list[SparseVector]]]:
        """As ``embed_sparse_iter``; ``inputs`` may be asynchronous too."""
        job = methods.sparse_embedding(self._caller.service, options)
        return self._caller.async_chunks(job, inputs, chunk_size, report, progress)

    def embed_all(
        self,
        inputs: Iterable[str],
        *,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[PromptOptions],
    ) -> list[Float32Array]:
        """A vector for each token of each text, special tokens included: float32 [tokens, width] for text i. Models for
        late interaction read queries and documents as ``input_type`` says. With a report a text with an error has
        [0, 0]."""
        return self._caller.gathered(methods.token_embedding(self._caller.service, options), inputs, report, progress)

    async def aembed_all(
        self,
        inputs: Iterable[str],
        *,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[PromptOptions],
    ) -> list[Float32Array]:
        """As ``embed_all``."""
        job = methods.token_embedding(self._caller.service, options)
        return await self._caller.async_gathered(job, inputs, report, progress)

    def embed_all_iter(
        self,
        inputs: Iterable[str],
        *,
        chunk_size: int = WINDOW,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[PromptOptions],
    ) -> Iterator[Chunk[str, list[Float32Array]]]:
        """As ``embed_all``, in chunks, which are smaller where texts are long."""
        job = methods.token_embedding(self._caller.service, options)
        return self._caller.chunks(job, inputs, chunk_size, report, progress)

    def aembed_all_iter(
        self,
        inputs: TextStream,
        *,
        chunk_size: int = WINDOW,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[PromptOptions],
    ) -> AsyncIterator[Chunk[str, list[Float32Array]]]:
        """As ``embed_all_iter``; ``inputs`` may be asynchronous too."""
        job = methods.token_embedding(self._caller.service, options)
        return self._caller.async_chunks(job, inputs, chunk_size, report, progress)

    # Scores.

    def rerank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[RerankOptions],
    ) -> list[Rank]:
        """The places of ``documents`` with their scores against ``query``, best first."""
        job = methods.reranking(self._caller.service, query, options)
        return self._caller.gathered(job, documents, report, progress)

    async def arerank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[RerankOptions],
    ) -> list[Rank]:
        """As ``rerank``."""
        job = methods.reranking(self._caller.service, query, options)
        return await self._caller.async_gathered(job, documents, report, progress)

    def classify(
        self,
        inputs: Iterable[Input],
        *,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[ScoreOptions],
    ) -> Predictions:
        """Scores of the model's labels for texts, or for pairs of texts that the model reads together."""
        return self._caller.gathered(methods.classification(self._caller.service, options), inputs, report, progress)

    async def aclassify(
        self,
        inputs: Iterable[Input],
        *,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[ScoreOptions],
    ) -> Predictions:
        """As ``classify``."""
        job = methods.classification(self._caller.service, options)
        return await self._caller.async_gathered(job, inputs, report, progress)

    def classify_iter(
        self,
        inputs: Iterable[Input],
        *,
        chunk_size: int = WINDOW,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[ScoreOptions],
    ) -> Iterator[Chunk[Input, Predictions]]:
        """As ``classify``, in chunks."""
        job = methods.classification(self._caller.service, options)
        return self._caller.chunks(job, inputs, chunk_size, report, progress)

    def aclassify_iter(
        self,
        inputs: InputStream,
        *,
        chunk_size: int = WINDOW,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[ScoreOptions],
    ) -> AsyncIterator[Chunk[Input, Predictions]]:
        """As ``classify_iter``; ``inputs`` may be asynchronous too."""
        job = methods.classification(self._caller.service, options)
        return self._caller.async_chunks(job, inputs, chunk_size, report, progress)

    def zero_shot(
        self,
        inputs: Iterable[str],
        labels: Iterable[str],
        *,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[ZeroShotOptions],
    ) -> Predictions:
        """Scores of ``labels`` for texts, by a model of natural language inference. Those of a text sum to 1, unless
        ``multi_label`` asks for probabilities of their own."""
        job = methods.zero_shot(self._caller.service, labels, options)
        return self._caller.gathered(job, inputs, report, progress)

    async def azero_shot(
        self,
        inputs: Iterable[str],
        labels: Iterable[str],
        *,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[ZeroShotOptions],
    ) -> Predictions:
        """As ``zero_shot``."""
        job = methods.zero_shot(self._caller.service, labels, options)
        return await self._caller.async_gathered(job, inputs, report, progress)

    # Tokens.

    def predict_tokens(
        self,
        inputs: Iterable[str],
        *,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[EntityOptions],
    ) -> list[list[Entity]]:
        """The labelled tokens of each text or, with ``aggregation_strategy``, its entities, in the text's order."""
        job = methods.token_classification(self._caller.service, options)
        return self._caller.gathered(job, inputs, report, progress)

    async def apredict_tokens(
        self,
        inputs: Iterable[str],
        *,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[EntityOptions],
    ) -> list[list[Entity]]:
        """As ``predict_tokens``."""
        job = methods.token_classification(self._caller.service, options)
        return await self._caller.async_gathered(job, inputs, report, progress)

    def predict_tokens_iter(
        self,
        inputs: Iterable[str],
        *,
        chunk_size: int = WINDOW,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[EntityOptions],
    ) -> Iterator[Chunk[str, list[list[Entity]]]]:
        """As ``predict_tokens``, in chunks, which are smaller where texts are long."""
        job = methods.token_classification(self._caller.service, options)
        return self._caller.chunks(job, inputs, chunk_size, report, progress)

    def apredict_tokens_iter(
        self,
        inputs: TextStream,
        *,
        chunk_size: int = WINDOW,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[EntityOptions],
    ) -> AsyncIterator[Chunk[str, list[list[Entity]]]]:
        """As ``predict_tokens_iter``; ``inputs`` may be asynchronous too."""
        job = methods.token_classification(self._caller.service, options)
        return self._caller.async_chunks(job, inputs, chunk_size, report, progress)

    def tokenize(
        self,
        inputs: Iterable[str],
        *,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[TokenizeOptions],
    ) -> list[list[Token]]:
        """The tokens of each text, as the model would read them, but never cut. No engine is asked."""
        return self._caller.gathered(methods.tokenization(self._caller.service, options), inputs, report, progress)

    async def atokenize(
        self,
        inputs: Iterable[str],
        *,
        report: Report | None = None,
        progress: Progress = False,
        **options: Unpack[TokenizeOptions],
    ) -> list[list[Token]]:
        """As ``tokenize``."""
        job = methods.tokenization(self._caller.service, options)
        return await self._caller.async_gathered(job, inputs, report, progress)
