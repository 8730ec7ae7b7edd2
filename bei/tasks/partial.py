"""What became of each input of a request: one that is wrong, or fails the engine, may cost the others nothing."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Protocol, TypeVar

import msgspec

from bei.errors import BeiError
from bei.service.admission import Ticket
from bei.service.call import Reduce
from bei.service.service import Answer, InferenceService
from bei.service.submission import ModelInput
from bei.tokenizer.encoder import EncodingOptions

T = TypeVar("T")


class Fates(Protocol):
    """What became of inputs, in the answer of a task. ``truncated`` lists those that were cut.

    Where a part of the answer was asked for: ``errors`` of single inputs, by their places, which have no result, and
    ``lengths``, the tokens of each input.
    """

    @property
    def truncated(self) -> Seq[int]: ...

    @property
    def errors(self) -> Mapping[int, BeiError]: ...

    @property
    def lengths(self) -> Seq[int]: ...


class CallFates(msgspec.Struct, frozen=True):
    """``Fates`` of a call."""

    truncated: list[int]
    errors: Mapping[int, BeiError]
    lengths: Seq[int]

    def spread(self, values: Seq[T], nothing: T) -> list[T]:
        """``values`` of the inputs without errors, in the places of all."""
        if not self.errors:
            return [*values]
        rest = iter(values)
        return [nothing if index in self.errors else next(rest) for index in range(len(self.lengths))]


async def tried(
    service: InferenceService,
    inputs: Seq[ModelInput],
    wrong: Mapping[int, BeiError] | None,
    *,
    ticket: Ticket,
    output: str | None,
    options: EncodingOptions,
    reduce: Reduce | None = None,
) -> tuple[Answer, CallFates]:
    """What ``infer`` gives for ``inputs``, and what became of them; without ``output`` they are only tokenized.
    ``wrong`` asks for a part of the answer, where not all can be had: it holds the errors of inputs, by their places,
    that are not to be tried."""
    places = [index for index in range(len(inputs)) if index not in wrong] if wrong else range(len(inputs))
    if wrong and not places:
        return Answer([], [], [], {}), CallFates([], wrong, [0] * len(inputs))
    given, in_part = [inputs[index] for index in places] if wrong else inputs, wrong is not None
    outputs = set() if output is None else {output}
    answer = await service.infer(given, ticket=ticket, outputs=outputs, options=options, reduce=reduce, in_part=in_part)
    if wrong is None:
        return answer, CallFates(answer.truncated, {}, ())
    errors = {**wrong, **{places[index]: error for index, error in answer.errors.items()}}
    lengths = [0] * len(inputs)
    for index, encoding in zip(places, answer.encodings, strict=True):
        lengths[index] = encoding.num_tokens
    return answer, CallFates([places[index] for index in answer.truncated], errors, lengths)
