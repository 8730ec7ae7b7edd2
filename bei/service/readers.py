"""How the inputs of one model become encodings: threads for texts and for images, and what both will cost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq

from bei.core import Encoding
from bei.image.source import ImageInput
from bei.service.admission import NO_DEMAND, Demand, estimated_length
from bei.service.call import ModelInput
from bei.service.image_side import ImageSide, no_images
from bei.tokenizer.encoder import EncodingOptions, Input, TextEncoder
from bei.tokenizer.pool import AnyInput, TokenizerPool


class InputReaders:
    """The pools of the model ``name``. ``images``: None where it reads texts only. ``close`` ends the threads."""

    def __init__(
        self, name: str, encoder: TextEncoder, images: ImageSide | None, max_seq_len: int, num_threads: int
    ) -> None:
        self.images = images
        self._name = name
        self._max_seq_len = max_seq_len
        self._texts = TokenizerPool(encoder, num_threads)
        self._decoders = None if images is None else TokenizerPool(images.encoder, num_threads, "image")

    @property
    def is_alive(self) -> bool:
        """True while every thread works."""
        return self._texts.is_alive and (self._decoders is None or self._decoders.is_alive)

    def close(self) -> None:
        """Finish what is queued, then end the threads. Blocks."""
        self._texts.close()
        if self._decoders is not None:
            self._decoders.close()

    def encode_inline(self, value: Input, options: EncodingOptions) -> Encoding:
        """As ``TokenizerPool.encode_inline``."""
        return self._texts.encode_inline(value, options)

    def by_pool(self, inputs: Mapping[int, AnyInput]) -> Iterator[tuple[TokenizerPool, dict[int, AnyInput]]]:
        """``inputs``, by their places, divided among the pools that read them. Raises InvalidImageError."""
        images: dict[int, AnyInput] = {place: one for place, one in inputs.items() if isinstance(one, ImageInput)}
        if images and self._decoders is None:
            raise no_images(self._name, "input")
        if len(images) < len(inputs):
            yield self._texts, {place: value for place, value in inputs.items() if place not in images}
        if images and self._decoders is not None:
            yield self._decoders, images

    def estimated_lengths(self, inputs: Seq[ModelInput], *, whole: bool = False) -> list[int]:
        """Tokens of each input; of texts a guess. ``whole``: texts are not cut to what the model takes."""
        most = sys.maxsize if whole else self._max_seq_len
        of_image = 0 if self.images is None else self.images.encoder.num_tokens
        return [
            estimated_length(len(value), most)
            if isinstance(value, str)
            else len(value)
            if isinstance(value, list)
            else of_image
            if isinstance(value, ImageInput)
            else estimated_length(len(value[0]) + len(value[1]), most)
            for value in inputs
        ]

    def demand(self, of_texts: Callable[[Seq[int]], Demand], inputs: Seq[ModelInput], *, whole: bool) -> Demand:
        """The estimated demand of ``inputs``, each by what its tower's steps cost. ``of_texts``: of so many tokens
        each."""
        texts = [value for value in inputs if not isinstance(value, ImageInput)]
        demand = of_texts(self.estimated_lengths(texts, whole=whole)) if texts else NO_DEMAND
        if len(texts) < len(inputs) and self.images is not None:
            demand = demand.plus(self.images.demand(len(inputs) - len(texts)))
        return demand
