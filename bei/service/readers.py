"""How the inputs of one model become encodings: threads for texts, images and labels, and what they will cost."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq

from bei.core import Encoding
from bei.errors import BeiError
from bei.image.source import ImageInput, ImagesInText
from bei.service.admission import NO_DEMAND, Demand, estimated_length
from bei.service.call import ModelInput
from bei.service.image_side import ImageSide, no_images, no_texts
from bei.service.label_side import LabelSide
from bei.tokenizer.encoder import EncodingOptions, Input, TextEncoder
from bei.tokenizer.label_encoder import LabelText
from bei.tokenizer.pool import AnyInput, TokenizerPool

_OF_SECOND = (ImageInput, ImagesInText, LabelText)
# Of a request: a pair has the images of its query, up to 64, however many pairs there are, and the event loop waits.
_MOST_WITHIN = 500


class InputReaders:
    """The pools of the model ``name``. ``encoder``: None where it reads images only. ``second``: what its second tower
    reads, or its only one that reads no texts; None where it reads texts only. ``close`` ends the threads."""

    def __init__(
        self,
        name: str,
        encoder: TextEncoder | None,
        second: ImageSide | LabelSide | None,
        max_seq_len: int,
        num_threads: int,
    ) -> None:
        self.images = second if isinstance(second, ImageSide) else None
        self._label_costs = second.costs if isinstance(second, LabelSide) else None
        self._name = name
        self._encoder = encoder
        self._max_seq_len = max_seq_len
        self._texts = None if encoder is None else TokenizerPool(encoder, num_threads)
        self._second = None if second is None else _second_pool(second, num_threads)

    @property
    def encoder(self) -> TextEncoder:
        """Of texts. Raises InvalidRequestError where the model reads none."""
        if self._encoder is None:
            raise no_texts(self._name, "input")
        return self._encoder

    @property
    def is_alive(self) -> bool:
        return all(pool.is_alive for pool in self._pools)

    def close(self) -> None:
        """Finish what is queued, then end the threads. Blocks."""
        for pool in self._pools:
            pool.close()

    def encode_inline(self, value: Input, options: EncodingOptions) -> Encoding:
        """As ``TokenizerPool.encode_inline``. Raises InvalidRequestError where the model reads no texts."""
        pool = self._second if isinstance(value, LabelText) else self._texts
        if pool is None:
            raise no_texts(self._name, "input")
        return pool.encode_inline(value, options)

    def by_pool(self, inputs: Mapping[int, AnyInput]) -> Iterator[tuple[TokenizerPool | BeiError, dict[int, AnyInput]]]:
        """``inputs``, by their places, divided among the pools that read them; in place of a pool that the model has
        not, the error of such inputs."""
        second = {place: one for place, one in inputs.items() if isinstance(one, _OF_SECOND)}
        if len(second) < len(inputs):
            texts = {place: value for place, value in inputs.items() if place not in second}
            yield self._texts or no_texts(self._name, "input"), texts
        if image := next((one for one in second.values() if isinstance(one, ImageInput | ImagesInText)), None):
            param = (image if isinstance(image, ImageInput) else image.images[0]).param
            yield (None if self.images is None else self._second) or no_images(self._name, param), {**second}
        elif second:
            assert self._second is not None, "tasks send labels where there is a tower of labels"
            yield self._second, {**second}

    def estimated_lengths(self, inputs: Seq[ModelInput], *, whole: bool = False, num_around: int = 0) -> list[int]:
        """Tokens of each input; of texts a guess. ``whole``: texts are not cut to what the model takes. ``num_around``:
        characters that are read with each text or pair."""
        most = sys.maxsize if whole else self._max_seq_len
        return [
            estimated_length(len(value) + num_around, most)
            if isinstance(value, str)
            else len(value)
            if isinstance(value, list)
            else self._tokens_of(value)
            if isinstance(value, ImageInput)
            else sum(map(self._tokens_of, value.images)) + estimated_length(value.num_chars, most)
            if isinstance(value, ImagesInText)
            else estimated_length(len(value[0]) + len(value[1]) + num_around, most)
            for value in inputs
        ]

    def demand(
        self, of_texts: Callable[[Seq[int]], Demand], inputs: Seq[ModelInput], *, whole: bool, num_around: int = 0
    ) -> Demand:
        """The estimated demand of ``inputs``, each by what its tower's steps cost. ``of_texts``: of so many tokens
        each."""
        if self.images is None:
            return of_texts(self.estimated_lengths(inputs, whole=whole, num_around=num_around))
        texts = [value for value in inputs if not isinstance(value, ImageInput | ImagesInText)]
        images = [value for value in inputs if isinstance(value, ImageInput)]
        demand = of_texts(self.estimated_lengths(texts, whole=whole, num_around=num_around)) if texts else NO_DEMAND
        if images:
            demand = demand.plus(self.images.demand(images))
        if within := [value for value in inputs if isinstance(value, ImagesInText)]:
            demand = demand.plus(self._demand_within(self.images, of_texts, within))
        return demand

    def demand_of_labels(self, labels: Seq[AnyInput]) -> Demand:
        """The estimated demand of labels that are vectors, by the costs of their tower, as if none was asked lately."""
        if self._label_costs is None:
            return NO_DEMAND
        lengths = self.estimated_lengths(labels)
        return Demand(sum(lengths), sum(map(self._label_costs.sequence_seconds, lengths)))

    def _demand_within(
        self, images: ImageSide, of_texts: Callable[[Seq[int]], Demand], inputs: Seq[ImagesInText]
    ) -> Demand:
        """Of images in texts; of very many such inputs some, which are drawn by chance, stand for all."""
        some = inputs if len(inputs) <= _MOST_WITHIN else random.sample(inputs, _MOST_WITHIN)
        texts = of_texts([estimated_length(value.num_chars, self._max_seq_len) for value in some])
        found = texts.plus(images.demand([image for value in some for image in value.images]))
        return share_of(found, len(inputs) / len(some))

    def _tokens_of(self, image: ImageInput) -> int:
        if self.images is None:
            return 0
        encoder = self.images.encoder
        return encoder.num_tokens(encoder.num_states(image))

    @property
    def _pools(self) -> list[TokenizerPool]:
        return [pool for pool in (self._texts, self._second) if pool is not None]


def share_of(demand: Demand, part: float) -> Demand:
    """``part`` of ``demand``, or so many times as much; of all of it itself."""
    if part == 1.0:
        return demand
    return demand._replace(num_tokens=round(part * demand.num_tokens), seconds=part * demand.seconds)


def _second_pool(side: ImageSide | LabelSide, num_threads: int) -> TokenizerPool:
    """The threads that read what a model's second tower gets."""
    if isinstance(side, ImageSide):
        # A thread more: engines leave all cores to these between their steps.
        return TokenizerPool(side.encoder, num_threads + 1, "image", side.turns)
    return TokenizerPool(side.encoder, num_threads, "label")
