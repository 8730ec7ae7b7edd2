"""The forms in which vectors are answered: lists of numbers or base64, of float32 or of a bit a component.

float     float32; in base64 little-endian
ubinary   uint8: a bit a component, 1 where it is above 0, eight to a byte, the first of them the highest
binary    int8: the same less 128 ("offset binary"; sentence-transformers, Cohere, Voyage, Jina)
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from bei.core import Float32Array
from bei.errors import InvalidRequestError
from bei.server.rendering import FLOAT_BYTES, Items

DType: TypeAlias = Literal["float", "binary", "ubinary"]

_DTYPES: Mapping[str, DType] = {name: name for name in get_args(DType)}

_BYTE_BYTES = 4.5  # of a number of a byte in a JSON list, its comma included


class VectorForm(NamedTuple):
    """What the numbers of a vector are, and whether they come as base64 instead of a list."""

    dtype: DType = "float"
    is_base64: bool = False

    def check_width(self, width: int, param: str) -> None:
        """Raise InvalidRequestError that blames ``param`` unless vectors of ``width`` components have this form."""
        if self.dtype != "float" and width % 8:
            raise InvalidRequestError(
                f"{self.dtype} vectors have eight components a byte, and {width} is no multiple of 8: ask for other "
                "dimensions, or for float.",
                param,
            )

    def num_bytes(self, width: int) -> int:
        """About what JSON takes for a vector of ``width`` components."""
        if self.dtype == "float":
            return width * 16 // 3 if self.is_base64 else width * FLOAT_BYTES
        return width // 6 if self.is_base64 else round(width / 8 * _BYTE_BYTES)

    def of(self, vectors: Float32Array) -> list[Any]:
        """``vectors`` float32 [n, width], each as orjson writes it: an array of numbers, or a text in base64."""
        numbers = self._numbers(vectors)
        if not self.is_base64:
            return list(np.ascontiguousarray(numbers))
        little_endian = numbers.astype(numbers.dtype.newbyteorder("<"), order="C", copy=False)
        return [binascii.b2a_base64(row.data, newline=False).decode() for row in little_endian]

    def items(self, vectors: Float32Array) -> Items:
        """A list of all ``vectors``."""
        num_bytes = len(vectors) * self.num_bytes(vectors.shape[1])
        return Items(len(vectors), num_bytes, lambda start, stop: self.of(vectors[start:stop]))

    def _numbers(self, vectors: Float32Array) -> npt.NDArray[Any]:
        if self.dtype == "float":
            return vectors
        bits = np.packbits(vectors > 0, axis=1)
        return bits if self.dtype == "ubinary" else (bits ^ 0x80).view(np.int8)


FLOATS = VectorForm()


def dtype_of(name: str, param: str) -> DType:
    """The numbers that dialects call ``name``. Raises InvalidRequestError that blames ``param`` for others."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise InvalidRequestError(
            f"{param} {name} is not supported here: ask for {', '.join(_DTYPES)}.", param
        ) from None


def vector_form(
    encoding_format: str | None,
    output_dtype: str | None = None,
    embedding_type: str | Seq[str] | None = None,
    embedding_types: Seq[str] | None = None,
) -> VectorForm:
    """One form of what OpenAI (``float`` or ``base64``), Voyage, Jina and Cohere call it.

    Raises InvalidRequestError for a form that there is not, and where two of them contradict each other.
    """
    is_base64 = encoding_format == "base64"
    dtypes: dict[DType, str] = {}
    fields = {"output_dtype": output_dtype, "embedding_type": embedding_type, "embedding_types": embedding_types}
    for param, value in fields.items():
        names = [value] if isinstance(value, str) else list(value or ())
        if len(set(names)) > 1 or ("base64" in names and encoding_format == "float"):
            raise _contradiction(param, ", ".join(names))
        if names[:1] == ["base64"]:
            is_base64 = True
        elif names:
            dtypes[dtype_of(names[0], param)] = param
        if len(dtypes) > 1:
            raise _contradiction(param, names[0])
    return VectorForm(next(iter(dtypes), "float"), is_base64)


def _contradiction(param: str, asked: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {asked} contradicts what else is asked: an answer has one form.", param)
