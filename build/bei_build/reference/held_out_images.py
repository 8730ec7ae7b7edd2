"""Images that an engine is verified with, drawn here: shapes, ramps, stripes, noise and letters, in every format, mode
and proportion that a server reads."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_SIZES = ((224, 224), (320, 240), (97, 211), (640, 360), (33, 40), (500, 120))
_EXIF_ORIENTATION = 0x0112


class HeldOutImage(NamedTuple):
    """A file, and its name in certificates."""

    name: str
    content: bytes


@cache
def held_out_images() -> tuple[HeldOutImage, ...]:
    """48 images, drawn once: that takes a second or two. In every process they have the same pixels."""
    return tuple(_drawn())


def _drawn() -> Iterator[HeldOutImage]:
    from PIL import Image

    painters = {"ramp": _ramp, "stripes": _stripes, "noise": _noise, "blobs": _blobs, "squares": _squares}
    for number, (width, height) in enumerate(_SIZES):
        for place, (name, paint) in enumerate(painters.items()):
            seed = 10 * number + place
            image = Image.fromarray(paint(np.random.default_rng(seed), height, width))
            kind = ("PNG", "JPEG", "WEBP", "BMP", "GIF")[seed % 5]
            yield HeldOutImage(f"{name} {width} x {height}, {kind}", _saved(image, kind))
        yield HeldOutImage(f"letters {width} x {height}, PNG", _saved(_letters(width, height, number), "PNG"))
        yield _in_mode(number, width, height)
        yield _turned(number, width, height)


def _in_mode(number: int, width: int, height: int) -> HeldOutImage:
    """An image in another mode than RGB."""
    from PIL import Image

    mode, kind = (("L", "PNG"), ("RGBA", "PNG"), ("P", "PNG"), ("CMYK", "JPEG"), ("LA", "PNG"), ("1", "PNG"))[number]
    rng = np.random.default_rng(100 + number)
    image = Image.fromarray(_blobs(rng, height, width))
    if "A" in mode:
        image.putalpha(Image.fromarray(_ramp(rng, height, width)[:, :, 0]))
    return HeldOutImage(f"blobs {width} x {height}, {mode}", _saved(image.convert(mode), kind))


def _turned(number: int, width: int, height: int) -> HeldOutImage:
    """A JPEG that says by EXIF how it is turned."""
    from PIL import Image

    image, exif = Image.fromarray(_squares(np.random.default_rng(200 + number), height, width)), Image.Exif()
    exif[_EXIF_ORIENTATION] = number + 3
    return HeldOutImage(f"squares {width} x {height}, turned", _saved(image, "JPEG", exif=exif))


def _saved(image: object, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)  # type: ignore[attr-defined]
    return file.getvalue()


def _letters(width: int, height: int, number: int) -> object:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (width, height), (250, 245, 230))
    draw = ImageDraw.Draw(image)
    for row in range(0, height, 12):
        draw.text((2, row), f"Page {number}, line {row // 12}: the quick brown fox", fill=(20, row % 200, 90))
    return image


def _ramp(rng: np.random.Generator, height: int, width: int) -> npt.NDArray[np.uint8]:
    rows, columns = np.mgrid[0:height, 0:width]
    channels = [rows * 255 // height, columns * 255 // width, (rows + columns) * 255 // (height + width)]
    return np.stack([channels[index] for index in rng.permutation(3)], axis=2).astype(np.uint8)


def _stripes(rng: np.random.Generator, height: int, width: int) -> npt.NDArray[np.uint8]:
    rows, columns = np.mgrid[0:height, 0:width]
    slopes, colors = rng.integers(1, 9, 2), rng.integers(0, 256, (2, 3))
    painted: npt.NDArray[np.uint8] = colors[(rows * slopes[0] + columns * slopes[1]) // 31 % 2].astype(np.uint8)
    return painted


def _noise(rng: np.random.Generator, height: int, width: int) -> npt.NDArray[np.uint8]:
    return rng.integers(0, 256, (height, width, 3)).astype(np.uint8)


def _blobs(rng: np.random.Generator, height: int, width: int) -> npt.NDArray[np.uint8]:
    rows, columns = np.mgrid[0:height, 0:width]
    image = np.tile(rng.uniform(0, 255, 3), (height, width, 1))
    for _ in range(12):
        y, x, radius = rng.uniform(0, height), rng.uniform(0, width), rng.uniform(5, 80)
        weight = np.exp(-((rows - y) ** 2 + (columns - x) ** 2) / radius**2)[:, :, None]
        image = image * (1 - weight) + rng.uniform(0, 255, 3) * weight
    return image.astype(np.uint8)


def _squares(rng: np.random.Generator, height: int, width: int) -> npt.NDArray[np.uint8]:
    image = np.full((height, width, 3), rng.integers(0, 256, 3), np.uint8)
    for _ in range(15):
        y, x, side = rng.integers(0, height), rng.integers(0, width), rng.integers(4, 120)
        image[y : y + side, x : x + side] = rng.integers(0, 256, 3)
    return image
