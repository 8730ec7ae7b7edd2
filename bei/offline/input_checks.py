"""Checks of a Model's inputs, one by one: those that a JSON decoder and the routes of ``bei serve`` make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeGuard, TypeVar

import numpy as np

from bei.errors import EmptyInputError, MalformedRequestError
from bei.image.source import ImageInput, MixedInput
from bei.tokenizer.encoder import Input
from bei.utils.surrogates import check_characters

if TYPE_CHECKING:
    from PIL.Image import Image

InputT = TypeVar("InputT")

TextOrIds: TypeAlias = "str | list[int]"
TextOrImage: TypeAlias = "str | list[int] | ImageInput"
TextOrPicture: TypeAlias = "str | ImageInput"
OfPair: TypeAlias = "str | ImageInput | MixedInput"
# What a caller may give for one.
GivenInput: TypeAlias = "str | list[int] | bytes | Path | Image"
# Where token ids are not read.
GivenText: TypeAlias = "str | bytes | Path | Image"
# Of methods with sentence-transformers' names: one, or several.
EncodeInput: TypeAlias = "str | bytes | Path | Image | Iterable[str | bytes | Path | Image]"

# Takes an input and its place, returns the input; raises InvalidRequestError that names the place.
Check: TypeAlias = Callable[[object, int], InputT]


def text(value: object, index: int, param: str = "inputs") -> str:
    """Check that ``value`` is a text, and not empty."""
    found = text_of_pair(value, index, param)
    if not found:
        raise EmptyInputError(f"{param} {index} is an empty text: leave it out.", param)
    return found


def text_of_pair(value: object, index: int, param: str = "inputs") -> str:
    """Check that ``value`` is a text. It may be empty, as it is read together with another one."""
    if not isinstance(value, str):
        raise _malformed(value, index, param, "a text")
    check_characters(value, f"{param} {index}", param)
    return value


def text_or_ids(value: object, index: int) -> TextOrIds:
    """Check that ``value`` is a text, or the token ids of one input."""
    if not isinstance(value, list):
        if isinstance(value, str):
            return text(value, index)
        raise _malformed(value, index, "inputs", "a text, or a list of the token ids of one input")
    if not all(isinstance(one, (int, np.integer)) for one in value):
        raise MalformedRequestError(
            f"inputs {index} is a list that does not hold token ids alone: give texts as inputs of their own, not in "
            "a list.",
            "inputs",
        )
    return value


def text_or_image(value: object, index: int) -> TextOrImage:
    """Check that ``value`` is a text, the token ids of one input, or an image: a Pillow image, the bytes of a file, or
    its path. Files are not read yet."""
    return text_or_ids(value, index) if (found := _image(value)) is None else found


def text_or_picture(value: object, index: int, param: str = "inputs") -> TextOrPicture:
    """As ``text_or_image``, without token ids."""
    return text(value, index, param) if (found := _image(value, param)) is None else found


def of_pair(value: object, index: int, param: str = "inputs") -> str | ImageInput | MixedInput:
    """Check that ``value`` is a text, which may be empty, an image, or both: {"text": ..., "image": ...}."""
    if isinstance(value, Mapping) and value.keys() == {"text", "image"}:
        image = _image(value["image"], param)
        if image is None:
            raise _malformed(value["image"], index, param, "an image beside its text")
        return MixedInput((image, text_of_pair(value["text"], index, param)))
    return text_of_pair(value, index, param) if (found := _image(value, param)) is None else found


def _image(value: object, param: str = "inputs") -> ImageInput | None:
    """None: it is none."""
    if _is_dataset_row(value):
        value = value["bytes"]
    if isinstance(value, bytes | bytearray | memoryview):
        return ImageInput(bytes(value), param)
    if isinstance(value, Path):
        return ImageInput(value, param)
    if is_opened_image(value):
        return ImageInput(value, param)  # type: ignore[arg-type]
    return None


def is_one(value: object) -> bool:
    """True of a single input, which is not iterated: a text, or an image in any form."""
    is_plain = isinstance(value, str | bytes | bytearray | memoryview | Path)
    return is_plain or _is_dataset_row(value) or is_opened_image(value)


def _is_dataset_row(value: object) -> TypeGuard[Mapping[str, bytes]]:
    """True of an image as the datasets library has it in a row."""
    return isinstance(value, dict) and isinstance(value.get("bytes"), bytes)


def is_opened_image(value: object) -> bool:
    """True of an image of Pillow's, without importing it."""
    return any(f"{base.__module__}.{base.__qualname__}" == "PIL.Image.Image" for base in type(value).__mro__)


def text_or_pair(value: object, index: int) -> Input:
    """Check that ``value`` is a text, or two that the model reads together."""
    if isinstance(value, str):
        return text(value, index)
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise _malformed(value, index, "inputs", "a text, or a pair of texts")
    return text_of_pair(value[0], index), text_of_pair(value[1], index)


def _malformed(value: object, index: int, param: str, expected: str) -> MalformedRequestError:
    kind = type(value).__name__
    return MalformedRequestError(f"{param} {index} has the type {kind}, and must be {expected}.", param)
