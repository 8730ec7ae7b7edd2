"""How an image becomes the pixels that a model was trained with: transformers' image processors, as data."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Literal, TypeAlias

import msgspec

# Pillow's names of filters; their numbers are those of ``resample`` in preprocessor_config.json.
Resample: TypeAlias = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]
# Those that are the same in torch with antialias as in Pillow.
FRACTION_FILTERS: tuple[Resample, ...] = ("bilinear", "bicubic")

# No image tower reads larger ones; bounds what a manifest can make a server allocate.
MOST_SIDE = 4096
MOST_PATCHES = 4096
MOST_REGISTERS = 64


class ImageProcessor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Steps in order; those of an image processor that is off are None.

    ``shortest_edge``: the shorter side is resized to it, and the other in proportion. ``resize``: height and width
    without regard to proportions. ``max_num_patches``: in proportion, to as many whole patches as these are at most;
    unset in artifacts of other processors. At most one of the three is set. ``crop``: height and width of the centre,
    with level 0 around an image that is smaller. Levels (0 to 255) times ``rescale``, minus ``mean``, divided by
    ``std`` of the channel are the model's pixel values. ``fractions``: levels are not rounded to whole numbers after
    resizing (DINOv3's processor resizes numbers from 0 to 1); unset in artifacts of other processors.
    """

    shortest_edge: int | None
    resize: tuple[int, int] | None
    resample: Resample
    crop: tuple[int, int] | None
    rescale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    max_num_patches: int | msgspec.UnsetType = msgspec.UNSET
    fractions: bool | msgspec.UnsetType = msgspec.UNSET

    @property
    def scales(self) -> tuple[float, float, float]:
        """Factors of the levels, by channel."""
        return tuple(self.rescale / std for std in self.std)  # type: ignore[return-value]

    @property
    def shifts(self) -> tuple[float, float, float]:
        """What is added to the scaled levels, by channel."""
        return tuple(-mean / std for mean, std in zip(self.mean, self.std, strict=True))  # type: ignore[return-value]

    @property
    def output_size(self) -> tuple[int, int] | None:
        """Height and width of what it makes; None: they depend on the image."""
        return self.crop or self.resize


def processor_faults(processor: ImageProcessor) -> Iterator[str]:
    """Values that no processor has."""
    sides = [processor.shortest_edge or 1, *(processor.resize or ()), *(processor.crop or ())]
    if not all(1 <= side <= MOST_SIDE for side in sides):
        yield f"sizes must be from 1 to {MOST_SIDE}"
    most = processor.max_num_patches
    if sum(bool(way) for way in (processor.shortest_edge, processor.resize, most)) > 1 or (most and processor.crop):
        yield "shortest_edge, resize and max_num_patches exclude each other, and the last one crop"
    if most is not msgspec.UNSET and not 1 <= most <= MOST_PATCHES:
        yield f"max_num_patches must be from 1 to {MOST_PATCHES}"
    if processor.fractions and (not processor.resize or processor.crop or processor.resample not in FRACTION_FILTERS):
        yield f"fractions are of resizing to one size by {' or '.join(FRACTION_FILTERS)}, without crop"
    if not all(map(isfinite, (processor.rescale, *processor.mean, *processor.std))) or 0.0 in processor.std:
        yield "rescale, mean and std must be finite numbers, std other than 0"
