"""Images of rows, in every form that files have, as ``bei.Model`` takes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from bei.bulk.sources.rows import WithImage
from bei.errors import MalformedRequestError
from bei.image.source import ImageInput

# The bytes of an image's file, or its path.
_File: TypeAlias = "bytes | Path"

_MOST_SHOWN_CHARS = 60
_MOST_PATH_CHARS = 4096  # Linux's PATH_MAX; the base64 of a JPEG begins with / too


def row_input(value: object, place: int) -> object:
    """``value``, of the row at ``place``: images, also several as one input, stand before the text; where one of both
    is null, the other is the input. Strings are images in a ``WithImage`` alone, where an empty one is null, which CSV
    cannot write. Raises InvalidRequestError."""
    if isinstance(value, WithImage):
        text, images = value.text, _images(None if value.image == "" else value.image, place, strings=True)
    elif isinstance(value, Mapping) and value.keys() == {"text", "image"}:
        text, images = value["text"], _images(value["image"], place)
    elif _is_file(value) or (isinstance(value, list) and any(map(_is_file, value))):
        text, images = None, _images(value, place)
    else:
        return value
    if text is not None and not isinstance(text, str):
        raise MalformedRequestError(
            f"inputs {place} has {type(text).__name__} beside its image: give a text.", "inputs"
        )
    if not images:
        return text
    if text is None:
        return images[0] if len(images) == 1 else {"content": images}
    return {"content": [*images, text]}


def _is_file(value: object) -> bool:
    """True of the bytes of a file, and of what the datasets library has in a row."""
    return isinstance(value, bytes) or (isinstance(value, Mapping) and "bytes" in value)


def _images(value: object, place: int, *, strings: bool = False) -> list[_File]:
    if value is None:
        return []
    if not isinstance(value, list):
        return [_image(value, f"inputs {place}", strings=strings)]
    return [_image(one, f"image {number} of inputs {place}", strings=strings) for number, one in enumerate(value)]


def _image(value: object, name: str, *, strings: bool) -> _File:
    if isinstance(value, Mapping) and value.keys() & {"bytes", "path"}:
        named = value.get("bytes")
        value, strings = (value.get("path"), True) if named is None else (named, strings)
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not strings:
        found = "null" if value is None else type(value).__name__
        raise MalformedRequestError(f"{name} has {found} in the place of an image: give the bytes of a file.", "inputs")
    if value[:5].lower() == "data:":
        return ImageInput(value, "inputs").file_bytes()
    if not value.startswith("/") or "\0" in value or len(value) > _MOST_PATH_CHARS:
        shown = ascii(value[:_MOST_SHOWN_CHARS])
        raise MalformedRequestError(
            f"{name} has {shown} in the place of an image: give a data URL (data:image/png;base64,...), or a "
            "file's whole path, from / on.",
            "inputs",
        )
    return Path(value)
