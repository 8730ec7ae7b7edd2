"""Answers as JSON: small ones at once, large ones piece by piece.

Rendering holds the interpreter's lock: 3 ns a byte of numbers, 11 of tokens, whose dictionaries are built first. An
answer of hundreds of megabytes would stop the server for seconds, and lie in memory whole. A handler therefore leaves
the lists of its answer as ``Items``, and whether they are written at once or in pieces, nobody can tell by the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

import numpy as np
import orjson

from bei.core import Float32Array

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
    if isinstance(content, Items):
        return content.num_bytes
    if isinstance(content, dict):
        return sum([num_bytes_of(value) for value in content.values() if isinstance(value, (Items, dict))])
    return 0


def whole(content: object) -> bytes:
    """``content`` as JSON, at once."""
    return orjson.dumps(content, default=_made, option=orjson.OPT_SERIALIZE_NUMPY)


def pieces_of(content: object) -> Iterator[bytes]:
    """The bytes of ``whole(content)`` in pieces of about ``PIECE_BYTES``. What is written is not kept."""
    waiting: list[bytes] = []
    size = 0
    for part in _parts(content):
        waiting.append(part)
        size += len(part)
        if size >= PIECE_BYTES:
            yield b"".join(waiting)
            waiting.clear()
            size = 0
    if waiting:
        yield b"".join(waiting)


def _parts(content: object) -> Iterator[bytes]:
    if isinstance(content, Items):
        yield from _parts_of_items(content)
    elif isinstance(content, dict) and num_bytes_of(content):
        for index, (key, value) in enumerate(content.items()):
            yield (b"," if index else b"{") + orjson.dumps(key) + b":"
            yield from _parts(value)
        yield b"}"
    else:
        yield whole(content)


def _parts_of_items(items: Items) -> Iterator[bytes]:
    yield b"["
    step = max(1, PIECE_BYTES * items.count // max(1, items.num_bytes))
    for start in range(0, items.count, step):
        made = items.make(start, min(start + step, items.count))
        if any(isinstance(item, Items) and item.num_bytes > PIECE_BYTES for item in made):
            for index, item in enumerate(made):
                if start or index:
                    yield b","
                yield from _parts(item)
        else:
            if start:
                yield b","
            yield whole(made)[1:-1]
        del made
    yield b"]"


def _made(value: object) -> Any:
    """What orjson shall write for ``value``, which it does not know."""
    if isinstance(value, Items):
        return value.make(0, value.count)
    raise TypeError(f"{type(value).__name__} is no JSON")  # a bug: orjson turns it into an error of its own
