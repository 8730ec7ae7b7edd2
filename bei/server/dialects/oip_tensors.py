"""Tensors of the Open Inference Protocol: texts that come in as BYTES, numbers and labels that go out.

Reference: github.com/kserve/open-inference-protocol, ``specification/protocol/inference_rest.md``. Bytes behind the
JSON ("binary tensor data"): github.com/triton-inference-server/server, ``docs/protocol/extension_binary_data.md``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from bei.core import Float32Array
from bei.errors import InvalidRequestError
from bei.server.endpoint.field_schema import Limits
from bei.server.endpoint.render import FLOAT_BYTES, Items, Octets, whole

# Of a request and of an answer: the bytes of the JSON, behind which tensors stand.
LENGTH_HEADER = "inference-header-content-length"

INPUT = "text"

_LENGTH_BYTES = 4  # in front of each element of BYTES

Elements: TypeAlias = list[str | list[str]]


class TensorParameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``binary_data_size``: the tensor is not in `data`; it has so many bytes behind the JSON."""

    binary_data_size: Annotated[int, Meta(ge=0)] | None = None


class InputTensor(msgspec.Struct, kw_only=True):
    """Texts, [n] or [n, 1], or pairs of texts, [n, 2]. `data` may be nested as the shape says, or flat."""

    name: Literal["text"]
    shape: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1, max_length=2)]
    datatype: Literal["BYTES"]
    parameters: TensorParameters | None = None
    data: Elements | None = None

    _limits: ClassVar[Limits] = (
        {
            "description": "`data` must be there, or `binary_data_size` with bytes behind the JSON.",
            "anyOf": [
                {"required": ["data"], "properties": {"data": {"type": "array"}}},
                {"required": ["parameters"], "properties": {"parameters": {"type": "object"}}},
            ],
        },
    )


class Tensor(NamedTuple):
    """A tensor of an answer. ``values``: float32, or texts [n]. ``is_binary``: its bytes stand behind the JSON."""

    name: str
    values: Float32Array | Seq[str]
    is_binary: bool

    @property
    def shape(self) -> list[int]:
        """Of ``values``."""
        return [*self.values.shape] if isinstance(self.values, np.ndarray) else [len(self.values)]

    @property
    def datatype(self) -> Literal["FP32", "BYTES"]:
        """The protocol's name."""
        return "FP32" if isinstance(self.values, np.ndarray) else "BYTES"

    def octets(self) -> bytes | memoryview:
        """Numbers in little-endian order, without a copy where they lie so; texts each behind its length."""
        if isinstance(self.values, np.ndarray):
            return np.ascontiguousarray(self.values, "<f4").reshape(-1).view(np.uint8).data
        encoded = [text.encode() for text in self.values]
        return b"".join(part for text in encoded for part in (len(text).to_bytes(_LENGTH_BYTES, "little"), text))

    def data(self) -> Items:
        """All elements in row-major order, as JSON has them."""
        if isinstance(self.values, np.ndarray):
            flat = np.ascontiguousarray(self.values).reshape(-1)
            return Items(flat.size, flat.size * FLOAT_BYTES, lambda start, stop: flat[start:stop])
        texts = self.values
        return Items(len(texts), sum(len(text) + 3 for text in texts), lambda start, stop: [*texts[start:stop]])


def texts_of(tensor: InputTensor, behind: memoryview | None, max_inputs: int) -> list[str] | list[tuple[str, str]]:
    """The texts or pairs of ``tensor``, whose elements are in it, or in the bytes ``behind`` the JSON.

    Raises InvalidRequestError, also for more than ``max_inputs``.
    """
    num_inputs, width = (*tensor.shape, 1)[:2]
    if width not in (1, 2):
        raise _wrong(f"shape {tensor.shape} has {width} texts in each input: send one, or two of a pair")
    if num_inputs > max_inputs:
        raise _wrong(f"The request has {num_inputs} inputs, the limit is {max_inputs}: split it")
    count = num_inputs * width
    size = tensor.parameters.binary_data_size if tensor.parameters else None
    if (size is None) is (tensor.data is None):
        raise _wrong("An input has either data or parameters.binary_data_size")
    if size is None:
        assert tensor.data is not None
        found = _flat(tensor.data, count)
    elif behind is None or len(behind) != size:
        there = "there are none" if behind is None else f"there are {len(behind)}"
        raise _wrong(f"binary_data_size announces {size} bytes behind the JSON, and {there} ({LENGTH_HEADER})")
    else:
        found = [*_elements(behind, count)]
    if width == 1:
        return found
    return [*zip(found[::2], found[1::2], strict=True)]


def _flat(data: Elements, count: int) -> list[str]:
    found = [text for one in data for text in ([one] if isinstance(one, str) else one)]
    if len(found) != count:
        raise _wrong(f"data has {len(found)} texts, its shape says {count}")
    return found


def _elements(content: memoryview, count: int) -> Iterator[str]:
    """``count`` texts, each behind its length, and nothing else."""
    at = 0
    for index in range(count):
        start = at + _LENGTH_BYTES
        at = start + int.from_bytes(content[at:start], "little")
        if at > len(content) or start > len(content):
            raise _wrong(f"The bytes of the tensor end within text {index} of {count}")
        try:
            yield str(content[start:at], "utf-8")
        except UnicodeDecodeError as error:
            raise _wrong(f"Text {index} is not valid UTF-8: {error.reason}") from error
    if at != len(content):
        raise _wrong(f"{len(content) - at} bytes follow the {count} texts that the shape announces")


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{message}.", "inputs")


def content_of(fields: Mapping[str, Any], tensors: Seq[Tensor]) -> dict[str, Any] | Octets:
    """The answer with ``fields`` and ``tensors``: JSON, and behind it, where some are binary, their bytes."""
    described = [_described(tensor) for tensor in tensors]
    num_bytes = sum(tensor.data().num_bytes for tensor in tensors if not tensor.is_binary)
    content = {**fields, "outputs": Items(len(tensors), num_bytes, lambda start, stop: described[start:stop])}
    if not any(tensor.is_binary for tensor in tensors):
        return content
    head = whole(content)
    parts = [memoryview(head), *(memoryview(tensor.octets()) for tensor in tensors if tensor.is_binary)]
    total = sum(map(len, parts))
    return Octets(total, total, lambda start, stop: b"".join(_cut(parts, start, stop)), {LENGTH_HEADER: str(len(head))})


def _described(tensor: Tensor) -> dict[str, Any]:
    described: dict[str, Any] = {"name": tensor.name, "shape": tensor.shape, "datatype": tensor.datatype}
    if tensor.is_binary:
        return {**described, "parameters": {"binary_data_size": len(tensor.octets())}}
    return {**described, "data": tensor.data()}


def _cut(parts: Seq[memoryview], start: int, stop: int) -> Iterator[memoryview]:
    """Bytes ``start`` to ``stop`` of all ``parts`` one after the other."""
    for part in parts:
        yield part[max(0, start) : max(0, stop)]
        start, stop = start - len(part), stop - len(part)


def header_length(value: str | None, content_length: int) -> int | None:
    """The bytes of the JSON of a request, by its header; None: all of them. Raises InvalidRequestError."""
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) <= 12) or int(value) > content_length:
        raise InvalidRequestError(
            f"The header {LENGTH_HEADER} must be a number of bytes of the body, of which there are {content_length}.",
            LENGTH_HEADER,
        )
    return int(value)
