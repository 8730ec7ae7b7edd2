"""Files of unknown origin to pixels, with Pillow. Sizes are read from the header, and bounded, before any pixel is."""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bei.errors import InvalidImageError
from bei.image.fetch import ImageFetcher
from bei.image.source import ImageInput
from bei.utils.libraries import importing

if TYPE_CHECKING:
    from PIL.Image import Image

# Formats that are read, by their first bytes: Pillow would try some fifty, many of them hardly ever attacked, and so
# hardly ever mended.
_SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
    b"BM": "BMP",
}
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP")
_RIFF_HEAD = 30
_MOST_REASON_CHARS = 200

# Modes whose levels are not 0 to 255: converted as transformers converts them, nearly all of an image would be white.
_WIDE_MODES = ("I", "F")

# EXIF, section 4.6.4: what undoes an orientation, by the names of Pillow's Transpose.
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


@dataclass(frozen=True)
class ImageLimits:
    """``max_bytes`` of a file, ``max_pixels`` of the image in it (of the first frame). ``fetcher`` of URLs; None: they
    are refused."""

    max_bytes: int
    max_pixels: int
    fetcher: ImageFetcher | None = None


def check_able(purpose: str) -> None:
    """Require Pillow. Raises MissingDependencyError."""
    _pillow(purpose)


def decoded(source: ImageInput, limits: ImageLimits) -> Image:
    """The image upright, as where transformers reads files, and in RGB with transparency on white, as where its
    processors get an image; the first frame of several. Raises InvalidImageError.
    """
    pil, param = _pillow("Reading images"), source.param
    try:
        image = _opened(pil, source, limits) if isinstance(source.content, bytes | str | Path) else source.content
        _check_size(image.width, image.height, limits, param)
        _check_mode(image.mode, param)
        image.load()
        return _rgb(pil, _upright(pil, image))
    except InvalidImageError:
        raise
    except MemoryError:
        raise InvalidImageError("An image needs more memory than there is: make it smaller.", param) from None
    except (pil.Image.DecompressionBombError, pil.Image.DecompressionBombWarning):  # its own limit, found as it opens
        raise InvalidImageError("An image has too many pixels: make it smaller.", param) from None
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError, struct.error, zlib.error and others
        reason = " ".join(str(error).split())[:_MOST_REASON_CHARS]
        if not reason or isinstance(error, pil.UnidentifiedImageError):  # whose message names an object of Python's
            reason = "its header is damaged"
        raise InvalidImageError(f"An image cannot be read ({reason}): send a whole file.", param) from None


def _opened(pil: Any, source: ImageInput, limits: ImageLimits) -> Image:
    """The image of a file, of which only the header is read. Raises what Pillow raises, InvalidImageError."""
    num_bytes = source.num_bytes
    if num_bytes > limits.max_bytes:
        raise InvalidImageError(
            f"An image has {num_bytes:,} bytes, the limit is {limits.max_bytes:,}: make it smaller.",
            source.param,
        )
    content = source.file_bytes(limits.fetcher)
    kind = _kind(content, source.param)
    if kind == "WEBP":  # its decoder allocates the whole canvas as it opens a file
        width, height = webp_size(content, source.param)
        _check_size(width, height, limits, source.param)
    return pil.Image.open(io.BytesIO(content), formats=[kind])  # type: ignore[no-any-return]


def _kind(content: bytes, param: str) -> str:
    for signature, kind in _SIGNATURES.items():
        if content.startswith(signature):
            return kind
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "WEBP"
    raise InvalidImageError(f"An image is of no format that is read: send one of {', '.join(FORMATS)}.", param)


def webp_size(content: bytes, param: str) -> tuple[int, int]:
    """Width and height by the header (developers.google.com/speed/webp/docs/riff_container)."""
    chunk = content[12:16]
    if len(content) >= _RIFF_HEAD:
        if chunk == b"VP8X":
            width, height = (int.from_bytes(content[at : at + 3], "little") + 1 for at in (24, 27))
            return width, height
        if chunk == b"VP8L":
            (bits,) = struct.unpack("<I", content[21:25])
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        if chunk == b"VP8 ":
            width, height = struct.unpack("<HH", content[26:30])
            return width & 0x3FFF, height & 0x3FFF
    raise InvalidImageError("An image cannot be read (it has no header of WEBP): send a whole WEBP.", param)


def _check_size(width: int, height: int, limits: ImageLimits, param: str) -> None:
    if not width or not height:
        raise InvalidImageError(f"An image has {width} x {height} pixels: send one that has some.", param)
    if width * height > limits.max_pixels:
        raise InvalidImageError(
            f"An image has {width} x {height} pixels, the limit is {limits.max_pixels:,}: make it smaller.", param
        )


def _check_mode(mode: str, param: str) -> None:
    if mode.startswith(_WIDE_MODES):
        raise InvalidImageError(
            f"An image has more than 8 bits a channel (mode {mode}), which the model's processor would read as white: "
            "convert it to 8 bits.",
            param,
        )


def _upright(pil: Any, image: Image) -> Image:
    """As PIL.ImageOps.exif_transpose, without the metadata that it writes."""
    name = _UPRIGHT.get(image.getexif().get(_ORIENTATION, 1))
    return image.transpose(pil.Image.Transpose[name]) if name else image


def _rgb(pil: Any, image: Image) -> Image:
    """As transformers.image_transforms.convert_to_rgb."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    transparent = image.convert("RGBA")
    white = pil.Image.new("RGBA", transparent.size, (255, 255, 255, 255))
    return pil.Image.alpha_composite(white, transparent).convert("RGB")  # type: ignore[no-any-return]


def _pillow(purpose: str) -> Any:
    with importing("pillow", "image", purpose, modules=("PIL", "PIL.Image")):
        import PIL.Image
    return PIL
