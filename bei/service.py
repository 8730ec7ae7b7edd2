"""One served model: admit, tokenize, batch, run, postprocess. No HTTP here.

``embed_*`` run on the event loop; tokenizer, batch manager and engine have threads of their own and answer through
``_requests_done``, one wake-up of the loop for all requests that a batch completes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bei import artifact as artifacts
from bei.batching import BatchManager, Request, Sequence
from bei.config import ServeConfig
from bei.core import Encoding, Engine, Float32Array, Outputs, PackedBatch, Row, rows_of_sequences
from bei.engine import load_engine
from bei.errors import BeiError, EngineError, InvalidRequestError, OverloadedError, ShuttingDownError
from bei.metrics import Metrics, ModelMetrics
from bei.postprocess import unit_length
from bei.tokenization import TextEncoder, TokenizerPool

# Once its canary has matched, readiness accepts an answer this fresh instead of computing the canary anew: traffic
# proves the path, and probes then neither queue behind bulk work nor add to it.
_FRESH_S = 5.0
_CANARY_TIMEOUT_S = 10.0
_CANARY_MIN_COSINE = 0.99
_MIN_RETRY_S = 0.1


@dataclass(frozen=True)
class Embeddings:
    """``vectors`` float32 [n, dimension], row i for input i. ``truncated`` lists the inputs that were cut."""

    vectors: Float32Array
    num_tokens: int
    truncated: list[int]


class InferenceService:
    """Answers requests for one artifact. Made and used on one event loop; ``close`` ends its threads."""

    def __init__(
        self, artifact: artifacts.Artifact, engine: Engine, encoder: TextEncoder, config: ServeConfig, metrics: Metrics
    ) -> None:
        self.manifest = artifact.manifest
        self.certificate = artifact.certificate
        self._engine = engine
        self._max_queue_size = config.max_queue_size
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Request, asyncio.Future[None]] = {}
        self._num_admitted = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._last_answer_s = float("-inf")
        self._canary_matched = False
        self._metrics = ModelMetrics(metrics, self.manifest.name)
        self._prompt = self.manifest.prompts.get(self.manifest.default_prompt_name or "", "")
        self._tokenizers = TokenizerPool(encoder, config.tokenizer_threads)
        self._batches = BatchManager(engine, self._rows_of, self._requests_done, self._metrics)

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.manifest.name

    @property
    def is_alive(self) -> bool:
        """Whether every thread of the path still works."""
        return self._tokenizers.is_alive and self._batches.is_alive

    async def embed_texts(self, texts: Seq[str], dimensions: int | None = None) -> Embeddings:
        """Embed ``texts`` (at least one), the model's default prompt in front of each.

        A cancelled call takes back what is still queued. Raises InvalidRequestError, OverloadedError,
        ShuttingDownError, EngineError.
        """
        return await self._embed_texts([self._prompt + text for text in texts] if self._prompt else texts, dimensions)

    async def embed_token_ids(self, inputs: Seq[Seq[int]], dimensions: int | None = None) -> Embeddings:
        """Embed token ids exactly as given: no prompt, no special tokens added, never truncated. Raises as above."""
        self._check_dimensions(dimensions)
        encodings = [self._encoding_of_ids(ids) for ids in inputs]
        with self._admit(len(inputs)) as request:
            self._batches.submit([Sequence(encoding, request, i) for i, encoding in enumerate(encodings)])
            return await self._answer(request, encodings, dimensions)

    async def check_ready(self) -> None:
        """Return if the whole path answers, and answers what it did at build time. Raises BeiError if not."""
        if self._draining:
            raise ShuttingDownError(f"{self.name} is draining.")
        if not self.is_alive:
            raise EngineError(f"A thread of {self.name} has died: restart the server.")
        if self._canary_matched and time.monotonic() - self._last_answer_s < _FRESH_S:
            return
        try:
            call = self._embed_texts([self.certificate.canary_text], dimensions=None)
            answer = await asyncio.wait_for(call, _CANARY_TIMEOUT_S)
        except asyncio.TimeoutError as error:
            raise EngineError(f"{self.name} did not answer its canary within {_CANARY_TIMEOUT_S:.0f} s.") from error
        expected = np.array(self.certificate.canary_embedding, np.float32)
        cosine = float(unit_length(answer.vectors)[0] @ expected)
        self._canary_matched = cosine >= _CANARY_MIN_COSINE
        if not self._canary_matched:
            raise EngineError(
                f"{self.name} answers its canary with cosine {cosine:.4f} to the vector it had at build time: "
                "this machine computes something else. Build the artifact again here."
            )

    def begin_drain(self) -> None:
        """Refuse new work from now on; what is accepted will be answered."""
        self._draining = True

    def abandon(self) -> None:
        """Answer everything that waits with ShuttingDownError; what is queued will not be run."""
        error = ShuttingDownError("The server was stopped before it came to this: send the request to another replica.")
        self._resolve([request for request in self._waiting if request.fail(error)])

    async def wait_drained(self) -> None:
        """Return when nothing accepted is unanswered."""
        await self._idle.wait()

    def close(self) -> None:
        """Finish what is queued, end the threads, free the engine. Blocks; not for the event loop."""
        self._tokenizers.close()
        self._batches.close()
        self._engine.close()

    async def _embed_texts(self, texts: Seq[str], dimensions: int | None) -> Embeddings:
        self._check_dimensions(dimensions)
        encodings = [_NOT_YET] * len(texts)
        with self._admit(len(texts)) as request:

            def on_encoded(start: int, chunk: list[Encoding]) -> None:  # in a tokenizer's thread
                encodings[start : start + len(chunk)] = chunk
                self._batches.submit([Sequence(encoding, request, start + i) for i, encoding in enumerate(chunk)])

            def on_failed(error: BeiError) -> None:
                if request.fail(error):
                    self._requests_done([request])

            self._tokenizers.submit(texts, on_encoded, on_failed, lambda: request.is_done)
            return await self._answer(request, encodings, dimensions)

    @contextmanager
    def _admit(self, num_inputs: int) -> Iterator[Request]:
        """Count the inputs as accepted until the call ends, however it ends."""
        if self._draining:
            raise ShuttingDownError("The server is shutting down: send the request to another replica.")
        if self._num_admitted + num_inputs > self._max_queue_size:
            raise OverloadedError(
                f"{self._num_admitted} inputs are waiting and the limit is {self._max_queue_size}: retry later.",
                retry_after_s=max(_MIN_RETRY_S, self._num_admitted * self._batches.seconds_per_sequence),
            )
        request = Request(num_inputs)
        self._waiting[request] = self._loop.create_future()
        self._num_admitted += num_inputs
        self._idle.clear()
        self._metrics.accepted(num_inputs)
        try:
            yield request
        finally:
            if not request.is_done:  # the client left
                request.cancel()
                self._batches.cancelled(num_inputs)
            del self._waiting[request]
            self._num_admitted -= num_inputs
            if not self._num_admitted:
                self._idle.set()

    async def _answer(self, request: Request, encodings: Seq[Encoding], dimensions: int | None) -> Embeddings:
        await self._waiting[request]
        if request.error is not None:
            raise request.error
        self._last_answer_s = time.monotonic()
        truncated = [index for index, encoding in enumerate(encodings) if encoding.truncated]
        self._metrics.truncated(len(truncated))
        vectors = np.stack([row["embedding"] for row in request.rows if row is not None])
        if dimensions is not None and dimensions < vectors.shape[1]:
            vectors = self._finished(vectors[:, :dimensions])
        return Embeddings(
            vectors=vectors,
            num_tokens=sum(encoding.num_tokens for encoding in encodings),
            truncated=truncated,
        )

    def _rows_of(self, outputs: Outputs, batch: PackedBatch) -> list[Row]:
        """In the engine's thread: what can be computed for a whole batch at once is."""
        finished = {name: self._finished(rows) if name == "embedding" else rows for name, rows in outputs.items()}
        per_token = self._engine.info.per_token
        parts = {name: rows_of_sequences(rows, batch, per_token=name in per_token) for name, rows in finished.items()}
        return [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]

    def _finished(self, rows: Float32Array) -> Float32Array:
        embedding = self.manifest.embedding
        return unit_length(rows) if embedding is not None and embedding.normalize else rows

    def _requests_done(self, requests: list[Request]) -> None:
        """Wake the callers; in any thread."""
        self._loop.call_soon_threadsafe(self._resolve, requests)

    def _resolve(self, requests: list[Request]) -> None:
        for request in requests:
            future = self._waiting.get(request)
            if future is not None and not future.done():
                future.set_result(None)

    def _check_dimensions(self, dimensions: int | None) -> None:
        embedding = self.manifest.embedding
        if embedding is None:
            raise InvalidRequestError(f"{self.name} does not embed; it can do: {', '.join(self.manifest.tasks)}.")
        if dimensions is None:
            return
        width = self.manifest.dimension("embedding") or 0
        allowed = embedding.matryoshka_dimensions
        if allowed is not None and dimensions not in (*allowed, width):
            names = ", ".join(map(str, (*allowed, width)))
            raise InvalidRequestError(f"{self.name} has dimensions {names}, not {dimensions}.", "dimensions")
        if not 1 <= dimensions <= width:
            raise InvalidRequestError(f"dimensions must be from 1 to {width}, not {dimensions}.", "dimensions")

    def _encoding_of_ids(self, ids: Seq[int]) -> Encoding:
        manifest = self.manifest
        if not ids:
            raise InvalidRequestError("An input of token ids is empty: leave it out.", "input")
        if len(ids) > manifest.max_seq_len:
            raise InvalidRequestError(
                f"An input has {len(ids)} token ids, the model takes up to {manifest.max_seq_len}: shorten it.", "input"
            )
        if min(ids) < 0 or max(ids) >= manifest.spec.vocab_size:
            raise InvalidRequestError(
                f"Token ids must be from 0 to {manifest.spec.vocab_size - 1}: use the tokenizer of {self.name}, "
                "or send texts.",
                "input",
            )
        return Encoding(np.array(ids, np.int32))


_NOT_YET = Encoding(np.zeros(0, np.int32))


def load_service(path: Path, config: ServeConfig, metrics: Metrics) -> InferenceService:
    """Verify the artifact at ``path``, load and warm its engine, start the service. Needs a running event loop.

    Raises ArtifactError and its subclasses, MissingDependencyError, EngineError.
    """
    artifact = artifacts.load(path)
    manifest = artifact.manifest
    encoder = TextEncoder(path / artifacts.TOKENIZER, manifest.max_seq_len, auto_truncate=config.auto_truncate)
    engine = load_engine(
        artifact.engine_dir, manifest, num_threads=config.engine_threads, num_streams=config.engine_streams
    )
    engine.warmup()
    return InferenceService(artifact, engine, encoder, config, metrics)
