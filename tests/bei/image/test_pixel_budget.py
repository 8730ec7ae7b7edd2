"""Images of any size that are resized to a number of pixels: transformers' sizes and pixel values."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image, ImageOps
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

from bei.artifact.image_processor import ImageProcessor, PixelBounds, PixelBudget, processor_faults
from bei.artifact.image_sequence import ImageSequence
from bei.image.decode import ImageLimits
from bei.image.encoder import ImageEncoder
from bei.image.source import ImageInput
from tests.support.two_towers import drawn_files, png

PATCH, SIDE = 16, 3
STEP = PATCH * SIDE
BUDGET = PixelBudget(most=280 * STEP**2, multiple=STEP)
SMALL = PixelBudget(most=70 * 12**2, multiple=12)
LIMITS = ImageLimits(max_bytes=10_000_000, max_pixels=10_000_000)
FILES = [*drawn_files(), png(1, 1), png(2, 700), png(1500, 1), png(2000, 1400), png(816, 768)]


def processor(**changes: Any) -> ImageProcessor:
    values: dict[str, Any] = {
        **{"shortest_edge": None, "resize": None, "resample": "bicubic", "crop": None, "rescale": 1 / 255},
        **{"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0), "budget": BUDGET},
    }
    return ImageProcessor(**{**values, **changes})


def encoder(width: int = 20) -> ImageEncoder:
    sequence = ImageSequence(before=[1, 2], token_id=3, after=[4], width=width, merged_side=SIDE)
    return ImageEncoder(processor(), (192, 192), PATCH, num_leading=0, limits=LIMITS, sequence=sequence)


def sides() -> list[tuple[int, int]]:
    drawn = np.exp(np.random.default_rng(0).uniform(0, 9, (3000, 2))).astype(int).tolist()
    return [(1, 1), (1, 4000), (4000, 1), (47, 47), (48, 13_440), (768, 816), *((int(h), int(w)) for h, w in drawn)]


@pytest.mark.parametrize("budget", [BUDGET, SMALL], ids=["usual", "small"])
def test_sizes_are_those_of_the_library(budget: PixelBudget) -> None:
    patch = budget.multiple // SIDE
    for height, width in sides():
        found = budget.size(height, width)
        assert found == get_aspect_ratio_preserving_size(height, width, patch, budget.most // patch**2, SIDE)
        assert found[0] * found[1] <= budget.most_multiples * budget.multiple**2


def test_pixel_values_are_those_of_the_library() -> None:
    """The library's patches lie row by row, and these block by block; of each image all are compared."""
    processor_class: Any = transformers.Gemma4ImageProcessorPil
    library = processor_class()
    for content in FILES:
        (found,) = encoder().encode([ImageInput(content)])
        image = found.images[0].patches
        opened = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
        theirs = library(images=opened, return_tensors="np")
        rows, columns = image.grid
        positions = theirs["image_position_ids"][0]
        assert positions[positions[:, 0] >= 0].max(0).tolist() == [columns - 1, rows - 1]
        assert theirs["num_soft_tokens_per_image"] == [len(found.images[0].places)]
        blocks = image.levels.reshape(rows // SIDE, columns // SIDE, SIDE, SIDE, -1).transpose(0, 2, 1, 3, 4)
        levels = blocks.reshape(rows * columns, -1)
        np.testing.assert_allclose(levels / 255, theirs["pixel_values"][0][: rows * columns], atol=1e-5)


def test_nine_patches_are_one_token_whose_state_they_divide_unevenly() -> None:
    (found,) = encoder().encode([ImageInput(png(64, 32))])
    count = len(found.images[0].places)
    assert found.input_ids.tolist() == [1, 2, *[3] * count, 4]
    sequence = ImageSequence(before=[], token_id=3, after=[], width=20, merged_side=SIDE)
    assert sequence.row_width == 3
    (features,) = found.with_features([np.zeros((9 * count, 3), np.float32)]).features
    assert features.rows.shape == (count, 27)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"budget": PixelBudget(most=100, multiple=48)}, "whole squares"),
        ({"budget": PixelBudget(most=48 * 48 + 1, multiple=48)}, "whole squares"),
        ({"budget": PixelBudget(most=0, multiple=0)}, "whole squares"),
        ({"max_num_patches": 9}, "exclude each other"),
        ({"crop": (48, 48)}, "exclude each other"),
        ({"bounds": PixelBounds(fewest=1, most=48 * 48, multiple=48)}, "exclude each other"),
    ],
)
def test_budgets_that_no_processor_has_are_faults(changes: dict[str, Any], fault: str) -> None:
    assert fault in next(processor_faults(processor(**changes)))
    assert not [*processor_faults(processor())]


def test_the_header_says_how_many_tokens_an_image_has() -> None:
    for content in FILES[:6]:
        (found,) = encoder().encode([ImageInput(content)])
        assert encoder().num_states(ImageInput(content)) == len(found.images[0].patches.levels)
