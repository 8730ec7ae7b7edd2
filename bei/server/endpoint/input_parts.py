"""Inputs as JSON objects: a text, or an image as a data URL or base64, in the forms of several APIs."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from bei.errors import InvalidRequestError
from bei.image.source import ImageInput, MixedInput
from bei.server.endpoint.field_schema import NULL, Limits, Text, limits

_IMAGE = "The file, as a data URL (data:image/png;base64,...) or as base64 alone. PNG, JPEG, WEBP, GIF, BMP."
ImageText: TypeAlias = Annotated[str, Meta(description=_IMAGE, min_length=1)]


class ImageURL(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's. A `detail` changes nothing."""

    url: ImageText
    detail: str | None = None


_NO_IMAGES = (None,) * 5
_IMAGE_TYPES = ("image", "image_base64", "image_url", "input_image")
_TYPES_OF = {
    "text": ("input_text", "text"),
    **dict.fromkeys(("image", "image_url", "image_base64", "bytes", "url"), _IMAGE_TYPES),
}


def _part_with(field: str, *no_part: str) -> dict[str, Any]:
    """Schema of a part whose content stands in ``field``, not in others or ``no_part``."""
    others = {other: NULL for other in (*_TYPES_OF, *no_part) if other != field}
    kinds = {"enum": [None, *_TYPES_OF[field]]}
    return {"required": [field], "properties": {field: {"not": NULL}, **others, "type": kinds}}


# An image beside a text.
_BOTH: Mapping[str, Any] = {
    **{field: NULL for field in _TYPES_OF},
    **{field: {"not": NULL} for field in ("text", "image")},
}
_NO_PART: Mapping[str, Any] = {field: NULL for field in ("type", *_TYPES_OF)}


class PartFields(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a text or an image."""

    type: Literal["text", "input_text", "image_url", "input_image", "image_base64", "image"] | None = None
    text: Text | None = None
    image: ImageText | None = None
    image_url: ImageURL | ImageText | None = None
    image_base64: ImageText | None = None
    bytes: ImageText | None = None
    url: ImageText | None = None

    @property
    def images(self) -> list[str]:
        """Of all its fields."""
        given = (self.image, self.image_url, self.image_base64, self.bytes, self.url)
        if given == _NO_IMAGES:
            return []
        return [one.url if isinstance(one, ImageURL) else one for one in given if one is not None]

    def compared(self, param: str) -> str | ImageInput | MixedInput:
        """As ``model_input``, or both: the image first, as Qwen3-VL's own code writes them."""
        if self.text is None or not (images := self.images):
            return self.model_input(param)
        if len(images) > 1:
            raise InvalidRequestError(
                f"An object in {param} has {len(images)} images beside its text: send them in order, as content.", param
            )
        return MixedInput((ImageInput(images[0], param), self.text))

    def model_input(self, param: str) -> str | ImageInput:
        """What the model reads. Raises InvalidRequestError unless the object holds one text or one image."""
        text, images, said = self.text, self.images, self.type  # hundreds of thousands may be in one request
        if len(images) != (text is None) or (said is not None and said.endswith("text") == (text is None)):
            raise InvalidRequestError(
                f"An object in {param} holds one text or one image, as its type says: text, image, image_url or "
                "image_base64.",
                param,
            )
        return ImageInput(images[0], param) if text is None else text


class InputPart(PartFields, forbid_unknown_fields=True):
    """A text or an image: OpenAI's `{"type": "image_url", "image_url": {"url": ...}}`, Jina's `{"image": ...}` and, of
    its clients, `{"bytes": ...}` and `{"url": ...}`, Voyage's `{"type": "image_base64", "image_base64": ...}`. Images
    are for models with an image tower."""

    _limits: ClassVar[Limits] = (
        {
            "description": "One text or one image, as its type says.",
            "oneOf": [_part_with(field) for field in _TYPES_OF],
        },
    )


class ComparedInput(PartFields, forbid_unknown_fields=True):
    """A text, an image or (models that read both together) both, as a part or, in order, as `{"content": [part]}`."""

    content: Annotated[list[InputPart], limits(minItems=1)] | None = None

    _limits: ClassVar[Limits] = (
        {
            "description": "One text or one image, as its type says.",
            "oneOf": [
                *(_part_with(field, "content") for field in _TYPES_OF),
                {"required": ["text", "image"], "properties": {**_BOTH, "content": NULL}},
                {"required": ["content"], "properties": {"content": {"not": NULL}, **_NO_PART}},
            ],
        },
    )

    def compared(self, param: str) -> str | ImageInput | MixedInput:
        """As of a part; the parts of ``content`` in their order."""
        if self.content is None:
            return super().compared(param)
        if (other := next((field for field in _NO_PART if getattr(self, field) is not None), None)) is not None:
            raise InvalidRequestError(
                f"An object in {param} has {other} beside content: send all of its texts and images in content.", param
            )
        return joined_parts(self.content, param)


# Fields that hold an image where a text stands beside them. Others (`url`, `bytes`) are then about the text.
_BESIDE_TEXTS = ("image", "image_url", "image_base64", "content")


def image_beside(given: Mapping[str, Any]) -> str | None:
    """The field of an object with a text in which it has an image too; None: it has none."""
    for field in _BESIDE_TEXTS:
        found = given.get(field)
        is_list = isinstance(found, list) and any(isinstance(one, dict) and image_beside(one) for one in found)
        if is_list if field == "content" else found is not None:
            return field
    return None


class JoinedPart(InputPart, forbid_unknown_fields=True):
    """One of the parts of an input: a text, which may be empty beside others, or an image."""

    text: str | None = None


# One part, or several.
_ALONE = {"maxItems": 1, "items": {"properties": {"text": {"minLength": 1}}}}
Parts: TypeAlias = Annotated[list[JoinedPart], limits(minItems=1, anyOf=[_ALONE, {"minItems": 2}])]


class JoinedInput(msgspec.Struct):
    """One input: an image, texts, which alone are joined by line breaks, or (models that read both together) both."""

    content: Parts


def joined_parts(parts: Seq[InputPart], param: str) -> str | ImageInput | MixedInput:
    """The parts of one input: an image, texts, or both in their order. Texts alone have a line break between them, as
    vLLM joins them; beside an image nothing is added, as in the models' own templates and in ``bei.Model``. Raises
    InvalidRequestError, also where there are none."""
    if not parts:
        raise InvalidRequestError(f"An input in {param} has no parts: send at least one.", param)
    found = [part.model_input(param) for part in parts]
    texts = [one for one in found if isinstance(one, str)]
    if len(texts) == len(found):
        return "\n".join(texts)
    return found[0] if len(found) == 1 else MixedInput((*found,))
