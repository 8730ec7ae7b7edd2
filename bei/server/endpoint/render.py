"""Answers of handlers as JSON or MessagePack, or vectors as bytes: small ones at once, large ones piece by piece.

Rendering holds the interpreter's lock: 3 ns a byte of numbers, 11 of tokens, whose dictionaries are built first. An
answer of hundreds of megabytes would stop the server for seconds, and lie in memory whole. A handler therefore leaves
the lists of its answer as ``Items``. The bytes are the same whether they are written at once or in pieces.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import orjson
import ormsgpack

from bei.core import Float32Array
from bei.errors import NotAcceptableError
from bei.server.http.accept import MSGPACK, OCTETS
from bei.server.http.errors import JSON

T = TypeVar("T")

# What orjson writes of a float32 of an embedding, its comma included; the mean over unit vectors is 12.2.
FLOAT_BYTES = 12

# Larger answers are rendered off the event loop: the loop is held for a millisecond (numbers) to three (tokens).
INLINE_BYTES = 256_000

# About so much is rendered in one go, with the interpreter's lock held (0.4 ms).
PIECE_BYTES = 128_000


class Items:
    """A JSON list of ``count`` items that are made when they are written, each once and in order.

    ``make(start, stop)`` gives items ``start`` to ``stop`` in a list (or an array with a row for each), as orjson
    writes them or as ``Items`` again. ``num_bytes`` is about what the whole list takes.
    """

    __slots__ = ("count", "make", "num_bytes")

    def __init__(self, count: int, num_bytes: int, make: Callable[[int, int], Any]) -> None:
        self.count = count
        self.num_bytes = num_bytes
        self.make = make


class Octets:
    """``count`` vectors as bytes, nothing between them. ``make(start, stop)`` gives those of some; all of them take
    ``num_bytes``, and ``headers`` say what they are."""

    __slots__ = ("count", "headers", "make", "num_bytes")

    def __init__(
        self, count: int, num_bytes: int, make: Callable[[int, int], bytes], headers: Mapping[str, str]
    ) -> None:
        self.count = count
        self.num_bytes = num_bytes
        self.make = make
        self.headers = headers


@dataclass(frozen=True)
class Notation:
    """A notation of objects and lists. ``dumps`` writes whole ones, numpy arrays and ``Items`` among them."""

    media_type: str
    dumps: Callable[[object], bytes]
    list_head: Callable[[int], bytes]
    list_end: bytes
    object_head: Callable[[int], bytes]
    object_end: bytes
    between: bytes
    behind_key: bytes


def items_of(values: Seq[T], bytes_per_item: int, render: Callable[[T], object]) -> Items:
    """``render(value)`` for each of ``values``."""
    return Items(
        len(values), len(values) * bytes_per_item, lambda start, stop: [render(value) for value in values[start:stop]]
    )


def rows_of(rows: Float32Array) -> Items:
    """The rows of ``rows`` float32 [n, width], a list of numbers each."""

    def make(start: int, stop: int) -> Float32Array:
        return np.ascontiguousarray(rows[start:stop])  # as orjson takes it; a copy only where columns were cut off

    return Items(len(rows), rows.size * FLOAT_BYTES, make)


def num_bytes_of(content: object) -> int:
    """About what ``content`` takes as JSON, beside what is always small."""
    if isinstance(content, dict):
        num_bytes = 0
        for value in content.values():
            if isinstance(value, Items):
                num_bytes += value.num_bytes
            elif isinstance(value, dict):
                num_bytes += num_bytes_of(value)
        return num_bytes
    return content.num_bytes if isinstance(content, (Items, Octets)) else 0


def _dumps_json(content: object) -> bytes:
    return orjson.dumps(content, default=_made, option=orjson.OPT_SERIALIZE_NUMPY)


def _dumps_msgpack(content: object) -> bytes:
    return ormsgpack.packb(content, default=_made, option=ormsgpack.OPT_SERIALIZE_NUMPY)


def _msgpack_head(fixed: int, of_16_bits: int) -> Callable[[int], bytes]:
    """Heads of lists or of maps: their length, in as few bytes as it takes."""

    def head(count: int) -> bytes:
        if count < 16:
            return bytes([fixed | count])
        if count < 1 << 16:
            return struct.pack(">BH", of_16_bits, count)
        return struct.pack(">BI", of_16_bits + 1, count)

    return head


IN_JSON = Notation("application/json", _dumps_json, lambda _: b"[", b"]", lambda _: b"{", b"}", b",", b":")
IN_MSGPACK = Notation(
    "application/msgpack", _dumps_msgpack, _msgpack_head(0x90, 0xDC), b"", _msgpack_head(0x80, 0xDE), b"", b"", b""
)


def whole(content: object, notation: Notation = IN_JSON) -> bytes:
    """``content`` at once."""
    return content.make(0, content.count) if isinstance(content, Octets) else notation.dumps(content)


def pieces_of(content: object, notation: Notation = IN_JSON) -> Iterator[bytes]:
    """The bytes of ``whole(content)`` in pieces of about ``PIECE_BYTES``. What is written is not kept."""
    waiting: list[bytes] = []
    size = 0
    for part in _parts(content, notation):
        waiting.append(part)
        size += len(part)
        if size >= PIECE_BYTES:
            yield b"".join(waiting)
            waiting.clear()
            size = 0
    if waiting:
        yield b"".join(waiting)


def slices_of(written: bytes) -> Iterator[memoryview]:
    """``written`` in pieces of the same size, without copies."""
    view = memoryview(written)
    for start in range(0, len(view), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]


def _parts(content: object, notation: Notation) -> Iterator[bytes]:
    if isinstance(content, Items):
        yield from _parts_of_items(content, notation)
    elif isinstance(content, Octets):
        step = _step(content)
        for start in range(0, content.count, step):
            yield content.make(start, min(start + step, content.count))
    elif isinstance(content, dict) and num_bytes_of(content):
        yield notation.object_head(len(content))
        for index, (key, value) in enumerate(content.items()):
            yield notation.between * bool(index) + notation.dumps(key) + notation.behind_key
            yield from _parts(value, notation)
        yield notation.object_end
    else:
        yield notation.dumps(content)


def _step(content: Items | Octets) -> int:
    """The number of items of a piece."""
    return max(1, PIECE_BYTES * content.count // max(1, content.num_bytes))


def _parts_of_items(items: Items, notation: Notation) -> Iterator[bytes]:
    yield notation.list_head(items.count)
    step = _step(items)
    for start in range(0, items.count, step):
        made = items.make(start, min(start + step, items.count))
        if not isinstance(made, np.ndarray) and any(num_bytes_of(item) > PIECE_BYTES for item in made):
            for index, item in enumerate(made):
                if start or index:
                    yield notation.between
                yield from _parts(item, notation)
        else:
            if start:
                yield notation.between
            written = notation.dumps(made)
            yield written[len(notation.list_head(len(made))) : len(written) - len(notation.list_end)]
        del made
    yield notation.list_end


def _made(value: object) -> Any:
    """The content of ``Items``, as orjson writes it."""
    if isinstance(value, Items):
        return value.make(0, value.count)
    raise TypeError(f"{type(value).__name__} cannot be written")  # a bug: the library turns it into its own error


class Reply(msgspec.Struct, frozen=True):
    """``content`` is what orjson writes, numpy arrays included; lists that may be large are ``Items``, on top or in
    objects. It is ``Octets`` where the request itself asks for bytes, whatever the client accepts. ``truncated`` lists
    the inputs that were cut, ``octets`` makes bytes of the answer's vectors, where it is nothing else, and ``report``
    says what became of each input."""

    content: object
    truncated: Seq[int] = ()
    octets: Callable[[], Octets] | None = None
    report: Items | None = None

    def written_in(self, media_types: Seq[str]) -> tuple[object, Notation, str]:
        """The content, its notation and its media type: the first of ``media_types`` that the answer can have.

        Raises NotAcceptableError where there is none.
        """
        if isinstance(self.content, Octets):
            return self.content, IN_JSON, OCTETS
        for media_type in media_types:
            if media_type in _NOTATIONS:
                content = self.content if self.report is None else self._with_report(self.report)
                return content, _NOTATIONS[media_type], media_type
            if self.octets is not None and self.report is None:
                return self.octets(), IN_JSON, media_type
        raise NotAcceptableError(
            f"This answer cannot be sent as {' or '.join(media_types)}, which is for vectors alone: accept {JSON} or "
            f"{MSGPACK}.",
            "accept",
        )

    def _with_report(self, report: Items) -> object:
        fields = self.content if isinstance(self.content, dict) else {"embeddings": self.content}
        return {**fields, "report": report}


_NOTATIONS = {notation.media_type: notation for notation in (IN_JSON, IN_MSGPACK)}
