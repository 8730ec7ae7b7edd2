"""The forms in which vectors are answered: lists of numbers, base64, or bytes by themselves.

Their numbers are those of ``bei.tasks.vector_formats``; in base64 and bytes float16 takes two bytes a component.
Sparse vectors are lists of the places and values of weights above zero (Qdrant's and Pinecone's form), never bytes.
Bytes are little-endian, in base64 too.
"""

from __future__ import annotations

import binascii
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, get_args

import numpy as np
import numpy.typing as npt

from bei.artifact.manifest import Manifest
from bei.errors import InvalidRequestError
from bei.server.endpoint.render import FLOAT_BYTES, Items, Octets
from bei.tasks.embed import Embeddings, SparseEmbeddings
from bei.tasks.vector_formats import DenseDType, check_form, numbers_of

DType: TypeAlias = Literal[DenseDType, "sparse"]

_DTYPES: Mapping[str, DType] = {"float32": "float", **{name: name for name in get_args(DType)}}
_ITEM_BYTES: Mapping[DType, float] = {
    "float": 4,
    "float16": 2,
    "int8": 1,
    "uint8": 1,
    "binary": 1 / 8,
    "ubinary": 1 / 8,
}
_NUMPY_NAMES: Mapping[DType, str] = {
    "float": "float32",
    "float16": "float16",
    "int8": "int8",
    "uint8": "uint8",
    "binary": "int8",
    "ubinary": "uint8",
}

_IS_LITTLE_ENDIAN = sys.byteorder == "little"

# Of an answer that is vectors as bytes alone.
OCTET_HEADERS = ("x-bei-shape", "x-bei-dtype")

_BYTE_BYTES = 4.5  # of a number of a byte in a JSON list, its comma included
_WEIGHT_BYTES = 18  # of the place and the value of a weight


class SparseVector(TypedDict):
    """Entries of the vocabulary, ascending, and their weights."""

    indices: list[int]
    values: list[float]


