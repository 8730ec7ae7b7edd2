"""The header of a GGUF file (the ggml project's docs/gguf.md): metadata, and where each tensor lies.

The ``gguf`` package has a reader too. It takes counts and lengths on trust: a file of 100 bytes that announces an array
of 2**60 numbers takes all memory. Here each is compared with the bytes that are there before anything is made of it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bei.errors import WeightsError
from bei.utils.untrusted_files import UnfitError, check_regular

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MOST_ALIGNMENT = 1 << 20
# The header of Gemma 3, whose vocabulary of 262,144 tokens is the largest known, has 14 MB.
_MOST_HEADER_BYTES = 100_000_000
_MOST_KEYS = 10_000
_MOST_TENSORS = 100_000
_MOST_DIMENSIONS = 4
_MOST_NAME_BYTES = 1_000

# The format's numbers of metadata types.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_NUMBERS = {kind: struct.Struct(f"<{kind}") for kind in "IQ"}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file: its shape as torch would print it, the number of its type, and its place in the data."""

    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def num_elements(self) -> int:
        """The product of the shape."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class GgufHeader:
    """``metadata`` by key: numbers, texts, and lists of one type. ``data_start``: where the offsets count from."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    data_start: int
    alignment: int

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's architecture."""
        return str(self.metadata.get("general.architecture", ""))

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of ``key``. Raises WeightsError for one of another type."""
        value = self.metadata.get(key, default)
        if value is not None and type(value) is not kind:
            raise WeightsError(
                f"The GGUF file has {key} = {value!r:.60}: it must be of type {kind.__name__}. Download it again."
            )
        return value


def read_header(file: Path) -> GgufHeader:
    """The header of ``file``. Raises WeightsError."""
    try:
        check_regular(file)
        if file.stat().st_size < 24:
            raise UnfitError(f"it has {file.stat().st_size} bytes")
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Header(content).read()
    except (UnfitError, OSError) as error:
        raise WeightsError(f"{file} is not a readable GGUF file ({error}). Download it again.") from error


class _Header:
    """Reads a header from ``content``, the whole file."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._end = min(len(content), _MOST_HEADER_BYTES)
        self._at = 0

    def read(self) -> GgufHeader:
        """Raises UnfitError."""
        self._check_version()
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        for count, most, what in ((num_keys, _MOST_KEYS, "keys"), (num_tensors, _MOST_TENSORS, "tensors")):
            if count > most:
                raise UnfitError(f"it announces {count:,} {what}, and no model has more than {most:,}")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text(_MOST_NAME_BYTES)
            if key in metadata:
                raise UnfitError(f"it has the key {key!a} twice")
            metadata[key] = self._value(self._number("I"))
        tensors: dict[str, StoredTensor] = {}
        for _ in range(num_tensors):
            name = self._text(_MOST_NAME_BYTES)
            if name in tensors:
                raise UnfitError(f"it has the tensor {name!a} twice")
            tensors[name] = self._tensor(name)
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
            raise UnfitError(f"its general.alignment is {alignment!r:.40}, and must be a power of two from 8")
        return GgufHeader(metadata, tensors, -(-self._at // alignment) * alignment, alignment)

    def _check_version(self) -> None:
        if (magic := self._bytes(4)) != _MAGIC:
            raise UnfitError(f"it begins with {magic!r} instead of {_MAGIC!r}")
        version = self._number("I")
        if version & 0xFFFF == 0:
            raise UnfitError("it is for big-endian machines")
        if version not in _VERSIONS:
            raise UnfitError(f"it has version {version} of the format; 2 and 3 are read")

    def _bytes(self, count: int) -> bytes:
        if count > self._end - self._at:
            raise UnfitError(
                f"it ends within its header, which announces {count:,} bytes at {self._at:,} of {len(self._content):,}"
            )
        self._at += count
        return self._content[self._at - count : self._at]

    def _number(self, kind: Literal["I", "Q"]) -> int:
        form = _NUMBERS[kind]
        if form.size > self._end - self._at:
            self._bytes(form.size)  # which raises the error
        (value,) = form.unpack_from(self._content, self._at)
        self._at += form.size
        return int(value)

    def _text(self, most: int = _MOST_HEADER_BYTES) -> str:
        length = self._number("Q")
        if length > most:
            raise UnfitError(f"it announces a text of {length:,} bytes at {self._at:,}")
        try:
            return self._bytes(length).decode()
        except UnicodeDecodeError as error:
            raise UnfitError(f"it has a text at {self._at - length:,} that is not UTF-8") from error

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array(self._number("I"), self._number("Q"))
        if kind not in _SCALARS:
            raise UnfitError(f"it has a value of the unknown type {kind} at {self._at:,}")
        (value,) = struct.unpack(f"<{_SCALARS[kind]}", self._bytes(struct.calcsize(_SCALARS[kind])))
        return value

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            if count > (self._end - self._at) // 8:  # each has a length of 8 bytes
                raise UnfitError(f"it announces {count:,} texts at {self._at:,} of {len(self._content):,} bytes")
            return [self._text() for _ in range(count)]
        if kind not in _SCALARS:
            raise UnfitError(f"it has a list of the unknown type {kind} at {self._at:,}")
        dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
        values: list[Any] = np.frombuffer(self._bytes(count * dtype.itemsize), dtype).tolist()
        return values

    def _tensor(self, name: str) -> StoredTensor:
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
            raise UnfitError(f"its tensor {name!a} has {num_dimensions} dimensions")
        sizes = [self._number("Q") for _ in range(num_dimensions)]
        if not all(1 <= size < 1 << 40 for size in sizes):
            raise UnfitError(f"its tensor {name!a} has the shape {sizes[::-1]}")
        return StoredTensor(tuple(reversed(sizes)), self._number("I"), self._number("Q"))
