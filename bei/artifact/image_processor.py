"""How an image becomes the pixels that a model was trained with: transformers' image processors, as data."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, floor, isfinite, sqrt
from typing import Literal, TypeAlias

import msgspec

# Pillow's names of filters; their numbers are those of ``resample`` in preprocessor_config.json.
Resample: TypeAlias = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]
# Those that are the same in torch with antialias as in Pillow.
FRACTION_FILTERS: tuple[Resample, ...] = ("bilinear", "bicubic")

# No image tower reads larger ones; bounds what a manifest can make a server allocate.
MOST_SIDE = 4096
MOST_PATCHES = 16_384
MOST_REGISTERS = 64
# Of the longer side to the shorter, for processors with ``PixelBounds``: Qwen2-VL's refuses others.
MOST_STRETCHED = 200


class PixelBounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An image keeps its proportions, about: its sides are rounded to multiples of ``multiple``, and it is first made
    smaller or larger where it then had more than ``most`` pixels, or fewer than ``fewest``."""

    fewest: int
    most: int
    multiple: int

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width that an image is resized to (transformers.models.qwen2_vl: smart_resize), which is not
        stretched by more than MOST_STRETCHED."""
        step = self.multiple
        rows, columns = round(height / step), round(width / step)
        if rows * columns * step**2 > self.most:
            shrunk = sqrt((height * width) / self.most)
            return max(step, floor(height / shrunk / step) * step), max(step, floor(width / shrunk / step) * step)
        if rows * columns * step**2 < self.fewest:
            grown = sqrt(self.fewest / (height * width))
            return ceil(height * grown / step) * step, ceil(width * grown / step) * step
        return rows * step, columns * step

    @property
    def most_multiples(self) -> int:
        """Squares of ``multiple`` pixels a side in an image, at most: a side is at least one of them."""
        step, longest = self.multiple, sqrt(self.most * MOST_STRETCHED)
        shortest = sqrt(self.fewest)
        grown = self.fewest / step**2 + shortest / step * (sqrt(MOST_STRETCHED) + 1) + 1
        return max(self.most // step**2, int(longest / step), int(grown))


class PixelBudget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An image keeps its proportions, about: it is made smaller or larger until it has ``most`` pixels, and its sides
    are then rounded down to multiples of ``multiple``, of which ``most`` is a multiple too."""

    most: int
    multiple: int

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width that an image is resized to (transformers.models.gemma4:
        get_aspect_ratio_preserving_size)."""
        step, factor = self.multiple, sqrt(self.most / (height * width))
        rows, columns = floor(factor * height / step), floor(factor * width / step)
        longest = self.most // step**2
        if rows == 0:
            rows, columns = 1, min(width // height, longest)
        elif columns == 0:
            rows, columns = min(height // width, longest), 1
        return rows * step, columns * step

    @property
    def most_multiples(self) -> int:
        """Squares of ``multiple`` pixels a side in an image, at most."""
        return self.most // self.multiple**2


class ImageProcessor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Steps in order; those of an image processor that is off are None.

    ``shortest_edge``: the shorter side is resized to it, and the other in proportion. ``resize``: height and width
    without regard to proportions. ``max_num_patches``: in proportion, to as many whole patches as these are at most;
    unset in artifacts of other processors, as are ``bounds`` and ``budget``. At most one of the five is set. ``crop``:
    height and width of the centre, with level 0 around an image that is smaller. Levels (0 to 255) times ``rescale``,
    minus ``mean``, divided by ``std`` of the channel are the model's pixel values. ``fractions``: levels are not
    rounded to whole numbers after resizing (DINOv3's processor resizes numbers from 0 to 1); unset in artifacts of
    other processors.
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
    bounds: PixelBounds | msgspec.UnsetType = msgspec.UNSET
    budget: PixelBudget | msgspec.UnsetType = msgspec.UNSET

    @property
    def by_pixels(self) -> PixelBounds | PixelBudget | None:
        """How images are resized by their numbers of pixels; None: they are not."""
        return self.bounds or self.budget or None

    def most_patches(self, patch_size: int) -> int | None:
        """Patches of an image, at most, where images have many sizes; None: they have one."""
        if resized := self.by_pixels:
            return resized.most_multiples * (resized.multiple // patch_size) ** 2
        return self.max_num_patches or None

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
    most, bounds, budget = processor.max_num_patches, processor.bounds, processor.budget
    ways = (processor.shortest_edge, processor.resize, most, bounds, budget)
    if sum(map(bool, ways)) > 1 or ((most or bounds or budget) and processor.crop):
        yield "shortest_edge, resize, max_num_patches, bounds and budget exclude each other, and the last three crop"
    if bounds:
        yield from _faults_of(bounds)
    if budget and not (1 <= budget.multiple <= MOST_SIDE and _is_multiple(budget.most, budget.multiple**2)):
        yield f"budget must be a multiple from 1 to {MOST_SIDE}, and pixels that are whole squares of it"
    if most is not msgspec.UNSET and not 1 <= most <= MOST_PATCHES:
        yield f"max_num_patches must be from 1 to {MOST_PATCHES}"
    if processor.fractions and (not processor.resize or processor.crop or processor.resample not in FRACTION_FILTERS):
        yield f"fractions are of resizing to one size by {' or '.join(FRACTION_FILTERS)}, without crop"
    if not all(map(isfinite, (processor.rescale, *processor.mean, *processor.std))) or 0.0 in processor.std:
        yield "rescale, mean and std must be finite numbers, std other than 0"


def _is_multiple(pixels: int, square: int) -> bool:
    return square <= pixels <= MOST_SIDE**2 and pixels % square == 0


def _faults_of(bounds: PixelBounds) -> Iterator[str]:
    if not 1 <= bounds.multiple <= MOST_SIDE or not 1 <= bounds.fewest <= bounds.most <= MOST_SIDE**2:
        yield f"bounds must be a multiple from 1 to {MOST_SIDE}, and pixels from 1 to {MOST_SIDE**2} that ascend"
    elif bounds.most < bounds.multiple**2:
        yield "bounds.most is less than one square of bounds.multiple pixels"
