"""Sizes of images by their first bytes are those that Pillow finds, and damage is no size."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bei.image.header import size_by_header
from bei.image.source import ImageInput

FORMS: list[tuple[str, dict[str, Any]]] = [
    ("PNG", {}),
    ("GIF", {}),
    ("BMP", {}),
    ("JPEG", {}),
    ("JPEG", {"progressive": True, "icc_profile": b"p" * 50_000}),
    ("WEBP", {}),
    ("WEBP", {"lossless": True}),
    ("WEBP", {"icc_profile": b"p" * 100}),
]


def file_of(width: int, height: int, kind: str, options: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (9, 90, 200)).save(out, kind, **options)
    return out.getvalue()


@pytest.mark.parametrize("size", [(1, 1), (300, 70), (70, 1300)], ids=str)
@pytest.mark.parametrize(("kind", "options"), FORMS, ids=[f"{kind}-{'-'.join(given)}" for kind, given in FORMS])
def test_sizes_are_those_of_the_file(kind: str, options: dict[str, Any], size: tuple[int, int]) -> None:
    content = file_of(*size, kind, options)
    text = base64.b64encode(content).decode()
    for form in (content, text, f"data:image/{kind.lower()};base64,{text}", Image.open(io.BytesIO(content))):
        assert size_by_header(ImageInput(form)) == size[::-1]


@pytest.mark.parametrize(("kind", "options"), FORMS, ids=[f"{kind}-{'-'.join(given)}" for kind, given in FORMS])
def test_half_a_header_has_no_size(kind: str, options: dict[str, Any]) -> None:
    content = file_of(300, 70, kind, options)
    for length in range(60):
        assert size_by_header(ImageInput(content[:length])) in (None, (70, 300))
    assert size_by_header(ImageInput(content[:15])) in (None, (70, 300))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"junk",
        b"BM",
        b"\xff\xd8" + b"\xff\xe0\x00\x00" * 20_000,
        b"\xff\xd8\x00\x00\x00\x00\x00",
        "é",
        "no base64!",
    ],
    ids=["empty", "junk", "short", "segments", "mark", "letters", "text"],
)
def test_damage_has_no_size(content: bytes | str) -> None:
    assert size_by_header(ImageInput(content)) is None


def test_paths_and_urls_are_not_opened(tmp_path: Path) -> None:
    for content in (tmp_path / "a.png", "https://a.example/b.png", "data:text/plain,x"):
        assert size_by_header(ImageInput(content)) is None


def test_a_bmp_from_its_top_has_a_size() -> None:
    content = bytearray(file_of(5, 7, "BMP", {}))
    content[22:26] = (-7).to_bytes(4, "little", signed=True)
    assert size_by_header(ImageInput(bytes(content))) == (7, 5)


def test_a_gif_has_the_size_of_its_first_frame_where_that_is_larger_than_the_canvas() -> None:
    """Pillow decodes all of the frame, which was counted as a canvas of one pixel."""
    content = bytearray(file_of(300, 70, "GIF", {"comment": b"c" * 600}))
    content[6:10] = (1).to_bytes(2, "little") + (90).to_bytes(2, "little")
    with Image.open(io.BytesIO(content)) as image:
        image.load()
        assert image.size == (300, 90)
    assert size_by_header(ImageInput(bytes(content))) == (90, 300)


def test_a_gif_whose_frame_is_far_behind_comments_has_no_size() -> None:
    content = file_of(300, 70, "GIF", {"comment": b"c" * 100_000})
    assert size_by_header(ImageInput(content)) is None
