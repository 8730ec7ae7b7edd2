"""Images of any size between two numbers of pixels: transformers' sizes and pixel values."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from bei.artifact.image_processor import ImageProcessor, PixelBounds, processor_faults
from bei.artifact.image_sequence import ImageSequence
from bei.errors import InvalidImageError
from bei.image.decode import ImageLimits
from bei.image.encoder import ImageEncoder
from bei.image.source import ImageInput, ImagesInText
from tests.support.two_towers import png

BOUNDS = PixelBounds(fewest=56 * 56, most=768 * 28 * 28, multiple=28)
SMALL = PixelBounds(fewest=1, most=5 * 28 * 28, multiple=28)
LIMITS = ImageLimits(max_bytes=10_000_000, max_pixels=10_000_000)
SEQUENCE = ImageSequence(before=[1, 2], token_id=3, after=[4], width=8, merged_side=2)


def encoder(bounds: PixelBounds = BOUNDS, texts: Any = None) -> ImageEncoder:
    processor = ImageProcessor(
        shortest_edge=None,
        resize=None,
        resample="bicubic",
        crop=None,
        rescale=1 / 255,
        mean=(0.48145466, 0.4578275, 0.40821073),
        std=(0.26862954, 0.26130258, 0.27577711),
        bounds=bounds,
    )
    return ImageEncoder(processor, (224, 224), 14, num_leading=0, limits=LIMITS, sequence=SEQUENCE, texts=texts)


def sides() -> list[tuple[int, int]]:
    rng = np.random.default_rng(0)
    drawn = [(int(h), int(w)) for h, w in np.exp(rng.uniform(0, 9, (3000, 2))).astype(int)]
    return [(1, 1), (1, 200), (200, 1), (27, 5400), (14, 14), (42, 42), (8000, 40), *drawn]


@pytest.mark.parametrize("bounds", [BOUNDS, SMALL], ids=["usual", "small"])
def test_sizes_are_those_of_the_library(bounds: PixelBounds) -> None:
    for height, width in sides():
        if max(height, width) <= 200 * min(height, width):
            expected = smart_resize(height, width, bounds.multiple, bounds.fewest, bounds.most)
            assert bounds.size(height, width) == expected, (height, width)


@pytest.mark.parametrize("fewest", [1, 56 * 56, 20 * 28 * 28])
def test_no_image_has_more_blocks_than_is_said(fewest: int) -> None:
    """Else it would not fit into the step that it is promised."""
    for most in (20 * 28 * 28, 768 * 28 * 28):
        bounds = PixelBounds(fewest=fewest, most=most, multiple=28)
        for height, width in sides():
            if max(height, width) <= 200 * min(height, width):
                high, wide = bounds.size(height, width)
                assert (high // 28) * (wide // 28) <= bounds.most_multiples, (height, width)


def noise(height: int, width: int) -> bytes:
    levels = np.random.default_rng(height * width).integers(0, 256, (height, width, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(levels).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("size", [(100, 140), (300, 20), (1, 1), (640, 853), (30, 30)], ids=str)
def test_pixel_values_are_those_of_the_library_in_its_order(size: tuple[int, int]) -> None:
    content = noise(*size)
    (found,) = encoder().encode([ImageInput(content)])
    (placed,) = found.images
    image = placed.patches
    processor_class: Any = transformers.Qwen2VLImageProcessorPil
    library = processor_class(min_pixels=BOUNDS.fewest, max_pixels=BOUNDS.most)
    theirs = library(images=Image.open(io.BytesIO(content)), return_tensors="np")
    assert image.grid == tuple(theirs["image_grid_thw"][0][1:])
    scaled = (image.levels.reshape(-1, 14 * 14, 3) / 255 - library.image_mean) / library.image_std
    by_channel = scaled.transpose(0, 2, 1).reshape(-1, 3, 1, 14 * 14)
    frames = np.broadcast_to(by_channel, (len(scaled), 3, 2, 14 * 14)).reshape(len(scaled), -1)
    np.testing.assert_allclose(frames, theirs["pixel_values"], atol=1e-5)


def test_four_patches_are_one_token_of_the_decoder() -> None:
    (found,) = encoder().encode([ImageInput(noise(280, 140))])
    (placed,) = found.images
    count = len(placed.patches.levels) // 4
    assert found.input_ids.tolist() == [1, 2, *[3] * count, 4]
    read = found.with_features([np.arange(4 * count * 2, dtype=np.float32).reshape(-1, 2)])
    (features,) = read.features
    assert features.rows.shape == (count, 8)
    assert features.rows[0].tolist() == [*range(8)]
    assert features.grid == (10, 5)
    assert len(found.with_features([np.zeros((0, 2), np.float32)]).features) == 1


@pytest.mark.parametrize("size", [(201, 1), (1, 5000), (4020, 20)], ids=str)
def test_stripes_are_the_error_of_that_image(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidImageError, match="200 times the shorter"):
        encoder().encode([ImageInput(png(*size))])
    with pytest.raises(ValueError, match="200"):
        smart_resize(*size)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"bounds": PixelBounds(fewest=0, most=1000, multiple=28)}, "ascend"),
        ({"bounds": PixelBounds(fewest=5000, most=1000, multiple=28)}, "ascend"),
        ({"bounds": PixelBounds(fewest=1, most=10**9, multiple=28)}, "ascend"),
        ({"bounds": PixelBounds(fewest=1, most=1000, multiple=0)}, "multiple"),
        ({"bounds": PixelBounds(fewest=1, most=700, multiple=28)}, "less than one square"),
        ({"resize": (28, 28)}, "exclude each other"),
        ({"max_num_patches": 30}, "exclude each other"),
        ({"crop": (28, 28)}, "exclude each other"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bounds_that_no_processor_has_are_refused(changes: dict[str, Any], named: str) -> None:
    import msgspec

    processor = msgspec.structs.replace(encoder()._processor, **changes)
    assert named in "; ".join(processor_faults(processor))


def test_of_a_request_that_is_cancelled_no_further_image_of_an_input_is_decoded(tmp_path: Path) -> None:
    """Up to 64 were fetched, each for the seconds of a fetch, for a client that had left."""
    texts = SimpleNamespace(max_seq_len=1000, ids_of=lambda pieces, most: [7])
    content, pieces = noise(28, 28), (("",),)
    (whole,) = encoder(texts=texts).encode([ImagesInText((pieces,) * 4, (ImageInput(content),) * 3)])
    assert len(whole.images) == 3

    class Cancelled(Exception):
        pass

    num_checks = 0

    def check() -> None:
        nonlocal num_checks
        num_checks += 1
        if num_checks == 3:  # before the input, its first image, and the second
            raise Cancelled

    images = (ImageInput(content), ImageInput(tmp_path / "none"), ImageInput(tmp_path / "none"))
    with pytest.raises(Cancelled):
        encoder(texts=texts).encode([ImagesInText((pieces,) * 4, images)], check=check)
