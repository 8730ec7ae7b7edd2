"""From a call's inputs to the engine port: token ids at once, texts by way of the tokenizers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeAlias

import numpy as np

from bei.artifact.manifest import Manifest
from bei.core import Encoding
from bei.errors import BeiError, InputTooLongError, InvalidRequestError
from bei.metrics.registry import ModelMetrics
from bei.port import EnginePort, Item, Submission
from bei.service.admission import Admission, Demand, Ticket, estimated_length
from bei.service.call import Call
from bei.tokenizer.encoder import EncodingOptions, Input
from bei.tokenizer.pool import TokenizerPool, takes_little, takes_long

# Of one submission: the port's lock is held meanwhile, and others ask for its state (25 ms for 2,560).
_MOST_ITEMS = 256

# What can be asked of a model: a text, a pair, or the token ids of one input exactly as they are to be run.
ModelInput: TypeAlias = "Input | list[int]"


class Feeder:
    """Gives the inputs of calls to the tokenizers and the engine port of one model. Safe in threads.

    ``is_open``: whether the call with this request id has not ended. ``wake`` lets the callers of calls go on.
    """

    def __init__(
        self,
        manifest: Manifest,
        tokenizers: TokenizerPool,
        port: EnginePort,
        admission: Admission,
        metrics: ModelMetrics,
        is_open: Callable[[int], bool],
        wake: Callable[[list[Call]], None],
    ) -> None:
        self._manifest = manifest
        self._tokenizers = tokenizers
        self._port = port
        self._admission = admission
        self._metrics = metrics
        self._is_open = is_open
        self._wake = wake

    def estimated_lengths(self, inputs: Seq[ModelInput], *, whole: bool = False) -> list[int]:
        """Tokens of each input; of texts a guess. ``whole``: texts are not cut to what the model takes."""
        most = sys.maxsize if whole else self._manifest.max_seq_len
        return [
            estimated_length(len(value), most)
            if isinstance(value, str)
            else len(value)
            if isinstance(value, list)
            else estimated_length(len(value[0]) + len(value[1]), most)
            for value in inputs
        ]

    def start(self, call: Call, inputs: Seq[ModelInput], options: EncodingOptions, wanted: frozenset[str]) -> None:
        """Hand token ids to the engine, and texts to the tokenizers, unless a text takes less time than that.

        Raises InvalidRequestError for ids that are wrong, unless the call is answered in part.
        """
        if len(inputs) == 1 and call.ticket.lane == "interactive" and takes_little(inputs[0]):
            self._start_at_once(call, inputs[0], options, wanted)
            return
        given = self._encodings_of_ids(call, inputs)
        texts = {i: value for i, value in enumerate(inputs) if not isinstance(value, list)}
        if given:
            call.ticket.count_tokens(sum(encoding.num_tokens for encoding in given.values()))
            items = [Item(index, encoding) for index, encoding in given.items()]
            for first in range(0, len(items), _MOST_ITEMS):
                part = items[first : first + _MOST_ITEMS]
                demand = self._admission.demand([encoding.num_tokens for _, encoding in part])
                self._submit(call, part, demand, wanted)
        if texts:
            self.tokenize(call, texts, options, lambda items, demand: self._submit(call, items, demand, wanted))

    def tokenize(
        self,
        call: Call,
        texts: dict[int, Input],
        options: EncodingOptions,
        on_items: Callable[[list[Item], Demand], None],
    ) -> None:
        """Tokenize ``texts``, by their places in the call. ``on_items`` gets them in chunks, with the demand that they
        were admitted for, in a tokenizer's thread."""
        places, inputs = list(texts), list(texts.values())

        def on_encoded(start: int, encodings: list[Encoding]) -> None:
            call.ticket.count_tokens(sum(encoding.num_tokens for encoding in encodings))
            items = [Item(places[start + i], encoding) for i, encoding in enumerate(encodings)]
            on_items(items, self._demand_of(call.ticket, inputs[start : start + len(items)], whole=options.whole))

        self._tokenizers.submit(
            inputs,
            on_encoded,
            lambda index, error: self._fail_at(call, places[index], error),
            lambda: call.is_done,
            options,
            is_urgent=call.ticket.lane == "interactive" and not takes_long(inputs, options),
            one_by_one=call.in_part,
        )

    def _start_at_once(self, call: Call, value: Input, options: EncodingOptions, wanted: frozenset[str]) -> None:
        """Tokenize the only input of ``call`` in this thread, and hand it to the engine."""
        try:
            encoding = self._tokenizers.encoded_at_once(value, options)
            call.ticket.count_tokens(encoding.num_tokens)
            self._submit(call, [Item(0, encoding)], self._demand_of(call.ticket, [value]), wanted)
        except BeiError as error:
            self._fail_at(call, 0, error)

    def _demand_of(self, ticket: Ticket, inputs: Seq[Input], *, whole: bool = False) -> Demand:
        """The share of the ticket's estimate that these inputs account for. It is taken off the estimate now that their
        real token count is known."""
        if len(inputs) == ticket.num_inputs:
            return ticket.admitted
        return self._admission.demand(self.estimated_lengths(inputs, whole=whole))

    def _fail_at(self, call: Call, index: int, error: BeiError) -> None:
        if call.fail_at(index, error):
            self._wake([call])

    def _submit(self, call: Call, items: list[Item], admitted: Demand, outputs: frozenset[str]) -> None:
        """Hand tokenized inputs to the engine, or end here where nothing of it is wanted. ``admitted``: what they were
        admitted for."""
        if call.is_done:  # cancelled meanwhile
            return
        for index, encoding in items:
            call.encodings[index] = encoding
        call.ticket.moved(admitted, sum(encoding.num_tokens for _, encoding in items) if outputs else 0)
        ticket = call.ticket
        if call.times is not None:
            call.times.submitted(items)
        if not ticket.is_own:
            self._metrics.tokenized(ticket.lane, len(items), time.monotonic() - ticket.accepted_s)
        if not outputs:
            self._answer(call, items)
            return
        if items[0].encoding.spans is not None:  # of no use to an engine
            items = [Item(index, encoding._replace(spans=None)) for index, encoding in items]
        self._port.submit(Submission(call.request_id, ticket.lane, outputs, items, ticket.deadline_s))
        if not self._is_open(call.request_id):  # it ended meanwhile, and was taken back before this came
            self._port.cancel(call.request_id)

    def _answer(self, call: Call, items: list[Item]) -> None:
        """Of a call that wants nothing of the engine: it has its encodings."""
        for place, _ in items:
            if call.times is not None:
                call.times.answered(place, None)
            if call.record(place, {}):
                self._wake([call])
        if not call.ticket.is_own:
            self._metrics.input_answers(call.ticket.lane, len(items), time.monotonic() - call.ticket.accepted_s)

    def _encodings_of_ids(self, call: Call, inputs: Seq[ModelInput]) -> dict[int, Encoding]:
        found = {}
        for index, value in enumerate(inputs):
            if isinstance(value, list):
                try:
                    found[index] = self._encoding_of_ids(value)
                except InvalidRequestError as error:
                    if not call.in_part:
                        raise
                    self._fail_at(call, index, error)
        return found

    def _encoding_of_ids(self, ids: Seq[int]) -> Encoding:
        manifest = self._manifest
        if not ids:
            raise InvalidRequestError("An input of token ids is empty: leave it out.", "input")
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
        return Encoding(np.array(ids, np.int32))
