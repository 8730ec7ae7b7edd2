"""Hostile images: each is an error of its own, within its bounds, and nothing is fetched."""

from __future__ import annotations

import io
import random
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from PIL import Image

from bei.errors import InvalidImageError
from bei.image.decode import ImageLimits, decoded
from bei.image.source import ImageInput
from tests.support.two_towers import data_url, drawn_files, png

LIMITS = ImageLimits(max_bytes=500_000, max_pixels=1_000_000)


def chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_of(width: int, height: int, rows: bytes = b"") -> bytes:
    """A PNG that says it has these sizes."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def webp_of(width: int, height: int) -> bytes:
    """The header of a WEBP with a canvas of these sizes."""
    canvas = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"VP8X" + struct.pack("<I", 10) + bytes(4) + canvas + bytes(40)
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def exif_loop() -> bytes:
    """A JPEG whose EXIF refers to itself."""
    block = b"II*\0" + struct.pack("<I", 8) + struct.pack("<HHHII", 1, 0x8769, 4, 1, 8) + struct.pack("<I", 8)
    return saved(Image.new("RGB", (8, 8)), "JPEG", exif=b"Exif\0\0" + block)


HOSTILE = {
    "a bomb": (png_of(60_000, 60_000, bytes(1000)), "too many pixels"),
    "more pixels than the limit": (png(2000, 600), "2000 x 600 pixels"),
    "a bomb of Pillow's own": (png_of(2**31 - 1, 2**31 - 1), "pixels|cannot be read"),
    "no rows": (png_of(100, 100), "cannot be read"),
    "no width": (png_of(0, 100), "cannot be read|0 x 100"),
    "a WEBP of 268 million pixels": (webp_of(16_384, 16_384), "16384 x 16384 pixels"),
    "a WEBP without a header": (b"RIFF\x10\0\0\0WEBPjunk", "no header of WEBP"),
    "an SVG": (b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>', "of no format"),
    "a TIFF": (saved(Image.new("RGB", (8, 8)), "TIFF"), "of no format"),
    "a PDF": (b"%PDF-1.7\n", "of no format"),
    "nothing": (b"", "of no format"),
    "HTML behind the first bytes of a GIF": (b"GIF89a<script>alert(1)</script>", "cannot be read"),
    "a signature alone": (b"\x89PNG\r\n\x1a\n", "cannot be read"),
    "16 bits a channel": (saved(Image.new("I;16", (8, 8)), "PNG"), "more than 8 bits"),
    "a file above the limit": (b"\x89PNG\r\n\x1a\n" + bytes(600_000), "600,008 bytes, the limit is 500,000"),
}


def gif_of_many(frames: int) -> bytes:
    """An animation of noise."""
    rng = random.Random(1)
    images = [Image.frombytes("P", (64, 64), rng.randbytes(4096)) for _ in range(frames)]
    return saved(images[0], "GIF", save_all=True, append_images=images[1:])


def text_bomb() -> bytes:
    """A PNG whose comment is 100 MB, in 100 kB."""
    body = b"Comment\0\0" + zlib.compress(bytes(100_000_000))
    content = png()
    return content[:33] + chunk(b"zTXt", body) + content[33:]


def progressive_bomb() -> bytes:
    """A progressive JPEG with the same scan 4,000 times."""
    content = saved(Image.new("RGB", (64, 64), (9, 80, 200)), "JPEG", progressive=True)
    last = content.rindex(b"\xff\xda")
    return content[:last] + content[last:-2] * 4000 + content[-2:]


POLYGLOTS = {
    "a ZIP behind a PNG": png() + b"PK\x03\x04" + bytes(100),
    "HTML behind a JPEG": saved(Image.new("RGB", (8, 8)), "JPEG") + b"<script>alert(1)</script>",
    "a PNG's comment is PHP": png()[:33] + chunk(b"tEXt", b"Comment\0<?php system($_GET[0]);") + png()[33:],
    "an animation of 70 frames": gif_of_many(70),
    "a scan that is repeated": progressive_bomb(),
}


@pytest.mark.parametrize("name", POLYGLOTS)
def test_what_lies_beside_an_image_is_not_looked_at_and_takes_no_time(name: str) -> None:
    began, before = time.process_time(), psutil.Process().memory_info().rss
    assert decoded(ImageInput(POLYGLOTS[name]), LIMITS).mode == "RGB"
    assert time.process_time() - began < 2
    assert psutil.Process().memory_info().rss - before < 50_000_000


def test_a_comment_that_unpacks_to_much_is_an_error() -> None:
    before = psutil.Process().memory_info().rss
    with pytest.raises(InvalidImageError, match="cannot be read"):
        decoded(ImageInput(text_bomb()), LIMITS)
    assert psutil.Process().memory_info().rss - before < 50_000_000


URLS = [
    "http://169.254.169.254/latest/meta-data",
    "https://example.com/cat.png",
    "//example.com/cat.png",
    "file:///etc/passwd",
    "ftp://example.com/a.png",
    "HTTP://localhost:8000/health",
    "javascript:alert(1)",
    "data:text/html;base64,PGI+",
    "data:image/png,raw",
    "data:;base64,",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_an_error_of_its_own(name: str) -> None:
    content, said = HOSTILE[name]
    with pytest.raises(InvalidImageError, match=said) as caught:
        decoded(ImageInput(content, "inputs"), LIMITS)
    assert caught.value.param == "inputs"
    assert "object at 0x" not in str(caught.value)


@pytest.mark.parametrize("url", URLS)
def test_no_url_is_fetched(url: str) -> None:
    with pytest.raises(InvalidImageError, match=r"fetches no URLs|data URL"):
        decoded(ImageInput(url), LIMITS)


def test_text_that_is_not_base64_is_refused() -> None:
    with pytest.raises(InvalidImageError, match="not base64"):
        decoded(ImageInput("cat.png"), LIMITS)


def test_the_file_of_a_path_is_read_as_it_is_decoded(tmp_path: Path) -> None:
    image, large = ImageInput(tmp_path / "a.png"), ImageInput(tmp_path / "large")
    with pytest.raises(InvalidImageError, match=r"No such file or directory: .*a\.png"):
        decoded(image, LIMITS)
    (tmp_path / "a.png").write_bytes(png_of(3, 2, b"\0" * 20))
    assert decoded(image, LIMITS).size == (3, 2)
    (tmp_path / "large").write_bytes(bytes(LIMITS.max_bytes + 1))
    with pytest.raises(InvalidImageError, match="500,001 bytes"):
        decoded(large, LIMITS)


def test_an_exif_that_refers_to_itself_ends() -> None:
    assert decoded(ImageInput(exif_loop()), LIMITS).size == (8, 8)


def damaged() -> Iterator[bytes]:
    """200 files: cut off, or with bytes changed."""
    generator = random.Random(0)
    files = drawn_files()
    for number in range(200):
        content = bytearray(files[number % len(files)])
        if number % 3 == 0:
            del content[generator.randrange(1, len(content)) :]
        else:
            for _ in range(generator.randrange(1, 20)):
                content[generator.randrange(len(content))] = generator.randrange(256)
        yield bytes(content)


def test_damaged_files_are_images_or_errors_and_memory_is_bounded() -> None:
    before, errors = psutil.Process().memory_info().rss, []
    for content in damaged():
        try:
            assert decoded(ImageInput(content), LIMITS).mode == "RGB"
        except InvalidImageError as error:
            errors.append(str(error))
    assert len(errors) > 50
    assert all(error.isprintable() for error in errors)
    assert psutil.Process().memory_info().rss - before < 50_000_000


def test_transparency_is_on_white_and_animations_show_their_first_frame() -> None:
    clear = saved(Image.new("RGBA", (4, 4), (255, 0, 0, 0)), "PNG")
    assert decoded(ImageInput(clear), LIMITS).getpixel((0, 0)) == (255, 255, 255)
    frames = [Image.new("RGB", (4, 4), color) for color in ((255, 0, 0), (0, 255, 0))]
    moving = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decoded(ImageInput(moving), LIMITS).getpixel((0, 0)) == (255, 0, 0)


def test_a_data_url_and_base64_are_the_file() -> None:
    for content in (data_url(png()), data_url(png()).partition(",")[2], data_url(png()).replace("data:", "DATA:")):
        assert decoded(ImageInput(content), LIMITS).tobytes() == decoded(ImageInput(png()), LIMITS).tobytes()
