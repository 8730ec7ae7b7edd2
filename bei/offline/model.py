"""``bei.Model``: a model without a server."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

from bei.artifact.certificate.record import Certificate
from bei.artifact.manifest import Manifest
from bei.core import Float32Array
from bei.errors import BeiError
from bei.offline import extraction, methods
from bei.offline.encode import ArrayLike, EncodeOptions, encode, similarity
from bei.offline.input_checks import EncodeInput, GivenInput, GivenText, TextOrIds, TextOrImage, TextOrPicture
from bei.offline.method import Vectors
from bei.offline.options import (
    CallOptions,
    EmbedOptions,
    EntityOptions,
    ExtractOptions,
    PromptOptions,
    RelationOptions,
    RerankOptions,
    ScoreOptions,
    SparseOptions,
    TokenizeOptions,
    ZeroShotOptions,
)
from bei.offline.results import Chunk, Extracted, Predictions, Rank, SparseVector, Token
from bei.offline.runner import Runner
from bei.offline.service_thread import ServiceThread
from bei.offline.settings import ModelSettings, configured
from bei.offline.windows import WINDOW
from bei.service.resolve import artifact_for, cache_of, default_artifact
from bei.tasks.entities import Entity
from bei.tasks.extract import Span
from bei.tasks.questions import Answer
from bei.tasks.schema_spans import Instance
from bei.tokenizer.encoder import Input

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack  # typing's, of Python 3.11

Stream: TypeAlias = "Iterable[TextOrIds] | AsyncIterable[TextOrIds]"
GivenStream: TypeAlias = "Iterable[GivenInput] | AsyncIterable[GivenInput]"
GivenTextStream: TypeAlias = "Iterable[GivenText] | AsyncIterable[GivenText]"
TextStream: TypeAlias = "Iterable[str] | AsyncIterable[str]"
InputStream: TypeAlias = "Iterable[Input] | AsyncIterable[Input]"

# Names, or names and what they mean.
AnyLabels: TypeAlias = "Iterable[str] | Mapping[str, Any]"

ClassT = TypeVar("ClassT")


def _spelled_out(cls: type[ClassT]) -> type[ClassT]:
    """Let ``inspect.signature`` and ``help`` show ``report`` and ``progress`` of the options, with their defaults."""
    shown = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, default, annotation in (("report", None, "Report | None"), ("progress", False, "Progress"))
    ]
    for method in vars(cls).values():
        if inspect.isfunction(method) and "options" in method.__annotations__:
            signature = inspect.signature(method)
            *named, options = signature.parameters.values()
            method.__signature__ = signature.replace(parameters=[*named, *shown, options])  # type: ignore[attr-defined]
    return cls


@_spelled_out
class Model:
    """A model in this process: the engine, queue and tasks of ``bei serve`` without HTTP.

        with Model("all-MiniLM-L6-v2") as model:
            vectors = model.embed(["one text", "another"])  # float32 [2, 384]

    Every method may be called from any thread, also from one with a running event loop; concurrent calls share the
    engine's steps, single texts first. Methods that begin with ``a`` are for callers on an event loop: cancelling one
    cancels its work. Those that end in ``_iter`` read their inputs as they need them and yield chunks of results, for
    inputs without end. All others take any iterable too, and one text counts as a list of one. A call has at most some
    thousand inputs in flight: its memory, beside its inputs and its result, does not grow, and it waits where a server
    would refuse.

    ``report`` is filled with counts, truncated inputs and errors. With a report ``embed``, ``embed_sparse`` and
    ``embed_all`` go on without inputs that are invalid, or that the engine fails on. ``progress``: True draws a bar on
    standard error; a function gets the numbers of inputs done and of all inputs (None: unknown). The other options are
    the fields of HTTP requests (``bei.offline.options``); an option that does not apply is refused by name.

    All methods raise InvalidRequestError and its subclasses for an invalid call, TaskNotSupportedError,
    DeadlineExceededError, EngineError, ShuttingDownError once the Model is closed, and ForkedProcessError in a fork of
    the process that made it (``bei.errors``).
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        adapter: str | None = None,
        **settings: Unpack[ModelSettings],
    ) -> None:
        """Load ``model``, verify it, and wait until it answers as it did at build time.

        ``model``: as for ``bei serve``: the path of an artifact, or a checkpoint (a folder, an installed package, a
        repository of the hub), built first and kept; None: all-MiniLM-L6-v2. ``adapter``: the one of the artifact's
        that reads all inputs; None: the base model, or as ``input_type`` names a task. ``settings``: those of ``bei
        serve`` without the network's, over its ``BEI_*`` variables. The first time on a machine the engine's steps are
        measured, for up to 25 s (``tune="off"``: not at all).

        Raises ConfigError, ArtifactError, CheckpointError, and all else that a start of ``bei serve`` may raise.
        """
        config = configured(settings)
        with ExitStack() as stack:
            found = default_artifact(config, stack) if model is None else artifact_for(os.fspath(model), config, stack)
            if not isinstance(found, Path):
                cache_of(config).enforce_limit(config.cache_max_bytes)  # now, as this one is in use
            thread = ServiceThread(found, config, stack.pop_all())
        self._runner = Runner(thread, config.interactive_inputs, adapter)

    @property
    def name(self) -> str:
        """The model's name on ``bei serve``."""
        return self.manifest.name

    @property
    def manifest(self) -> Manifest:
        """The model's tasks, prompts, labels, width of vectors, and most tokens of an input."""
        return self._runner.service.manifest

    @property
    def certificate(self) -> Certificate:
        """The measured differences between the engine and the reference."""
        return self._runner.service.certificate

    def close(self) -> None:
        """End the threads and free the engine; blocks for a step at most. Calls in flight in other threads raise
        ShuttingDownError. No-op in a fork, and the second time."""
        self._runner.thread.close()

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

    def __repr__(self) -> str:
        try:
            manifest = self.manifest
        except BeiError as error:
            return f"<Model: {error}>"
        tasks, form = ", ".join(manifest.tasks), f"{manifest.precision} on {manifest.target}"
        return f"<Model {manifest.name}: {tasks}; {form}, {manifest.max_seq_len} tokens>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A Model has an engine and threads, which cannot be pickled: pass its name or path to the other process, "
            "and make a Model there (workers started by spawn; docs/python.md, 'Event loops, threads, processes')."
        )

    # Vectors, as sentence-transformers has them.

    def encode(self, inputs: EncodeInput, /, **arguments: Unpack[EncodeOptions]) -> Any:
        """As ``SentenceTransformer.encode``: float32 [width] for one text, [n, width] for several; tensors or other
        forms as ``arguments`` say (``bei.offline.encode``)."""
        return encode(self._runner.service, self.embed, inputs, arguments)

    def encode_query(self, inputs: EncodeInput, /, **arguments: Unpack[EncodeOptions]) -> Any:
        """As ``encode``, of queries: with the prompt and the route that the model has for them."""
        return encode(self._runner.service, self.embed, inputs, arguments, "query")

    def encode_document(self, inputs: EncodeInput, /, **arguments: Unpack[EncodeOptions]) -> Any:
        """As ``encode``, of documents."""
        return encode(self._runner.service, self.embed, inputs, arguments, "document")

    def similarity(self, first: ArrayLike, second: ArrayLike) -> Float32Array:
        """Scores float32 [n, m] of vectors [n, width] and [m, width] by the checkpoint's function, cosine if it names
        none; larger is nearer."""
        return similarity(self.manifest, first, second)

    def similarity_pairwise(self, first: ArrayLike, second: ArrayLike) -> Float32Array:
        """As ``similarity``, [n], of the vectors at the same places."""
        return similarity(self.manifest, first, second, pairwise=True)

    # Vectors.

    def embed(self, inputs: Iterable[GivenInput], **options: Unpack[EmbedOptions]) -> Vectors:
        """Vectors of texts, of lists of token ids, which are used exactly as given, or of images.

        Models with an image tower read Pillow images, bytes of image files, and their paths as ``pathlib.Path``.

        float32 [n, width] unless ``output_dtype`` says otherwise, row i for input i; [n, width / 8] for binary and
        ubinary. With a report the row of an input with an error is zero.
        """
        return self._runner.gather(methods.embedding(self._runner.service, options), inputs)

    async def aembed(self, inputs: Iterable[GivenInput], **options: Unpack[EmbedOptions]) -> Vectors:
        """As ``embed``."""
        return await self._runner.async_gather(methods.embedding(self._runner.service, options), inputs)

    def embed_iter(
        self, inputs: Iterable[GivenInput], *, chunk_size: int = WINDOW, **options: Unpack[EmbedOptions]
    ) -> Iterator[Chunk[TextOrImage, Vectors]]:
        """As ``embed``, in chunks."""
        return self._runner.chunks(methods.embedding(self._runner.service, options), inputs, chunk_size)

    def aembed_iter(
        self, inputs: GivenStream, *, chunk_size: int = WINDOW, **options: Unpack[EmbedOptions]
    ) -> AsyncIterator[Chunk[TextOrImage, Vectors]]:
        """As ``embed_iter``; ``inputs`` may be asynchronous too."""
        return self._runner.async_chunks(methods.embedding(self._runner.service, options), inputs, chunk_size)

    def embed_sparse(self, inputs: Iterable[TextOrIds], **options: Unpack[SparseOptions]) -> list[SparseVector]:
        """The positive weights of vocabulary entries. With a report an input with an error has none."""
        return self._runner.gather(methods.sparse_embedding(self._runner.service, options), inputs)

    async def aembed_sparse(self, inputs: Iterable[TextOrIds], **options: Unpack[SparseOptions]) -> list[SparseVector]:
        """As ``embed_sparse``."""
        return await self._runner.async_gather(methods.sparse_embedding(self._runner.service, options), inputs)

    def embed_sparse_iter(
        self, inputs: Iterable[TextOrIds], *, chunk_size: int = WINDOW, **options: Unpack[SparseOptions]
    ) -> Iterator[Chunk[TextOrIds, list[SparseVector]]]:
        """As ``embed_sparse``, in chunks."""
        return self._runner.chunks(methods.sparse_embedding(self._runner.service, options), inputs, chunk_size)

    def aembed_sparse_iter(
        self, inputs: Stream, *, chunk_size: int = WINDOW, **options: Unpack[SparseOptions]
    ) -> AsyncIterator[Chunk[TextOrIds, list[SparseVector]]]:
        """As ``embed_sparse_iter``; ``inputs`` may be asynchronous too."""
        return self._runner.async_chunks(methods.sparse_embedding(self._runner.service, options), inputs, chunk_size)

    def embed_all(self, inputs: Iterable[GivenText], **options: Unpack[PromptOptions]) -> list[Float32Array]:
        """A vector for each token of each text, special tokens included: float32 [tokens, width] for text i. Models for
        late interaction read queries and documents as ``input_type`` says; ColPali reads images too, as ``embed`` does
        elsewhere. With a report an input with an error has [0, 0]."""
        return self._runner.gather(methods.token_embedding(self._runner.service, options), inputs)

    async def aembed_all(self, inputs: Iterable[GivenText], **options: Unpack[PromptOptions]) -> list[Float32Array]:
        """As ``embed_all``."""
        return await self._runner.async_gather(methods.token_embedding(self._runner.service, options), inputs)

    def embed_all_iter(
        self, inputs: Iterable[GivenText], *, chunk_size: int = WINDOW, **options: Unpack[PromptOptions]
    ) -> Iterator[Chunk[TextOrPicture, list[Float32Array]]]:
        """As ``embed_all``, in chunks, which are smaller where texts are long."""
        return self._runner.chunks(methods.token_embedding(self._runner.service, options), inputs, chunk_size)

    def aembed_all_iter(
        self, inputs: GivenTextStream, *, chunk_size: int = WINDOW, **options: Unpack[PromptOptions]
    ) -> AsyncIterator[Chunk[TextOrPicture, list[Float32Array]]]:
        """As ``embed_all_iter``; ``inputs`` may be asynchronous too."""
        return self._runner.async_chunks(methods.token_embedding(self._runner.service, options), inputs, chunk_size)

    # Scores.

    def rerank(self, query: GivenText, documents: Iterable[GivenText], **options: Unpack[RerankOptions]) -> list[Rank]:
        """The places of ``documents`` with their scores against ``query``, best first. Images are for models that
        compare vectors of them."""
        return self._runner.gather(methods.reranking(self._runner.service, query, options), documents)

    async def arerank(
        self, query: GivenText, documents: Iterable[GivenText], **options: Unpack[RerankOptions]
    ) -> list[Rank]:
        """As ``rerank``."""
        return await self._runner.async_gather(methods.reranking(self._runner.service, query, options), documents)

    def classify(self, inputs: Iterable[Input], **options: Unpack[ScoreOptions]) -> Predictions:
        """Scores of the model's labels for texts, or for pairs of texts that the model reads together."""
        return self._runner.gather(methods.classification(self._runner.service, options), inputs)

    async def aclassify(self, inputs: Iterable[Input], **options: Unpack[ScoreOptions]) -> Predictions:
        """As ``classify``."""
        return await self._runner.async_gather(methods.classification(self._runner.service, options), inputs)

    def classify_iter(
        self, inputs: Iterable[Input], *, chunk_size: int = WINDOW, **options: Unpack[ScoreOptions]
    ) -> Iterator[Chunk[Input, Predictions]]:
        """As ``classify``, in chunks."""
        return self._runner.chunks(methods.classification(self._runner.service, options), inputs, chunk_size)

    def aclassify_iter(
        self, inputs: InputStream, *, chunk_size: int = WINDOW, **options: Unpack[ScoreOptions]
    ) -> AsyncIterator[Chunk[Input, Predictions]]:
        """As ``classify_iter``; ``inputs`` may be asynchronous too."""
        return self._runner.async_chunks(methods.classification(self._runner.service, options), inputs, chunk_size)

    def zero_shot(self, inputs: Iterable[str], labels: AnyLabels, **options: Unpack[ZeroShotOptions]) -> Predictions:
        """Scores of ``labels`` for texts, by a model of natural language inference, GLiClass or GLiNER2, which reads
        descriptions too: ``{name: description}``. Those of one text sum to 1, unless ``multi_label`` asks for
        independent probabilities."""
        return self._runner.gather(methods.zero_shot(self._runner.service, labels, options), inputs)

    async def azero_shot(
        self, inputs: Iterable[str], labels: AnyLabels, **options: Unpack[ZeroShotOptions]
    ) -> Predictions:
        """As ``zero_shot``."""
        return await self._runner.async_gather(methods.zero_shot(self._runner.service, labels, options), inputs)

    def decide(
        self, inputs: Iterable[str], questions: Mapping[str, Mapping[str, Any]], **options: Unpack[CallOptions]
    ) -> list[dict[str, Answer]]:
        """Answers to typed ``questions`` about each text, by their names: ``{"type": "choice", "instructions": ...,
        "criteria": {name: description or None}}``, ``score`` with a list of levels, or ``noul`` (yes or no), as
        ``/v1/systemone`` has them. Nothing is cut: a text that is too long is an error."""
        return self._runner.gather(methods.decision(self._runner.service, questions, options), inputs)

    async def adecide(
        self, inputs: Iterable[str], questions: Mapping[str, Mapping[str, Any]], **options: Unpack[CallOptions]
    ) -> list[dict[str, Answer]]:
        """As ``decide``."""
        return await self._runner.async_gather(methods.decision(self._runner.service, questions, options), inputs)

    # Tokens.

    def predict_tokens(self, inputs: Iterable[str], **options: Unpack[EntityOptions]) -> list[list[Entity]]:
        """The labelled tokens of each text or, with ``aggregation_strategy``, its entities, in the text's order."""
        return self._runner.gather(methods.token_classification(self._runner.service, options), inputs)

    async def apredict_tokens(self, inputs: Iterable[str], **options: Unpack[EntityOptions]) -> list[list[Entity]]:
        """As ``predict_tokens``."""
        return await self._runner.async_gather(methods.token_classification(self._runner.service, options), inputs)

    def predict_tokens_iter(
        self, inputs: Iterable[str], *, chunk_size: int = WINDOW, **options: Unpack[EntityOptions]
    ) -> Iterator[Chunk[str, list[list[Entity]]]]:
        """As ``predict_tokens``, in chunks, which are smaller where texts are long."""
        return self._runner.chunks(methods.token_classification(self._runner.service, options), inputs, chunk_size)

    def apredict_tokens_iter(
        self, inputs: TextStream, *, chunk_size: int = WINDOW, **options: Unpack[EntityOptions]
    ) -> AsyncIterator[Chunk[str, list[list[Entity]]]]:
        """As ``predict_tokens_iter``; ``inputs`` may be asynchronous too."""
        return self._runner.async_chunks(
            methods.token_classification(self._runner.service, options), inputs, chunk_size
        )

    def extract(self, inputs: Iterable[str], labels: AnyLabels, **options: Unpack[ExtractOptions]) -> list[list[Span]]:
        """Spans of each text for ``labels`` (GLiNER), in the text's order. Long texts are read in windows. With
        ``{name: description}``, or ``{name: {"description", "threshold", "dtype"}}``, more is said of labels."""
        return self._runner.gather(extraction.spans(self._runner.service, labels, options), inputs)

    async def aextract(
        self, inputs: Iterable[str], labels: AnyLabels, **options: Unpack[ExtractOptions]
    ) -> list[list[Span]]:
        """As ``extract``."""
        return await self._runner.async_gather(extraction.spans(self._runner.service, labels, options), inputs)

    def extract_iter(
        self,
        inputs: Iterable[str],
        labels: AnyLabels,
        *,
        chunk_size: int = WINDOW,
        **options: Unpack[ExtractOptions],
    ) -> Iterator[Chunk[str, list[list[Span]]]]:
        """As ``extract``, in chunks, which are smaller where texts are long."""
        return self._runner.chunks(extraction.spans(self._runner.service, labels, options), inputs, chunk_size)

    def aextract_iter(
        self,
        inputs: TextStream,
        labels: AnyLabels,
        *,
        chunk_size: int = WINDOW,
        **options: Unpack[ExtractOptions],
    ) -> AsyncIterator[Chunk[str, list[list[Span]]]]:
        """As ``extract_iter``; ``inputs`` may be asynchronous too."""
        return self._runner.async_chunks(extraction.spans(self._runner.service, labels, options), inputs, chunk_size)

    def extract_schema(
        self,
        inputs: Iterable[str],
        *,
        labels: AnyLabels | None = None,
        structures: Mapping[str, Any] | None = None,
        relations: AnyLabels | None = None,
        classifications: Iterable[Mapping[str, Any]] | None = None,
        **options: Unpack[ExtractOptions],
    ) -> list[Extracted]:
        """Spans of each text for ``labels``, ``structures`` (``{name: {"fields": [{"name", "dtype", "choices",
        "description", "threshold", "cardinality", "exclusive"}], "mode", "anchor"}}``), ``relations``, and labels of
        ``classifications`` (``[{"task", "labels", "multi_label", "cls_threshold", "top_k", "class_act", "prompt",
        "examples"}]``), in one pass (GLiNER2). At least one of them must be given."""
        asked = extraction.SchemaToFind(labels, structures, relations, classifications)
        return self._runner.gather(extraction.schema_extraction(self._runner.service, asked, options), inputs)

    async def aextract_schema(
        self,
        inputs: Iterable[str],
        *,
        labels: AnyLabels | None = None,
        structures: Mapping[str, Any] | None = None,
        relations: AnyLabels | None = None,
        classifications: Iterable[Mapping[str, Any]] | None = None,
        **options: Unpack[ExtractOptions],
    ) -> list[Extracted]:
        """As ``extract_schema``."""
        asked = extraction.SchemaToFind(labels, structures, relations, classifications)
        method = extraction.schema_extraction(self._runner.service, asked, options)
        return await self._runner.async_gather(method, inputs)

    def extract_schema_iter(
        self,
        inputs: Iterable[str],
        *,
        labels: AnyLabels | None = None,
        structures: Mapping[str, Any] | None = None,
        relations: AnyLabels | None = None,
        classifications: Iterable[Mapping[str, Any]] | None = None,
        chunk_size: int = WINDOW,
        **options: Unpack[ExtractOptions],
    ) -> Iterator[Chunk[str, list[Extracted]]]:
        """As ``extract_schema``, in chunks, which are smaller where texts are long."""
        asked = extraction.SchemaToFind(labels, structures, relations, classifications)
        method = extraction.schema_extraction(self._runner.service, asked, options)
        return self._runner.chunks(method, inputs, chunk_size)

    def aextract_schema_iter(
        self,
        inputs: TextStream,
        *,
        labels: AnyLabels | None = None,
        structures: Mapping[str, Any] | None = None,
        relations: AnyLabels | None = None,
        classifications: Iterable[Mapping[str, Any]] | None = None,
        chunk_size: int = WINDOW,
        **options: Unpack[ExtractOptions],
    ) -> AsyncIterator[Chunk[str, list[Extracted]]]:
        """As ``extract_schema_iter``; ``inputs`` may be asynchronous too."""
        asked = extraction.SchemaToFind(labels, structures, relations, classifications)
        method = extraction.schema_extraction(self._runner.service, asked, options)
        return self._runner.async_chunks(method, inputs, chunk_size)

    def extract_relations(
        self,
        inputs: Iterable[str],
        entities: Iterable[Iterable[Span | Mapping[str, Any]]],
        relations: AnyLabels,
        **options: Unpack[RelationOptions],
    ) -> list[dict[str, list[Instance]]]:
        """The ``relations`` of each text between its ``entities`` (GLiREL): spans of ``extract``, or mappings with
        ``start`` and ``end``. An instance has a head and a tail, with the score of the pair."""
        method = extraction.relation_extraction(self._runner.service, relations, options)
        return self._runner.gather(method, extraction.with_entities(inputs, entities))

    async def aextract_relations(
        self,
        inputs: Iterable[str],
        entities: Iterable[Iterable[Span | Mapping[str, Any]]],
        relations: AnyLabels,
        **options: Unpack[RelationOptions],
    ) -> list[dict[str, list[Instance]]]:
        """As ``extract_relations``."""
        method = extraction.relation_extraction(self._runner.service, relations, options)
        return await self._runner.async_gather(method, extraction.with_entities(inputs, entities))

    def tokenize(self, inputs: Iterable[str], **options: Unpack[TokenizeOptions]) -> list[list[Token]]:
        """The tokens of each text, as the model would read them, but never cut. No engine runs."""
        return self._runner.gather(methods.tokenization(self._runner.service, options), inputs)

    async def atokenize(self, inputs: Iterable[str], **options: Unpack[TokenizeOptions]) -> list[list[Token]]:
        """As ``tokenize``."""
        return await self._runner.async_gather(methods.tokenization(self._runner.service, options), inputs)
