"""Checks of a Model's inputs, one by one: those that a JSON decoder and the routes of ``bei serve`` make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, TypeVar

import numpy as np

from bei.errors import EmptyInputError, MalformedRequestError
from bei.image.source import ImageInput, MixedInput, placed
from bei.tokenizer.encoder import Input
from bei.utils.surrogates import check_characters

if TYPE_CHECKING:
    from PIL.Image import Image

InputT = TypeVar("InputT")

TextOrIds: TypeAlias = "str | list[int]"
TextOrImage: TypeAlias = "str | list[int] | ImageInput | MixedInput"
TextOrPicture: TypeAlias = "str | ImageInput | MixedInput"
OfPair: TypeAlias = "str | ImageInput | MixedInput"
# What a caller may give for one.
GivenInput: TypeAlias = "GivenText | list[int]"
# Where token ids are not read.
GivenText: TypeAlias = "str | bytes | Path | Image | Mapping[str, Any]"
# Of methods with sentence-transformers' names: one, or several.
EncodeInput: TypeAlias = "GivenText | Iterable[GivenText]"

# Keys of an image and a text as one input.
_MIXED = ({"text", "image"}, {"content"})
# What images are, and what stands for one with a text.
_IMAGE_FORMS = "of Pillow, the bytes of a file, or its pathlib.Path"
_OR_IMAGE = f'an image ({_IMAGE_FORMS}), or both: {{"text": ..., "image": ...}} or {{"content": [...]}}'

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
    if not all(isinstance(one, (int, np.integer)) and not isinstance(one, bool) for one in value):
        raise MalformedRequestError(
            f"inputs {index} is a list that does not hold token ids alone: give texts as inputs of their own, not in "
            "a list.",
            "inputs",
        )
    return value


def text_or_image(value: object, index: int) -> TextOrImage:
    """Check that ``value`` is a text, the token ids of one input, an image (a Pillow image, the bytes of a file, or
    its path), or a text and an image as of ``of_pair``. Files are not read yet."""
    found = _mixed(value, index, "inputs") or _image(value)
    if found is None and not isinstance(value, str | list):
        raise _malformed(value, index, "inputs", f"a text, a list of the token ids of one input, {_OR_IMAGE}")
    return text_or_ids(value, index) if found is None else placed(found, index)


def text_or_picture(value: object, index: int, param: str = "inputs") -> TextOrPicture:
    """As ``text_or_image``, without token ids."""
    found = _mixed(value, index, param) or _image(value, param)
    if found is None and not isinstance(value, str):
        raise _malformed(value, index, param, f"a text, {_OR_IMAGE}")
    return text(value, index, param) if found is None else placed(found, index)


def of_pair(value: object, index: int, param: str = "inputs") -> str | ImageInput | MixedInput:
    """Check that ``value`` is a text, which may be empty, an image, or both: {"text": ..., "image": ...}, which has the
    image first, or in their order {"content": [...]}."""
    found = _mixed(value, index, param) or _image(value, param)
    if found is None and not isinstance(value, str):
        raise _malformed(value, index, param, f"a text, {_OR_IMAGE}")
    return text_of_pair(value, index, param) if found is None else found if param == "query" else placed(found, index)


def _mixed(value: object, index: int, param: str) -> MixedInput | None:
    """None: it is a text or an image, or neither."""
    if not isinstance(value, Mapping):
        return None
    if value.keys() == {"text", "image"}:
        image = _image(value["image"], param)
        if image is None:
            raise _malformed(value["image"], index, param, "an image beside its text")
        return MixedInput((image, text_of_pair(value["text"], index, param)))
    if value.keys() != {"content"}:
        return None
    given = value["content"]
    if not isinstance(given, list | tuple):
        raise _malformed(given, index, param, "a list of texts and images as content")
    parts = [_part(one, index, param) for one in given]
    if all(isinstance(part, str) for part in parts):
        raise MalformedRequestError(f"{param} {index} has no image in its content: give its text alone.", param)
    return MixedInput((*parts,))


def _part(value: object, index: int, param: str) -> str | ImageInput:
    found = _image(value, param)
    if found is None and not isinstance(value, str):
        raise MalformedRequestError(
            f"{param} {index} has the type {_kind_of(value)} in its content, whose parts are texts and images "
            f"({_IMAGE_FORMS}).",
            param,
        )
    return text_of_pair(value, index, param) if found is None else found


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
    """True of a single input, which is not iterated: a text, an image in any form, or both."""
    is_plain = isinstance(value, str | bytes | bytearray | memoryview | Path)
    is_both = isinstance(value, Mapping) and value.keys() in _MIXED
    return is_plain or is_both or _is_dataset_row(value) or is_opened_image(value)


def several(inputs: object, param: str = "inputs") -> Iterable[object]:
    """``inputs`` to iterate, of which one is a list of one. Raises MalformedRequestError that names ``param``."""
    if is_one(inputs):
        return [inputs]
    # The rows of a set's results would be in no order, and of a dict the keys would be read, of a data frame the names
    # of its columns.
    is_table = hasattr(inputs, "columns") and hasattr(inputs, "iterrows")
    if not can_be_iterated(inputs) or isinstance(inputs, set | frozenset | Mapping) or is_table:
        raise MalformedRequestError(
            f"{param} has the type {_kind_of(inputs)}, and must be a text, or texts in a list or an iterator.", param
        )
    return inputs


def names(given: object, param: str) -> list[str]:
    """Names in any iterable, of a mapping its keys; a text is one name. Raises InvalidRequestError."""
    if not can_be_iterated(given):
        raise MalformedRequestError(f"{param} has the type {_kind_of(given)}, and must be names in a list.", param)
    check_order(given, param)
    return [text(name, index, param) for index, name in enumerate([given] if isinstance(given, str) else given)]


def check_order(given: object, param: str) -> None:
    """Raise MalformedRequestError for a set of names: their order, on which scores may depend, is another in each
    process."""
    if isinstance(given, set | frozenset):
        raise MalformedRequestError(f"{param} has the type {_kind_of(given)}, which has no order: give a list.", param)


def can_be_iterated(value: object) -> TypeGuard[Iterable[object]]:
    """An array without dimensions only looks as if it could."""
    return isinstance(value, Iterable) and not _is_scalar_array(value)


def _is_scalar_array(value: object) -> bool:
    """True of numpy's, PyTorch's and others' arrays of one value without dimensions."""
    return not isinstance(value, str) and getattr(value, "shape", None) == ()


def _kind_of(value: object) -> str:
    return type(value).__name__ + (" without dimensions" if _is_scalar_array(value) else "")


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
    found = "is null (None)" if value is None else f"has the type {_kind_of(value)}"
    return MalformedRequestError(f"{param} {index} {found}, and must be {expected}.", param)
