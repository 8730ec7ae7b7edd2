"""One served model: admit, tokenize, batch, run. What is made of the rows is in ``bei.tasks``. No HTTP here.

``infer`` runs on the event loop; tokenizer, batch manager and engine have threads of their own and answer through
``_requests_done``, one wake-up of the loop for all requests that a batch completes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bei import artifact as artifacts
from bei.batching import BatchManager, Request, Sequence
from bei.canary import canary_row, deviation
from bei.config import ServeConfig
from bei.core import Encoding, Engine, Outputs, PackedBatch, Row, rows_of_sequences
from bei.engine import load_engine
from bei.errors import BeiError, EngineError, InvalidRequestError, OverloadedError, ShuttingDownError
from bei.metrics import Metrics, ModelMetrics
from bei.postprocess import unit_length
from bei.tokenization import AS_CONFIGURED, EncodingOptions, Input, TextEncoder, TokenizerPool

# Once its canary has matched, readiness accepts an answer this fresh instead of computing the canary anew: traffic
# proves the path, and probes then neither queue behind bulk work nor add to it.
_FRESH_S = 5.0
_CANARY_TIMEOUT_S = 10.0
_MIN_RETRY_S = 0.1

# A row's embedding at unit length, computed for a whole batch beside the one the engine gives.
UNIT_EMBEDDING = "unit_embedding"


@dataclass(frozen=True)
class Answer:
    """What the engine gave, row i for input i, how the inputs were encoded, and which of them were cut."""

    rows: list[Row]
    encodings: list[Encoding]
    truncated: list[int]

    @property
    def num_tokens(self) -> int:
        """Tokens of all inputs, special tokens included."""
        return sum(encoding.num_tokens for encoding in self.encodings)


class InferenceService:
    """Answers requests for one artifact. Made and used on one event loop; ``close`` ends its threads."""

    def __init__(
        self, artifact: artifacts.Artifact, engine: Engine, encoder: TextEncoder, config: ServeConfig, metrics: Metrics
    ) -> None:
        self.manifest = artifact.manifest
        self.certificate = artifact.certificate
        self.encoder = encoder
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

    async def infer(self, inputs: Seq[Input], options: EncodingOptions = AS_CONFIGURED) -> Answer:
        """Run texts or pairs (at least one), as they are, through the model.

        A cancelled call takes back what is still queued. Raises InvalidRequestError, OverloadedError,
        ShuttingDownError, EngineError.
        """
        encodings = [_NOT_YET] * len(inputs)
        with self._admit(len(inputs)) as request:

            def on_encoded(start: int, chunk: list[Encoding]) -> None:  # in a tokenizer's thread
                encodings[start : start + len(chunk)] = chunk
                self._batches.submit([Sequence(encoding, request, start + i) for i, encoding in enumerate(chunk)])

            self._metrics.accepted(len(inputs))
            self._tokenizers.submit(inputs, on_encoded, self._failing(request), lambda: request.is_done, options)
            return await self._answer(request, encodings)

    async def infer_token_ids(self, inputs: Seq[Seq[int]]) -> Answer:
        """Run token ids exactly as given: no special tokens added, never truncated. Raises as above."""
        encodings = [self._encoding_of_ids(ids) for ids in inputs]
        with self._admit(len(inputs)) as request:
            self._metrics.accepted(len(inputs))
            self._batches.submit([Sequence(encoding, request, i) for i, encoding in enumerate(encodings)])
            return await self._answer(request, encodings)

    async def encode(self, inputs: Seq[Input], options: EncodingOptions = AS_CONFIGURED) -> list[Encoding]:
        """Tokenize only (at least one input), in the tokenizers' threads. Counted and refused as other work is."""
        encodings = [_NOT_YET] * len(inputs)
        with self._admit(len(inputs)) as request:

            def on_encoded(start: int, chunk: list[Encoding]) -> None:  # in a tokenizer's thread
                encodings[start : start + len(chunk)] = chunk
                if any([request.record(start + i, {}) for i in range(len(chunk))]):
                    self._requests_done([request])

            self._tokenizers.submit(inputs, on_encoded, self._failing(request), lambda: request.is_done, options)
            await self._done(request)
            return encodings

    async def check_ready(self) -> None:
        """Return if the whole path answers, and answers what it did at build time. Raises BeiError if not."""
        if self._draining:
            raise ShuttingDownError(f"{self.name} is draining.")
        if not self.is_alive:
            raise EngineError(f"A thread of {self.name} has died: restart the server.")
        if self._canary_matched and time.monotonic() - self._last_answer_s < _FRESH_S:
            return
        try:
            answer = await asyncio.wait_for(self.infer([self.certificate.canary_text]), _CANARY_TIMEOUT_S)
        except asyncio.TimeoutError as error:
            raise EngineError(f"{self.name} did not answer its canary within {_CANARY_TIMEOUT_S:.0f} s.") from error
        output = self.certificate.output
        expected = np.array(self.certificate.canary_row, np.float64)
        found = deviation(canary_row(answer.rows[0][output], output), expected, output)
        self._canary_matched = found is None
        if found is not None:
            raise EngineError(
                f"{self.name} answers its canary with {found} it had at build time: "
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

    @contextmanager
    def _admit(self, num_inputs: int) -> Iterator[Request]:
        """Count the inputs as accepted until the call ends, however it ends."""
        assert num_inputs, "a request of nothing would never be answered"
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

    def _failing(self, request: Request) -> Callable[[BeiError], None]:
        """What a tokenizer's thread calls to fail ``request``."""

        def on_failed(error: BeiError) -> None:
            if request.fail(error):
                self._requests_done([request])

        return on_failed

    async def _done(self, request: Request) -> None:
        await self._waiting[request]
        if request.error is not None:
            raise request.error

    async def _answer(self, request: Request, encodings: list[Encoding]) -> Answer:
        await self._done(request)
        self._last_answer_s = time.monotonic()
        truncated = [index for index, encoding in enumerate(encodings) if encoding.truncated]
        self._metrics.truncated(len(truncated))
        return Answer([row for row in request.rows if row is not None], encodings, truncated)

    def _rows_of(self, outputs: Outputs, batch: PackedBatch) -> list[Row]:
        """In the engine's thread: what can be computed for a whole batch at once is."""
        per_token = self._engine.info.per_token
        parts = {name: rows_of_sequences(rows, batch, per_token=name in per_token) for name, rows in outputs.items()}
        if "embedding" in outputs:
            parts[UNIT_EMBEDDING] = list(unit_length(outputs["embedding"]))
        return [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]

    def _requests_done(self, requests: list[Request]) -> None:
        """Wake the callers; in any thread."""
        self._loop.call_soon_threadsafe(self._resolve, requests)

    def _resolve(self, requests: list[Request]) -> None:
        for request in requests:
            future = self._waiting.get(request)
            if future is not None and not future.done():
                future.set_result(None)

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
    template = manifest.rerank_template
    encoder = TextEncoder(
        path / artifacts.TOKENIZER,
        manifest.max_seq_len,
        auto_truncate=config.auto_truncate,
        frame=(template.prefix, template.suffix) if template else ("", ""),
    )
    engine = load_engine(
        artifact.engine_dir, manifest, num_threads=config.engine_threads, num_streams=config.engine_streams
    )
    engine.warmup()
    return InferenceService(artifact, engine, encoder, config, metrics)
