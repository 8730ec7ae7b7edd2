"""An image of a request, not decoded yet."""

from __future__ import annotations

import base64
import binascii
import stat
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from bei.errors import InvalidImageError, InvalidRequestError
from bei.image.fetch import ImageFetcher

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")
ErrorT = TypeVar("ErrorT", bound=InvalidRequestError)

_DATA_URL = "data:"
_MOST_HEAD_CHARS = 1000  # of a data URL, before its base64
_FETCHED = ("http", "https")
_SHOWN_CHARS = 60
_PIECE_CHARS = 1 << 18
_PIXEL_BYTES = 4  # of a pixel in Pillow's memory


@dataclass(frozen=True, slots=True, eq=False)
class ImageInput:
    """``content``: the bytes of a file, the same as a data URL or base64, an opened image, or the path of a file of
    this machine, which is read where the image is decoded. ``param``: the field that errors blame, and ``place`` among
    several inputs in it; None: it is the only one. An opened image, which has no hash, is equal to itself alone."""

    content: bytes | str | Path | Image
    param: str = "input"
    place: int | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ImageInput) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, str]:
        return self.content if isinstance(self.content, bytes | str | Path) else id(self.content), self.param

    @property
    def num_bytes(self) -> int:
        """About the size of the file; 0 of an opened image. Raises InvalidImageError for a path without a file."""
        if isinstance(self.content, Path):
            with self._reading(self.content):
                found = self.content.stat()
            if not stat.S_ISREG(found.st_mode):  # a pipe or a device may have no end
                raise InvalidImageError(
                    f"An image cannot be read (it is no file: {self.content}): name one.", self.param
                )
            return found.st_size
        if isinstance(self.content, bytes):
            return len(self.content)
        return len(self.content) * 3 // 4 if isinstance(self.content, str) else 0

    @property
    def held_bytes(self) -> int:
        """Bytes that it keeps in memory, about: none of a path, and all pixels of an opened image."""
        if isinstance(self.content, bytes | str):
            return len(self.content)
        return 0 if isinstance(self.content, Path) else self.content.width * self.content.height * _PIXEL_BYTES

    def file_bytes(self, fetcher: ImageFetcher | None = None) -> bytes:
        """The bytes of the file, whose content is not an opened image. Raises InvalidImageError, also for URLs without
        ``fetcher``."""
        if isinstance(self.content, Path):
            with self._reading(self.content):
                return self.content.read_bytes()
        if isinstance(self.content, bytes):
            return self.content
        assert isinstance(self.content, str)
        if fetcher is not None and self.content[:_SHOWN_CHARS].partition(":")[0].lower() in _FETCHED:
            return fetcher.fetch(self.content, self.param)
        try:
            return _from_base64(self.content, _base64_start(self.content, self.param))
        except ValueError as error:  # binascii.Error is one
            raise InvalidImageError(f"An image is not base64 ({error}): encode the file's bytes.", self.param) from None

    def first_bytes(self, num_bytes: int) -> bytes:
        """About so many bytes that the file begins with, of bytes or of base64. Raises InvalidImageError, ValueError
        for what is neither."""
        if isinstance(self.content, bytes):
            return self.content[:num_bytes]
        assert isinstance(self.content, str), "the caller has asked"
        start = _base64_start(self.content, self.param)
        return base64.b64decode(self.content[start : start + num_bytes // 3 * 4], validate=True)

    @contextmanager
    def _reading(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InvalidImageError(
                f"An image cannot be read ({error.strerror}: {path}): name a file.", self.param
            ) from error


def placed(value: T, place: int) -> T:
    """``value``, whose images errors name by its ``place`` among others."""
    if isinstance(value, ImageInput):
        return replace(value, place=place)
    if isinstance(value, MixedInput):
        return replace(value, parts=(*(placed(part, place) for part in value.parts),))
    return value


def named_error(error: ErrorT, images: Seq[ImageInput], one: ImageInput | None = None) -> ErrorT:
    """``error`` of an input with ``images``. Its message says which of several inputs that is and, where it is about
    ``one`` of several images there, which of these."""
    named = one or next((image for image in images if image.place is not None), images[0])
    where = named.param if named.place is None else f"{named.param} {named.place}"
    beside = [image for image in images if image.param == named.param]  # a pair has those of both sides
    if one is not None and len(beside) > 1:
        where += f", image {[*map(id, beside)].index(id(one))}"
    elif named.place is None:
        return error
    return type(error)(f"{where}: {error}", error.param)


@dataclass(frozen=True, slots=True)
class MixedInput:
    """One input of texts and images in order, for models whose decoder reads both; it has an image."""

    parts: tuple[str | ImageInput, ...]

    @property
    def images(self) -> list[ImageInput]:
        """In their order."""
        return [part for part in self.parts if isinstance(part, ImageInput)]

    @property
    def text(self) -> str:
        """Its texts, a line each."""
        return "\n".join(part for part in self.parts if isinstance(part, str))

    @property
    def held_bytes(self) -> int:
        """As of an image."""
        return sum(len(part) if isinstance(part, str) else part.held_bytes for part in self.parts)


class MadeOnce(Generic[T]):
    """What is made of an image that several inputs of a request have: by the first thread that asks for it, for all. An
    image that cannot be read is not fetched and decoded again either."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: T | None = None
        self._error: Callable[[], InvalidRequestError] | None = None

    def of(self, make: Callable[[], T]) -> T:
        """The result of the first ``make``. Raises its InvalidRequestError, each caller one of its own: a traceback
        would grow with each that raises the same one, and keep what its frames hold."""
        with self._lock:
            if self._error is not None:
                raise self._error()
            if self._made is None:
                try:
                    self._made = make()
                except InvalidRequestError as error:
                    self._error = partial(type(error), str(error), error.param)
                    raise
            return self._made


@dataclass(frozen=True, slots=True)
class ImagesInText:
    """Images among the text that a decoder reads: ``texts`` stand before the first image, between two, and behind the
    last, each in pieces. A piece is tokenized by itself, and its parts are joined only then: a query that many pairs
    have stands in memory once. ``shared``: of each image that other inputs of the request have too; None: they have
    it not. ``is_input``: the tokens that stand around every text stand around it too; not around pairs, whose template
    has all of them. ``last_ids``: tokens behind all of these."""

    texts: tuple[tuple[tuple[str, ...], ...], ...]
    images: tuple[ImageInput, ...]
    shared: tuple[MadeOnce[Any] | None, ...] | None = field(default=None, compare=False)
    is_input: bool = False
    last_ids: tuple[int, ...] = ()

    @property
    def num_chars(self) -> int:
        """Of the text."""
        return sum(len(part) for pieces in self.texts for piece in pieces for part in piece)


def _from_base64(value: str, start: int) -> bytes:
    """What ``base64.b64decode`` makes of ``value`` from ``start`` on, with its errors. It holds the interpreter's lock,
    tens of ms for 8 MB: so it gets pieces, between which the event loop goes on."""
    pieces = []
    for first in range(start, len(value), _PIECE_CHARS):
        piece = value[first : first + _PIECE_CHARS]
        pieces.append(base64.b64decode(piece, validate=True))
        if first + _PIECE_CHARS < len(value) and len(pieces[-1]) * 4 < 3 * _PIECE_CHARS:
            raise binascii.Error("Excess data after padding")
    return b"".join(pieces)


def _base64_start(value: str, param: str) -> int:
    """Where the base64 of a file begins. Raises InvalidImageError for a text that holds none."""
    if value[: len(_DATA_URL)].lower() == _DATA_URL:
        end = value.find(",", 0, _MOST_HEAD_CHARS)
        head = value[: max(0, end)].lower()
        if not head.endswith(";base64"):
            raise InvalidImageError('A data URL of an image begins with "data:image/png;base64,", say.', param)
        if not head.startswith("data:image/"):
            raise InvalidImageError(f"A data URL holds {head[5:_SHOWN_CHARS]!a}, which is no image.", param)
        return end + 1
    if ":" in value[:_SHOWN_CHARS] or value.startswith("//"):  # base64 has no colon
        raise InvalidImageError(
            "This server fetches no URLs: send the image itself, as a data URL (data:image/png;base64,...), or name "
            "hosts in its setting image_url_hosts.",
            param,
        )
    return 0
