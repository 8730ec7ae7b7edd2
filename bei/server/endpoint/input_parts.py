"""Inputs as JSON objects: a text, or an image as a data URL or base64, in the forms of several APIs."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from bei.errors import InvalidRequestError
from bei.image.source import ImageInput
from bei.server.endpoint.field_schema import limits

_IMAGE = "The file, as a data URL (data:image/png;base64,...) or as base64 alone. PNG, JPEG, WEBP, GIF, BMP."
ImageText: TypeAlias = Annotated[str, Meta(description=_IMAGE, min_length=1)]


class ImageURL(msgspec.Struct):
    """OpenAI's. A `detail` changes nothing."""

    url: ImageText


class InputPart(msgspec.Struct, forbid_unknown_fields=True):
    """A text or an image: OpenAI's `{"type": "image_url", "image_url": {"url": ...}}`, Jina's `{"image": ...}`,
    Voyage's `{"type": "image_base64", "image_base64": ...}`."""

    type: Literal["text", "input_text", "image_url", "input_image", "image_base64", "image"] | None = None
    text: str | None = None
    image: ImageText | None = None
    image_url: ImageURL | ImageText | None = None
    image_base64: ImageText | None = None

    def model_input(self, param: str) -> str | ImageInput:
        """What the model reads. Raises InvalidRequestError unless the object holds one text or one image."""
        url = self.image_url.url if isinstance(self.image_url, ImageURL) else self.image_url
        images = [one for one in (self.image, url, self.image_base64) if one is not None]
        texts = [] if self.text is None else [self.text]
        said = None if self.type is None else "text" if self.type.endswith("text") else "image"
        if len(images) + len(texts) != 1 or (said is not None and said != ("text" if texts else "image")):
            raise InvalidRequestError(
                f"An object in {param} holds one text or one image, as its type says: text, image, image_url or "
                "image_base64.",
                param,
            )
        return texts[0] if texts else ImageInput(images[0], param)


# Texts are joined by line breaks, so only a single one must not be empty.
_NOT_EMPTY = {"properties": {"text": {"minLength": 1}}}
Parts: TypeAlias = Annotated[list[InputPart], limits(minItems=1, anyOf=[{"minItems": 2}, {"items": _NOT_EMPTY}])]


def joined_parts(parts: Seq[InputPart], param: str) -> str | ImageInput:
    """The parts of one input: an image alone, or texts, which are joined by line breaks. Raises InvalidRequestError."""
    found = [part.model_input(param) for part in parts]
    texts = [one for one in found if isinstance(one, str)]
    if len(texts) == len(found) and found:
        return "\n".join(texts)
    if len(found) != 1:
        raise InvalidRequestError(
            f"An input in {param} has an image beside another part: models with two towers read a text or an image. "
            "Send them as inputs of their own.",
            param,
        )
    return found[0]
