"""One call of the service: what it asks of the model, its state while answers come in any thread, and its answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from bei.artifact.manifest import Manifest
from bei.core import Encoding, Float32Array, Row
from bei.errors import (
    BeiError,
    EmptyInputError,
    EngineDeadError,
    EngineError,
    InputTooLongError,
    InvalidRequestError,
)
from bei.image.source import ImageInput, ImagesInText
from bei.metrics.request_timing import CallTimes
from bei.service.admission import Ticket
from bei.service.image_side import no_texts
from bei.tokenizer.encoder import AS_CONFIGURED, EncodingOptions, Input

T = TypeVar("T")

# With more token ids, or more inputs, a call begins off the event loop: these take a millisecond.
_MANY_IDS = 16_384
_MANY_INPUTS = 1_000

# A text, a pair, the token ids of one input exactly as they are to be run, an image, or one within a text.
ModelInput: TypeAlias = "Input | list[int] | ImageInput | ImagesInText"

# What is kept of a row of an encoding.
Reduce: TypeAlias = Callable[[Row, Encoding], Mapping[str, Any]]

NOT_YET = Encoding(np.zeros(0, np.int32))

# Errors that may be an input's own: of its text, and of what the engine makes of it.
_OF_AN_INPUT = (InvalidRequestError, EngineError)


class ModelRequest(msgspec.Struct, frozen=True):
    """A request to a model: its inputs, and how they are read. Tasks add their fields.

    ``options`` apply to texts and pairs; token ids are run exactly as given, images as their processor makes them.
    ``failed`` asks for a partial answer: an invalid input, or one that the engine fails on, fails alone. It has the
    errors of inputs that are known before, by their places; these are not run. None: the first error fails the request.
    ``adapter``: of the weights that read all inputs, token ids too (``bei.core.Encoding``).
    """

    inputs: Seq[ModelInput]
    options: EncodingOptions = AS_CONFIGURED
    failed: Mapping[int, BeiError] | None = None
    adapter: int = 0


class InferenceResult(msgspec.Struct, frozen=True):
    """The engine's rows, the encoding of each input, and the places of inputs that were cut.

    ``errors``, of a partial answer: the errors of inputs, by their places. They have no row (the rows of the others
    stand one after the other) and an encoding without tokens.
    """

    rows: list[Row]
    encodings: list[Encoding]
    truncated: list[int]
    errors: Mapping[int, BeiError]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each input, special tokens included."""
        return [encoding.num_tokens for encoding in self.encodings]

    @property
    def row_encodings(self) -> list[Encoding]:
        """The encoding of each row's input."""
        if not self.errors:
            return self.encodings
        return [encoding for index, encoding in enumerate(self.encodings) if index not in self.errors]

    def spread(self, values: Seq[T], nothing: T) -> list[T]:
        """``values``, one a row, in the places of all inputs; ``nothing`` for inputs with errors."""
        if not self.errors:
            return [*values]
        rest = iter(values)
        return [nothing if index in self.errors else next(rest) for index in range(len(self.encodings))]

    def spread_rows(self, values: Float32Array) -> Float32Array:
        """``values`` [rows, width] in the places of all inputs: [n, width], zeros for inputs with errors."""
        if not self.errors:
            return values
        whole = np.zeros((len(self.encodings), values.shape[1]), np.float32)
        whole[[index for index in range(len(whole)) if index not in self.errors]] = values
        return whole


class PendingCall:
    """An answer for each input of a request, or one error. Safe in threads.

    ``outputs``: the engine's outputs that rows have; without any the engine is not asked. Exactly one call of
    ``record``, ``fail`` and ``fail_at`` returns True: then it is done.
    """

    # Defaults of the class: most calls keep them.
    times: CallTimes | None = None
    error: BeiError | None = None
    is_done = False

    def __init__(
        self,
        request_id: int,
        request: ModelRequest,
        ticket: Ticket,
        outputs: AbstractSet[str] = frozenset(),
        reduce: Reduce | None = None,
    ) -> None:
        num_inputs = len(request.inputs)
        self.request_id = request_id
        self.request = request
        self.is_partial = request.failed is not None
        self.ticket = ticket
        self.outputs = frozenset(outputs)
        self.reduce = reduce
        self.encodings = [NOT_YET] * num_inputs
        self.rows: list[Row | None] = [None] * num_inputs
        self.errors: dict[int, BeiError] = {**request.failed} if request.failed else {}
        self.done = asyncio.get_running_loop().create_future()
        self._remaining = num_inputs - len(self.errors)
        self._lock = threading.Lock()

    def record(self, index: int, row: Row) -> bool:
        """Store the answer to input ``index``; True if it was the last one."""
        with self._lock:
            if self.is_done:
                return False
            self.rows[index] = row
            self._remaining -= 1
            self.is_done = self._remaining == 0
            return self.is_done

    def fail_at(self, index: int, error: BeiError) -> bool:
        """Answer input ``index`` with ``error``, or the whole call, where the error is not the input's own or the
        answer is not partial; True if it is done by that."""
        if not self.is_partial or not isinstance(error, _OF_AN_INPUT) or isinstance(error, EngineDeadError):
            return self.fail(error)
        with self._lock:
            if self.is_done:
                return False
            self.errors[index] = error
            self.encodings[index] = NOT_YET
            self._remaining -= 1
            self.is_done = self._remaining == 0
            return self.is_done

    def fail(self, error: BeiError) -> bool:
        """Answer the whole call with ``error``; False if it was done already."""
        with self._lock:
            if self.is_done:
                return False
            self.error = error
            self.is_done = True
            return True

    def cancel(self) -> None:
        """The caller has left."""
        with self._lock:
            self.is_done = True


def encoding_of_ids(ids: Seq[int], manifest: Manifest) -> Encoding:
    """Token ids as the engine gets them. Raises InvalidRequestError for ids that the model cannot read."""
    if not manifest.reads_texts:
        raise no_texts(manifest.name, "input")
    if not ids:
        raise EmptyInputError("An input of token ids is empty: leave it out.", "input")
    if len(ids) > manifest.max_seq_len:
        raise InputTooLongError(
            f"An input has {len(ids)} token ids, the model takes up to {manifest.max_seq_len}: shorten it.", "input"
        )
    if min(ids) < 0 or max(ids) >= manifest.spec.vocab_size:
        raise InvalidRequestError(
            f"Token ids must be from 0 to {manifest.spec.vocab_size - 1}: use the tokenizer of {manifest.name}, "
            "or send texts.",
            "input",
        )
    tower = manifest.image_tower
    if tower is not None and tower.sequence and tower.sequence.token_id in ids:
        raise InvalidRequestError(
            f"Token id {tower.sequence.token_id} stands for an image in {manifest.name}: send the image itself.",
            "input",
        )
    return Encoding(np.array(ids, np.int32))


def is_large(inputs: Seq[ModelInput]) -> bool:
    """True if to begin a call with ``inputs`` would block the event loop for long."""
    return len(inputs) > _MANY_INPUTS or sum([len(ids) for ids in inputs if isinstance(ids, list)]) > _MANY_IDS
