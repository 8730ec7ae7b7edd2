"""Images become the pixel values that transformers' image processors make, and patches in the order of the weights."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from bei.artifact.image_processor import ImageProcessor
from bei.core import Float32Array, Levels
from bei.errors import InvalidImageError
from bei.image.decode import ImageLimits
from bei.image.encoder import ImageEncoder, patches
from bei.image.source import ImageInput
from bei_build.checkpoint.image_processor import read_image_processor
from tests.support.two_towers import (
    CLIP_PROCESSOR,
    DINOV3_PROCESSOR,
    drawn_files,
    pixel_values,
    png,
    write_processor,
)

LIMITS = ImageLimits(max_bytes=1_000_000, max_pixels=1_000_000)
SIGLIP = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 32, "width": 32}}
PROCESSORS: dict[str, dict[str, Any]] = {
    "CLIP": CLIP_PROCESSOR,
    "SigLIP": SIGLIP,
    "bilinear": {**SIGLIP, "resample": 2},
    "nearest": {**SIGLIP, "resample": 0},
    "lanczos": {**CLIP_PROCESSOR, "resample": 1},
    "a crop that is larger": {**CLIP_PROCESSOR, "crop_size": {"height": 64, "width": 64}},
    "an odd crop": {**CLIP_PROCESSOR, "size": 47, "crop_size": 33},
    "no rescaling": {**SIGLIP, "do_rescale": False},
    "no normalization": {**CLIP_PROCESSOR, "do_normalize": False},
    "no resizing": {**CLIP_PROCESSOR, "do_resize": False},
    "fractions": DINOV3_PROCESSOR,
    "fractions, bicubic": {**DINOV3_PROCESSOR, "resample": 3, "size": {"height": 300, "width": 300}},
}


def normalized(levels: Levels, processor: ImageProcessor) -> Float32Array:
    """Pixel values [3, height, width], as the graph computes them of levels."""
    scales, shifts = (np.array(of, np.float32) for of in (processor.scales, processor.shifts))
    found: Float32Array = (levels * scales + shifts).transpose(2, 0, 1)
    return found


def encoder_of(processor: ImageProcessor, side: int) -> ImageEncoder:
    """One whose patches are the whole image."""
    return ImageEncoder(processor, (side, side), side, num_leading=0, limits=LIMITS)


@pytest.mark.parametrize("name", PROCESSORS)
def test_pixel_values_are_the_librarys(name: str, tmp_path: Path) -> None:
    write_processor(tmp_path, PROCESSORS[name])
    processor = read_image_processor(tmp_path)
    assert processor is not None
    assert processor.output_size is not None
    encoder = encoder_of(processor, processor.output_size[0])
    for content in drawn_files():
        expected = pixel_values(tmp_path, content)[0].numpy()
        found = normalized(encoder.levels(ImageInput(content)), processor)
        np.testing.assert_allclose(found, expected, atol=1e-5 * max(1.0, float(np.abs(expected).max())))


@given(rows=st.integers(1, 4), columns=st.integers(1, 4), size=st.integers(1, 5), seed=st.integers(0, 9))
def test_patches_are_rows_of_the_image_from_the_top(rows: int, columns: int, size: int, seed: int) -> None:
    levels = np.random.default_rng(seed).integers(0, 256, (rows * size, columns * size, 3)).astype(np.uint8)
    found = patches(levels, size, 2)
    assert not found[:2].any()
    for place, row in enumerate(found[2:]):
        top, left = place // columns * size, place % columns * size
        np.testing.assert_array_equal(row.reshape(size, size, 3), levels[top : top + size, left : left + size])


def test_equal_pictures_have_one_digest_and_others_another(tmp_path: Path) -> None:
    write_processor(tmp_path, CLIP_PROCESSOR)
    processor = read_image_processor(tmp_path)
    assert processor is not None
    file = io.BytesIO()
    Image.open(io.BytesIO(png())).save(file, "BMP")
    inputs = [ImageInput(content) for content in (png(), file.getvalue(), png(color=(1, 2, 3)))]
    found = [one.image.digest for one in encoder_of(processor, 48).encode(inputs) if one.image is not None]
    assert found[0] == found[1] != found[2]


def test_an_image_of_another_size_is_refused_where_the_processor_does_not_resize(tmp_path: Path) -> None:
    write_processor(tmp_path, {**SIGLIP, "do_resize": False})
    processor = read_image_processor(tmp_path)
    assert processor is not None
    with pytest.raises(InvalidImageError, match="40 x 30 pixels, and the model reads 32 x 32"):
        encoder_of(processor, 32).levels(ImageInput(png()))


def test_a_stripe_is_not_blown_up(tmp_path: Path) -> None:
    write_processor(tmp_path, CLIP_PROCESSOR)
    processor = read_image_processor(tmp_path)
    assert processor is not None
    with pytest.raises(InvalidImageError, match="too narrow"):
        encoder_of(processor, 48).levels(ImageInput(png(60_000, 1)))
