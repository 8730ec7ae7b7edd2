"""An image's tokens as data: patches, their pixels and their positions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from bei.engine.image_positions import Shares


@dataclass(frozen=True)
class PatchesSpec:
    """An image's tokens: patches of ``size`` by ``size`` pixels, each a product of a matrix (arXiv:2010.11929, section
    3.1), in rows from the top. With ``class_token`` a learned row goes before them, and ``registers`` more behind that
    one (arXiv:2309.16588), which have no positions.

    Levels 0 to 255 of the three channels are first multiplied by ``scales``, and ``shifts`` are added; a family's are
    those of pixel values (``behind``). ``bias``: of the
    product. ``stored_side``: the stored position table is for a square of so many patches a side, and is resized at
    build time to those of an image, ``grid`` (rows, columns), with ``antialias`` or without; None: it is for the
    model's images. ``fits_images``: it is for such a square, and is resized to each image as it is computed
    (``bei.engine.image_positions``). ``flat``: the matrix is stored as [width, numbers of a patch], in the order of its
    pixels, or of its channels; else it is stored as a convolution's. ``block_side``: patches come block by block, each
    of so many a side. ``aligned``: the table is resized to each image with its corners at the image's. ``axial``:
    positions have two tables, of columns and of rows, whose rows are added (Gemma 4).
    """

    size: int
    bias: bool
    class_token: bool
    scales: tuple[float, float, float]
    shifts: tuple[float, float, float]
    stored_side: int | None = None
    grid: tuple[int, int] | None = None
    fits_images: bool = False
    flat: Literal["", "pixels", "channels"] = ""
    registers: int = 0
    antialias: bool = False
    block_side: int = 1
    aligned: bool = False
    axial: bool = False

    def behind(self, scales: tuple[float, ...], shifts: tuple[float, ...]) -> PatchesSpec:
        """These of levels that an image processor multiplies by ``scales``, and adds ``shifts`` to, first."""
        first, own = zip(scales, shifts, strict=True), zip(self.scales, self.shifts, strict=True)
        both = [(scale * a, scale * b + shift) for (a, b), (scale, shift) in zip(first, own, strict=True)]
        red, green, blue = both
        return replace(self, scales=(red[0], green[0], blue[0]), shifts=(red[1], green[1], blue[1]))

    @property
    def num_leading(self) -> int:
        """Tokens before the patches."""
        return self.class_token + self.registers

    @property
    def width(self) -> int:
        """Numbers of one patch."""
        return 3 * self.size * self.size

    @property
    def shares(self) -> Shares | None:
        """Of the position table, where it is resized to each image."""
        if not self.fits_images or self.stored_side is None:
            return None
        return Shares(self.stored_side, self.aligned, self.block_side)
