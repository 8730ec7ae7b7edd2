"""Inputs of texts and images together: what a model that embeds both in one vector reads of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TypeAlias

from bei.artifact.manifest import Manifest
from bei.errors import InvalidImageError
from bei.image.source import ImageInput, ImagesInText, MixedInput, named_error
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
    return too_many_images(manifest, name, images)


def too_many_images(
    manifest: Manifest, name: str, images: Seq[ImageInput], *, in_pair: bool = False
) -> InvalidImageError | None:
    """The error of ``images`` in one input, or ``in_pair``, where the model ``name``, whose decoder reads them among
    texts, reads fewer; None: it reads them."""
    most = most_images(manifest)
    if len(images) <= most:
        return None
    who = (
        f"A query and its document have {len(images)} images together"
        if in_pair
        else f"An input has {len(images)} images"
    )
    reads = f"{name} reads {'one' if most == 1 else f'{most} at most'} in {'a pair' if in_pair else 'an input'}"
    remedy = "leave the others out" if in_pair else "send the others as inputs of their own"
    return named_error(InvalidImageError(f"{who}, and {reads}: {remedy}.", images[most].param), images)


def reads_both(manifest: Manifest) -> bool:
    """True of a model that has one vector of a text and an image."""
    return _around(manifest) is not None


def read_inputs(manifest: Manifest, prompt: str, inputs: Seq[Given]) -> Seq[ModelInput]:
    """``inputs`` as the model reads them, texts without the ``prompt``: images among texts stand between the texts, in
    the place that the prompt has for a text. Of inputs that ``mixed_error`` refuses the first image is left."""
    if not any(isinstance(one, MixedInput) for one in inputs):
        return inputs  # type: ignore[return-value]  # it has none
    ends = split_prompt(prompt)
    return [one if not isinstance(one, MixedInput) else _read(one, ends, manifest) for one in inputs]


def _around(manifest: Manifest) -> tuple[str, str] | None:
    """What stands before and behind an image in an input; None where none stands beside a text."""
    tower = manifest.image_tower
    if tower is None or not tower.sequence or "embed" not in manifest.tasks:
        return None
    return tower.sequence.around or None


def most_images(manifest: Manifest) -> int:
    """That may stand in one input, or pair."""
    tower = manifest.image_tower
    return (tower.sequence.most_images or 1) if tower is not None and tower.sequence else 1


def _read(value: MixedInput, ends: tuple[str, str], manifest: Manifest) -> ImageInput | ImagesInText:
    images, around = value.images, _around(manifest)
    if around is None or len(images) > most_images(manifest):
        return images[0]
    first, last = ends
    texts = texts_between([first, *value.parts, last], around)
    return ImagesInText((*((piece,) for piece in texts),), (*images,), is_input=True)


def texts_between(parts: Seq[str | ImageInput], around: tuple[str, str]) -> list[tuple[str, ...]]:
    """The texts before, between and behind the images among ``parts``, with what stands ``around`` an image."""
    found: list[list[str]] = [[]]
    for part in parts:
        if isinstance(part, str):
            found[-1].append(part)
        else:
            found[-1].append(around[0])
            found.append([around[1]])
    return [(*texts,) for texts in found]