class VectorForm(NamedTuple):
    """The number format of a vector, in base64 or as a list. ``param``: the field that asked for it."""

    dtype: DType = "float"
    is_base64: bool = False
    param: str = "output_dtype"

    @property
    def is_sparse(self) -> bool:
        return self.dtype == "sparse"

    @property
    def task(self) -> Literal["embed", "embed_sparse"]:
        """The task that a model must have."""
        return "embed_sparse" if self.dtype == "sparse" else "embed"

    def check(self, manifest: Manifest, width: int, normalize: bool | None, dimensions_param: str) -> None:
        """Raise InvalidRequestError that names a field unless the model's vectors of ``width`` have this form."""
        if self.dtype == "float":
            return
        if self.is_sparse and self.is_base64:
            raise InvalidRequestError(
                "sparse vectors are lists of indices and values: send encoding_format float.", "encoding_format"
            )
        if self.is_sparse and normalize:
            raise InvalidRequestError("normalize works with dense vectors only: leave it out.", "normalize")
        if self.dtype != "sparse":
            check_form(self.dtype, manifest, width, normalize, param=self.param, dimensions_param=dimensions_param)

    def num_bytes(self, width: int) -> int:
        """About what JSON takes for a vector of ``width`` components; of a sparse one that is not known before."""
        if self.dtype == "sparse":
            return 0
        if self.is_base64:
            return round(width * _ITEM_BYTES[self.dtype] * 4 / 3)
        if self.dtype in ("float", "float16"):
            return width * FLOAT_BYTES
        return round(width * min(1.0, _ITEM_BYTES[self.dtype]) * _BYTE_BYTES)

    def numbers(self, answer: Embeddings, start: int, stop: int) -> npt.NDArray[Any]:
        """The numbers of vectors ``start`` to ``stop``, little-endian, a contiguous array with a row for each."""
        vectors = answer.vectors[start:stop]
        assert self.dtype != "sparse"  # those are never bytes
        made = vectors if self.dtype == "float" else numbers_of(self.dtype, vectors, answer.int8_largest)
        if _IS_LITTLE_ENDIAN and made.flags.c_contiguous:
            return made
        return made.astype(made.dtype.newbyteorder("<"), order="C", copy=False)

    def list_bytes(self, answer: Embeddings | SparseEmbeddings) -> int:
        """About what JSON takes for all vectors of ``answer``."""
        if isinstance(answer, SparseEmbeddings):
            return sum(len(indices) for indices, _ in answer.vectors) * _WEIGHT_BYTES
        return len(answer.vectors) * self.num_bytes(answer.vectors.shape[1])

    def of(self, answer: Embeddings | SparseEmbeddings, start: int, stop: int) -> list[Any]:
        """Vectors ``start`` to ``stop``, each as it is written: an array of numbers, a text in base64, or (arrays in) a
        SparseVector; None where the input has an error."""
        made: list[Any]
        if isinstance(answer, SparseEmbeddings):
            made = [{"indices": indices, "values": values} for indices, values in answer.vectors[start:stop]]
        elif self.is_base64:
            numbers = self.numbers(answer, start, stop)
            made = [binascii.b2a_base64(row.data, newline=False).decode() for row in numbers]
        else:
            numbers = self.numbers(answer, start, stop)
            made = list(numbers.astype(np.float32) if self.dtype == "float16" else numbers)  # orjson knows no float16
        for index in answer.errors:
            if start <= index < stop:
                made[index - start] = None
        return made

    def items(self, answer: Embeddings | SparseEmbeddings) -> Items:
        """A list of all vectors of ``answer``."""
        return Items(len(answer.vectors), self.list_bytes(answer), lambda start, stop: self.of(answer, start, stop))

    def octets(self, answer: Embeddings) -> Octets:
        """All vectors of ``answer`` as bytes. Headers say how many there are, of how many components, and of what."""
        count, width = answer.vectors.shape
        sizes = _ITEM_BYTES[self.dtype]
        said = f"{count},{round(width * min(1, sizes))}", _NUMPY_NAMES[self.dtype]
        headers = dict(zip(OCTET_HEADERS, said, strict=True))
        num_bytes = round(count * width * sizes)
        return Octets(count, num_bytes, lambda start, stop: self.numbers(answer, start, stop).tobytes(), headers)


FLOATS = VectorForm()
SPARSE = VectorForm("sparse")
_IN_BASE64 = VectorForm(is_base64=True)


def dtype_of(name: str, param: str) -> DType:
    """The numbers that dialects call ``name``. Raises InvalidRequestError that blames ``param`` for others."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise InvalidRequestError(
            f"{param} {name} is not supported here: ask for {', '.join(get_args(DType))}.", param
        ) from None


def vector_form(encoding_format: str | None, **fields: str | Seq[str] | None) -> VectorForm:
    """One form of what OpenAI (``float`` or ``base64``) and, in ``fields``, Voyage, Jina, Cohere and vLLM call it.

    Raises InvalidRequestError for a form that there is not, and where two of them contradict each other.
    """
    is_base64 = encoding_format == "base64"
    if not any(fields.values()) and "" not in fields.values():
        return _IN_BASE64 if is_base64 else FLOATS
    dtypes: dict[DType, str] = {}
    for param, value in fields.items():
        names = [value] if isinstance(value, str) else list(value or ())
        if len(set(names)) > 1 or ("base64" in names and encoding_format == "float"):
            raise _contradiction(param, ", ".join(names))
        if names[:1] == ["base64"]:
            is_base64 = True
        elif names:
            dtypes.setdefault(dtype_of(names[0], param), param)
        if len(dtypes) > 1:
            raise _contradiction(param, names[0])
    dtype, param = next(iter(dtypes.items()), ("float", "output_dtype"))
    return VectorForm(dtype, is_base64, param)


def _contradiction(param: str, asked: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param} {asked} contradicts what else the request asks for: ask for one form of vectors.", param
    )
