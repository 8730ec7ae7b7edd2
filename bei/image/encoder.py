"""Images to encodings: decoded, resized, cropped, and cut into patches. What ``TextEncoder`` is for texts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Protocol

import numpy as np

from bei.artifact.image_processor import MOST_STRETCHED, ImageProcessor
from bei.artifact.image_sequence import ImageSequence
from bei.core import Encoding, ImagePatches, Levels, PlacedImage, UInt8Array
from bei.errors import InputTooLongError, InvalidImageError, InvalidRequestError
from bei.image.decode import ImageLimits, decoded
from bei.image.header import check_sizes, size_by_header
from bei.image.source import ImageInput, ImagesInText, named_error

if TYPE_CHECKING:
    from PIL.Image import Image

_DIGEST_BYTES = 32
# A side of a resized image that is then cropped: a stripe of 100,000 by 1 pixels would have 22 million columns.
_MOST_RESIZED_PIXELS = 64_000_000
_LEAST_SCALE, _MOST_SCALE, _SCALE_TOLERANCE = 1e-6, 100.0, 1e-5


class TextsOfImages(Protocol):
    """Encodes texts that images stand in (``bei.tokenizer.pieces``), for a model of ``max_seq_len`` tokens."""

    max_seq_len: int

    @property
    def around(self) -> tuple[list[int], list[int]]:
        """The special tokens before and behind every text."""

    def ids_of(self, pieces: Seq[Seq[str]], most: int) -> list[int]:
        """The tokens of pieces of a text, each in parts, one after the other; of a longer piece the first ``most``.
        Raises InvalidRequestError."""


class OptionsOfTexts(Protocol):
    """What an encoder reads of a request's options of texts."""

    @property
    def max_tokens(self) -> int | None:
        """The most that are read; None: the model's."""

    @property
    def add_special_tokens(self) -> bool:
        """Whether the special tokens of every text are put around it."""


