"""Number formats of dense vectors, and the conversion from float32.

float     float32
float16   the same rounded
int8      unit vectors only, in steps that the build chose (``bei.artifact.int8``)
uint8     int8 plus 128
ubinary   uint8: a bit a component, 1 where it is above 0, eight to a byte, the first of them the highest
binary    int8: ubinary less 128 ("offset binary"; sentence-transformers, Cohere, Voyage, Jina)
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from bei.artifact.int8 import int8_of
from bei.artifact.manifest import Manifest
from bei.core import Float32Array
from bei.errors import InvalidRequestError

DenseDType: TypeAlias = Literal["float", "float16", "int8", "uint8", "binary", "ubinary"]

_SIGN = np.uint8(0x80)


def check_form(
    dtype: DenseDType, manifest: Manifest, width: int, normalize: bool | None, *, param: str, dimensions_param: str
) -> None:
    """Raise InvalidRequestError unless the model's vectors of ``width`` components can be ``dtype``.

    ``normalize`` None is as the checkpoint says. ``param`` and ``dimensions_param`` name the fields that errors blame.
    """
    if dtype in ("binary", "ubinary") and width % 8:
        raise InvalidRequestError(
            f"{dtype} vectors have eight components a byte, and {width} is no multiple of 8: ask for other "
            "dimensions, or for float.",
            dimensions_param,
        )
    if dtype in ("int8", "uint8") and manifest.embedding is not None:
        if not (manifest.embedding.normalize if normalize is None else normalize):
            raise InvalidRequestError(f"{dtype} needs unit vectors: set normalize to true.", param)
        if manifest.embedding.int8_largest is None:
            raise InvalidRequestError(
                f"{manifest.name} was built with --no-verify, so nothing says how large its components are: build "
                f"it with verification, or ask for float instead of {dtype}.",
                param,
            )


def numbers_of(dtype: DenseDType, vectors: Float32Array, int8_largest: float | None) -> npt.NDArray[Any]:
    """``vectors`` float32 [n, width] as ``dtype``: [n, width], or [n, width / 8] where a byte has eight components.

    ``int8_largest``: the component that is 127 (``bei.tasks.embed.Embeddings``).
    """
    if dtype == "float":
        return vectors
    if dtype == "float16":
        return vectors.astype(np.float16)
    if dtype in ("int8", "uint8"):
        assert int8_largest is not None  # ``check_form`` has passed
        signed = int8_of(vectors, int8_largest)
        return signed if dtype == "int8" else signed.view(np.uint8) ^ _SIGN
    bits = np.packbits(vectors > 0, axis=1)
    return bits if dtype == "ubinary" else (bits ^ _SIGN).view(np.int8)
