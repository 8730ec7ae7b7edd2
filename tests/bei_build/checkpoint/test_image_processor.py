"""preprocessor_config.json: every setting is honoured, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bei.artifact.image_processor import ImageProcessor
from bei.errors import CheckpointError
from bei_build.checkpoint.image_processor import read_image_processor
from tests.support.two_towers import CLIP_PROCESSOR, DINOV3_PROCESSOR, write_processor


def read(folder: Path, **changed: Any) -> ImageProcessor:
    write_processor(folder, {**CLIP_PROCESSOR, **changed})
    found = read_image_processor(folder)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"image_processor_type": "DPTImageProcessor"}, "image_processor_type"),
        ({"image_processor_type": None}, "image_processor_type"),
        ({"do_convert_rgb": False}, "do_convert_rgb"),
        ({"do_pad": True}, "do_pad"),
        ({"size": {"longest_edge": 224}}, "size"),
        ({"size": {"shortest_edge": 224, "longest_edge": 300}}, "size"),
        ({"size": "224"}, "size"),
        ({"crop_size": {"height": 224}}, "crop_size"),
        ({"resample": 9}, "resample"),
        ({"resample": "bicubic"}, "resample"),
        ({"rescale_factor": "1/255"}, "rescale_factor"),
        ({"image_mean": 0.5}, "image_mean"),
        ({"image_std": [0.5, 0.5]}, "image_std"),
        ({"image_std": [0.5, 0.0, 0.5]}, "std other than 0"),
        ({"size": {"shortest_edge": 100_000}}, "sizes must be"),
        ({"do_flip_channel_order": True}, "do_flip_channel_order"),
        ({"max_num_patches": 256}, "max_num_patches"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(changed: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=named):
        read(tmp_path, **changed)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"size": {"shortest_edge": 48}}, "size"),
        ({"do_center_crop": True, "crop_size": 48}, "do_center_crop"),
        ({"do_rescale": False}, "do_rescale"),
        ({"resample": 1}, "resample"),
    ],
)
def test_a_processor_that_resizes_fractions_is_refused_where_torch_and_pillow_may_differ(
    changed: dict[str, Any], named: str, tmp_path: Path
) -> None:
    write_processor(tmp_path, {**DINOV3_PROCESSOR, **changed})
    with pytest.raises(CheckpointError, match=named):
        read_image_processor(tmp_path)


def test_settings_without_an_effect_are_accepted(tmp_path: Path) -> None:
    assert read(tmp_path, data_format="channels_first", do_pad=None, processor_class="CLIPProcessor") == read(tmp_path)


def test_one_number_is_the_shortest_edge_and_a_square_to_crop(tmp_path: Path) -> None:
    found = read(tmp_path, size=48, crop_size=48)
    assert found == read(tmp_path)
    assert (found.shortest_edge, found.crop) == (48, (48, 48))


def test_what_one_number_as_size_means_may_be_said(tmp_path: Path) -> None:
    """``get_size_dict`` of transformers."""
    found = read(tmp_path, size=48, default_to_square=True)
    assert (found.shortest_edge, found.resize) == (None, (48, 48))
    write_processor(tmp_path, {"image_processor_type": "ViTImageProcessor", "size": 48, "default_to_square": False})
    vit = read_image_processor(tmp_path)
    assert vit is not None
    assert (vit.shortest_edge, vit.resize) == (48, None)


def test_pixels_within_size_are_passed_over_only_where_they_stand_beside_it_too(tmp_path: Path) -> None:
    """Else transformers refuses such a size."""
    size = {"shortest_edge": 56**2, "longest_edge": 112**2, "max_pixels": 9}
    settings: dict[str, Any] = {"image_processor_type": "Qwen2VLImageProcessor", "size": size}
    write_processor(tmp_path, settings)
    with pytest.raises(CheckpointError, match="bei reads a shortest_edge and a longest_edge"):
        read_image_processor(tmp_path, 14)
    write_processor(tmp_path, {**settings, "max_pixels": 112**2})
    assert read_image_processor(tmp_path, 14) is not None


def test_what_the_file_leaves_out_is_the_classs_default(tmp_path: Path) -> None:
    write_processor(tmp_path, {"feature_extractor_type": "CLIPFeatureExtractor"})
    found = read_image_processor(tmp_path)
    assert found is not None
    assert (found.shortest_edge, found.crop, found.resample) == (224, (224, 224), "bicubic")


def test_the_part_of_a_whole_processors_file_comes_first(tmp_path: Path) -> None:
    read(tmp_path)
    whole = {"processor_class": "CLIPProcessor", "image_processor": {**CLIP_PROCESSOR, "resample": 2}}
    (tmp_path / "processor_config.json").write_text(json.dumps(whole))
    found = read_image_processor(tmp_path)
    assert found is not None
    assert found.resample == "bilinear"


def test_a_folder_without_the_file_has_none(tmp_path: Path) -> None:
    assert read_image_processor(tmp_path) is None