class ImageEncoder:
    """Encodings of images for a tower with patches of ``patch_size`` pixels, of images of ``image_size`` (height and
    width), or of any that the processor makes (``most_patches``), behind ``num_leading`` tokens without pixels.
    ``sequence``: how a decoder reads the tower's states; None: none does. ``texts``: the encoder of texts that images
    stand in; None: they stand in none. Safe in threads."""

    def __init__(
        self,
        processor: ImageProcessor,
        image_size: tuple[int, int],
        patch_size: int,
        *,
        num_leading: int,
        limits: ImageLimits,
        sequence: ImageSequence | None = None,
        texts: TextsOfImages | None = None,
    ) -> None:
        self._texts = texts
        self._sequence = sequence
        self._processor = processor
        self._image_size = image_size
        self._patch_size = patch_size
        self._num_leading = num_leading
        self._limits = limits
        height, width = image_size
        self._has_one_size = processor.most_patches(patch_size) is None
        most = processor.most_patches(patch_size) or (height // patch_size) * (width // patch_size)
        self._most_states = most + num_leading

    def num_states(self, source: ImageInput) -> int:
        """Tokens that ``source`` has in the tower, by its header; the most of an image where that does not say it."""
        resized = self._processor.by_pixels
        if resized is None or (size := size_by_header(source)) is None:
            return self._most_states
        if min(size) < 1 or (self._processor.bounds and max(size) > MOST_STRETCHED * min(size)):
            return self._most_states  # it will be refused
        height, width = resized.size(*size)
        return height * width // self._patch_size**2

    def num_tokens(self, num_states: int) -> int:
        """Tokens of an image with so many in the tower, as they are counted."""
        return num_states if self._sequence is None else self._sequence.num_tokens(num_states)

    def encode(
        self,
        inputs: Seq[ImageInput | ImagesInText],
        options: OptionsOfTexts | None = None,
        common: object = None,
        check: Callable[[], None] = lambda: None,
    ) -> list[Encoding]:
        """The encodings of ``inputs``. ``options`` are of texts, also of those around an image. ``check`` is called
        before each image, and may raise. Raises InvalidImageError, and InvalidRequestError of such texts."""
        encodings = []
        for source in inputs:
            check()
            if isinstance(source, ImagesInText):
                encodings.append(self._within_text(source, options, check))
            else:
                encodings.append(self.encoding_of(self.levels(source)))
        return encodings

    def _within_text(self, source: ImagesInText, options: OptionsOfTexts | None, check: Callable[[], None]) -> Encoding:
        """The encoding of images and the text around them. Raises InvalidRequestError, also where it is longer than is
        read: an image cannot be cut."""
        assert self._texts is not None, "such inputs are for models with an encoder of texts"
        max_tokens = None if options is None else options.max_tokens
        most = min(self._texts.max_seq_len, max_tokens or self._texts.max_seq_len)
        with _naming(source.images):
            texts = [self._texts.ids_of(pieces, most) for pieces in source.texts]
            check_sizes(source.images, self._limits)
        if source.is_input and (options is None or options.add_special_tokens):
            first, last = self._texts.around
            texts = [[*first, *texts[0]], *texts[1:]]
            texts[-1] = [*texts[-1], *last]
        texts[-1] = [*texts[-1], *source.last_ids]
        num_tokens = sum(map(len, texts)) + len(source.images)  # an image has a token at least
        found: list[ImagePatches] = []
        for image, shared in zip(source.images, source.shared or (None,) * len(source.images), strict=True):
            check()
            with _naming(source.images):
                self._check_length(num_tokens, most, source, max_tokens)  # before the next one is decoded
            cut = partial(self._patches_of, image)
            with _naming(source.images, image):
                found.append(cut() if shared is None else shared.of(cut))
            num_tokens += self._num_tokens_of(found[-1]) - 1
        with _naming(source.images):
            self._check_length(num_tokens, most, source, max_tokens)
        return self._among(texts, found)

    def _check_length(self, num_tokens: int, most: int, source: ImagesInText, max_tokens: int | None) -> None:
        if num_tokens <= most:
            return
        whose = "model takes" if max_tokens is None else "request asks for"
        several = len(source.images) > 1
        what = f"{len(source.images)} images" if several else "An image"
        remedy = "fewer or smaller images" if several else "a smaller image"
        raise InputTooLongError(
            f"{what} and the texts read with {'them' if several else 'it'} have {num_tokens} tokens or more, the "
            f"{whose} up to {most}, and an image cannot be cut: send shorter texts, or {remedy}.",
            source.images[0].param,
        )

    def levels(self, source: ImageInput) -> Levels:
        """The image as the processor makes it, before normalization: [height, width, 3]. Raises InvalidImageError."""
        with _naming([source]):
            return self._levels(source)

    def _levels(self, source: ImageInput) -> Levels:
        levels = processed(decoded(source, self._limits), self._processor, self._patch_size, source.param)
        # A processor that does not resize.
        if self._has_one_size and levels.shape[:2] != self._image_size:
            height, width = self._image_size
            raise InvalidImageError(
                f"An image has {levels.shape[1]} x {levels.shape[0]} pixels, and the model reads {width} x {height} "
                "only: resize it.",
                source.param,
            )
        return levels

    def encoding_of(self, levels: Levels) -> Encoding:
        """The encoding of an image that is processed, [height, width, 3]."""
        patches, sequence = self._cut(levels), self._sequence
        if sequence is None:
            return Encoding(np.zeros(len(patches.levels), np.int32), image=patches)
        return self._among([sequence.before, sequence.after], [patches])

    def _patches_of(self, source: ImageInput) -> ImagePatches:
        return self._cut(self._levels(source))

    def _cut(self, levels: Levels) -> ImagePatches:
        size = self._patch_size
        rows = patches(levels, size, self._num_leading, 1 if self._sequence is None else self._sequence.side)
        grid = (levels.shape[0] // size, levels.shape[1] // size)
        digest = hashlib.blake2b(rows.data, digest_size=_DIGEST_BYTES)
        digest.update(np.array(grid, np.int32).data)  # the same patches can stand in rows of another length
        return ImagePatches(rows, digest.digest(), grid)

    def _num_tokens_of(self, image: ImagePatches) -> int:
        """That stand for it among others."""
        assert self._sequence is not None, "a decoder reads it"
        return len(image.levels) // self._sequence.side**2

    def _among(self, texts: Seq[Seq[int]], images: Seq[ImagePatches]) -> Encoding:
        """The encoding of ``images`` between the tokens of ``texts``, of which there is one more."""
        assert self._sequence is not None, "a decoder reads them"
        ids, placed = [*texts[0]], []
        for image, text in zip(images, texts[1:], strict=True):
            first, count = len(ids), self._num_tokens_of(image)
            placed.append(PlacedImage(image, np.arange(first, first + count, dtype=np.int32)))
            ids += [self._sequence.token_id] * count
            ids += text
        return Encoding(np.array(ids, np.int32), images=(*placed,))


@contextmanager
def _naming(images: Seq[ImageInput], one: ImageInput | None = None) -> Iterator[None]:
    """A context whose errors say of which input they are, and of which image (``named_error``)."""
    try:
        yield
    except InvalidRequestError as error:
        if (named := named_error(error, images, one)) is error:
            raise
        raise named from error


def processed(image: Image, processor: ImageProcessor, patch_size: int, param: str = "input") -> Levels:
    """``image`` (RGB) resized and cropped, [height, width, 3], uint8, or float32 with ``fractions``:
    transformers.image_transforms on Pillow. Raises InvalidImageError for a stripe whose resized form would be huge."""
    from PIL.Image import Resampling

    short, long = sorted(image.size)
    if processor.bounds and long > MOST_STRETCHED * short:
        raise InvalidImageError(
            f"An image has {image.width} x {image.height} pixels, and the model reads none whose longer side is more "
            f"than {MOST_STRETCHED} times the shorter: crop it.",
            param,
        )
    if size := _resized(image.height, image.width, processor, patch_size):
        height, width = size
        if height * width > _MOST_RESIZED_PIXELS:
            raise InvalidImageError(
                f"An image has {image.width} x {image.height} pixels, too narrow to be resized: crop it.", param
            )
        resample = Resampling[processor.resample.upper()]
        if processor.fractions:
            channels = (image.getchannel(index).convert("F") for index in range(3))
            return np.stack([np.asarray(channel.resize((width, height), resample)) for channel in channels], axis=2)
        image = image.resize((width, height), resample=resample)
    levels = np.asarray(image)
    return _centre(levels, *processor.crop) if processor.crop else levels


def _resized(height: int, width: int, processor: ImageProcessor, patch_size: int) -> tuple[int, int] | None:
    """Height and width after resizing; None: it is not resized."""
    if resized := processor.by_pixels:
        return resized.size(height, width)
    if processor.max_num_patches:
        return whole_patches(height, width, patch_size, processor.max_num_patches)
    if processor.shortest_edge is None:
        return processor.resize
    short, long = sorted((height, width))
    longer = int(processor.shortest_edge * long / short)
    return (longer, processor.shortest_edge) if width <= height else (processor.shortest_edge, longer)


def whole_patches(height: int, width: int, patch_size: int, most: int) -> tuple[int, int]:
    """The largest size in the image's proportions that is whole patches, ``most`` of them at most, each side rounded up
    (transformers.models.siglip2: get_image_size_for_max_num_patches, with its bounds and its tolerance)."""
    low, high = _LEAST_SCALE, _MOST_SCALE

    def grid(scale: float) -> tuple[int, int]:
        rows, columns = (max(1, ceil(side * scale / patch_size)) for side in (height, width))
        return rows, columns

    while high - low >= _SCALE_TOLERANCE:
        middle = (low + high) / 2
        rows, columns = grid(middle)
        low, high = (middle, high) if rows * columns <= most else (low, middle)
    rows, columns = grid(low)
    return rows * patch_size, columns * patch_size


def _centre(levels: UInt8Array, height: int, width: int) -> UInt8Array:
    """The centre of ``levels``, with zeros around what is smaller (transformers.image_transforms.center_crop)."""
    rows, columns = levels.shape[:2]
    top, left = (rows - height) // 2, (columns - width) // 2
    if top >= 0 and left >= 0:
        return levels[top : top + height, left : left + width]
    tall, wide = max(height, rows), max(width, columns)
    padded = np.zeros((tall, wide, 3), np.uint8)
    above, before = ceil((tall - rows) / 2), ceil((wide - columns) / 2)
    padded[above : above + rows, before : before + columns] = levels
    top, left = top + above, left + before
    return padded[max(0, top) : min(tall, top + height), max(0, left) : min(wide, left + width)]


def patches(levels: Levels, size: int, num_leading: int, side: int = 1) -> Levels:
    """Rows of patches (``ImagePatches.levels``) of ``levels`` [height, width, 3], behind ``num_leading`` rows of
    zeros, block by block of ``side`` by ``side`` patches."""
    height, width = levels.shape[0] // size // side, levels.shape[1] // size // side
    rows = np.zeros((num_leading + height * width * side * side, 3 * size * size), levels.dtype)
    cut = levels.reshape(height, side, size, width, side, size, 3).transpose(0, 3, 1, 4, 2, 5, 6)
    rows[num_leading:].reshape(height, width, side, side, size, size, 3)[...] = cut
    return rows
