"""Height and width of an image by its first bytes: what it will cost is known before it is decoded. A single image is
refused by ``bei.image.decode``."""

from __future__ import annotations

import struct
from collections.abc import Sequence as Seq
from pathlib import Path

from bei.errors import InvalidImageError
from bei.image.decode import ImageLimits, webp_size
from bei.image.source import ImageInput

# Bytes that are looked at: of most formats the first few; of JPEG what precedes the size may be EXIF and a profile, of
# GIF a palette and comments.
_FEW_BYTES, _MANY_BYTES = 48, 1 << 16
_MOST_SEGMENTS = 64  # of a JPEG
_JPEG, _GIF = b"\xff\xd8", b"GIF8"
# Markers from 0xC0 to 0xCF that begin no frame (ITU-T T.81, table B.1).
_NO_FRAME = (0xC4, 0xC8, 0xCC)


def size_by_header(source: ImageInput) -> tuple[int, int] | None:
    """Height and width as they are stored, before EXIF's orientation; None of a path or URL, and of what is no whole
    header."""
    content = source.content
    if isinstance(content, Path):
        return None
    if not isinstance(content, bytes | str):
        return content.height, content.width
    try:
        head = source.first_bytes(_FEW_BYTES)
        if head.startswith(_JPEG):
            return _of_jpeg(source.first_bytes(_MANY_BYTES))
        if head.startswith(_GIF):
            return _of_gif(source.first_bytes(_MANY_BYTES))
        return _of_others(head, source.param)
    except (InvalidImageError, ValueError, IndexError, struct.error):
        return None


def check_sizes(images: Seq[ImageInput], limits: ImageLimits) -> None:
    """Raise InvalidImageError where ``images`` of one input together have more pixels than one may have, as far as
    their headers say it."""
    if len(images) < 2:
        return
    num_pixels = sum(height * width for height, width in filter(None, map(size_by_header, images)))
    if num_pixels > limits.max_pixels:
        raise InvalidImageError(
            f"The {len(images)} images of an input have {num_pixels:,} pixels together, the limit is "
            f"{limits.max_pixels:,}: make them smaller.",
            images[0].param,
        )


def _of_others(head: bytes, param: str) -> tuple[int, int] | None:
    if head.startswith(b"\x89PNG"):
        width, height = struct.unpack_from(">II", head, 16)
    elif head.startswith(b"BM"):
        is_short = head[14:15] == b"\x0c"  # bytes of OS/2's header
        width, height = struct.unpack_from("<HH" if is_short else "<ii", head, 18)
    elif head.startswith(b"RIFF"):
        width, height = webp_size(head, param)
    else:
        return None
    return abs(height), width  # a BMP of negative height begins at its top


def _of_jpeg(head: bytes) -> tuple[int, int] | None:
    """Of the first frame's header (ITU-T T.81, B.2.2)."""
    at = len(_JPEG)
    for _ in range(_MOST_SEGMENTS):
        mark, kind, length = struct.unpack_from(">BBH", head, at)
        if mark != 0xFF:
            return None
        if 0xC0 <= kind <= 0xCF and kind not in _NO_FRAME:
            height, width = struct.unpack_from(">HH", head, at + 5)
            return height, width
        at += 2 + length
    return None


def _of_gif(head: bytes) -> tuple[int, int] | None:
    """Of the canvas, which Pillow enlarges to the first frame (GIF89a, sections 18 to 24)."""
    width, height, flags = struct.unpack_from("<HHB", head, 6)
    at = 13 + ((3 << ((flags & 7) + 1)) if flags & 0x80 else 0)  # behind the palette
    while head[at] == 0x21:  # extensions, of blocks that begin with their length
        at += 2
        while head[at]:
            at += head[at] + 1
        at += 1
    if head[at] != 0x2C:
        return None
    left, top, columns, rows = struct.unpack_from("<4H", head, at + 1)
    return max(height, top + rows), max(width, left + columns)
