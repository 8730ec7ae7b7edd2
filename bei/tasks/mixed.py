"""Inputs of a text and an image together: what a model that embeds both in one vector reads of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TypeAlias

from bei.artifact.manifest import Manifest
from bei.errors import InvalidImageError
from bei.image.source import ImageInput, ImageInText, MixedInput
from bei.service.call import ModelInput
from bei.tokenizer.prompts import split_prompt

# What a request may have as one input.
Given: TypeAlias = "ModelInput | MixedInput"


def mixed_error(manifest: Manifest, name: str, value: MixedInput) -> InvalidImageError | None:
    """The error of ``value`` for the model ``name``, which gives an image a vector; None where it reads ``value``."""
    images = value.images
    if _around(manifest) is None:
        return InvalidImageError(
            f"An input has an image beside another part, and {name} reads a text or an image in an input: send them as "
            "inputs of their own.",
            images[0].param,
        )
    if len(images) > 1:
        return InvalidImageError(
            f"An input has {len(images)} images, and {name} reads one in an input: send the others as inputs of their "
            "own.",
            images[1].param,
        )
    return None


def read_inputs(manifest: Manifest, prompt: str, inputs: Seq[Given]) -> Seq[ModelInput]:
    """``inputs`` as the model reads them, texts without the ``prompt``: an image among texts stands between the texts,
    in the place that the prompt has for a text. Of inputs that ``mixed_error`` refuses the first image is left."""
    if not any(isinstance(one, MixedInput) for one in inputs):
        return inputs  # type: ignore[return-value]  # it has none
    around = _around(manifest)
    return [one if not isinstance(one, MixedInput) else _read(one, prompt, around) for one in inputs]


def _around(manifest: Manifest) -> tuple[str, str] | None:
    """What stands before and behind an image in an input; None where none stands beside a text."""
    tower = manifest.image_tower
    if tower is None or not tower.sequence or "embed" not in manifest.tasks:
        return None
    return tower.sequence.around or None


def _read(value: MixedInput, prompt: str, around: tuple[str, str] | None) -> ImageInput | ImageInText:
    image, *others = value.images
    if around is None or others:
        return image
    place = value.parts.index(image)
    first, last = split_prompt(prompt)
    before = (first, *_texts(value.parts[:place]), around[0])
    behind = (around[1], *_texts(value.parts[place + 1 :]), last)
    return ImageInText((before,), image, (behind,), is_input=True)


def _texts(parts: Seq[str | ImageInput]) -> list[str]:
    return [part for part in parts if isinstance(part, str)]
