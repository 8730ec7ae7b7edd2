"""preprocessor_config.json of a model that reads images as an ``ImageProcessor``. What is not honoured is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard, get_args

import msgspec

from bei.artifact.image_processor import (
    FRACTION_FILTERS,
    MOST_PATCHES,
    ImageProcessor,
    PixelBounds,
    PixelBudget,
    Resample,
    processor_faults,
)
from bei.errors import CheckpointError, ConfigError
from bei_build.files.json_settings import read_object

# Of Pillow's Resampling.
_FILTERS: tuple[Resample, ...] = get_args(Resample)

_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_COMMON = {
    **dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True),
    "rescale_factor": 1 / 255,
    "resample": 3,
}
_CLIP = {
    **_COMMON,
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "image_mean": _CLIP_MEAN,
    "image_std": _CLIP_STD,
}
_SIGLIP = {
    **_COMMON,
    "size": {"height": 224, "width": 224},
    "do_center_crop": False,
    "crop_size": None,
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
}
# Of Qwen2-VL's processor: the frames and patches, a side, that its models join.
_FRAMES, _MERGED = 2, 2
# What transformers' classes take where the file says nothing. DINOv2 has BiT's.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "CLIP": _CLIP,
    "Siglip": _SIGLIP,
    "ViT": {**_SIGLIP, "resample": 2},
    "Bit": _CLIP,
    "DINOv3ViT": {**_SIGLIP, "resample": 2, "image_mean": _IMAGENET_MEAN, "image_std": _IMAGENET_STD},
    "Siglip2": {**_SIGLIP, "resample": 2, "size": None, "patch_size": 16, "max_num_patches": 256},
    "Qwen2VL": {
        **_CLIP,
        **{"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}, "min_pixels": None, "max_pixels": None},
        **{"do_center_crop": False, "crop_size": None},
        **{"patch_size": 14, "temporal_patch_size": _FRAMES, "merge_size": _MERGED},
    },
    "Gemma4": {
        **{**_COMMON, "do_normalize": False, "image_mean": (0.0, 0.0, 0.0), "image_std": (1.0, 1.0, 1.0)},
        **{"size": None, "do_center_crop": False, "crop_size": None, "patch_size": 16, "pooling_kernel_size": 3},
        # The second is an older name, which has no effect.
        **{"max_soft_tokens": 280, "image_seq_length": 280},
    },
}
# Of Gemma 4's processor: the tokens of an image, at most.
_SOFT_TOKENS = (70, 140, 280, 560, 1120)
# Processors that pass images of other modes on as they are, which their models refuse: as RGB they can be read.
_OF_ANY_MODE = ("ViT", "DINOv3ViT", "Siglip2")
# Processors that rescale levels before they resize.
_WITH_FRACTIONS = ("DINOv3ViT",)
# Processors for which one number as size is a square's, not the shortest edge, unless ``default_to_square`` says so.
_SQUARE = ("ViT",)
_CLASS_ENDINGS = ("FeatureExtractor", "ImageProcessor", "ImageProcessorFast", "ImageProcessorPil")
# Settings without a meaning for pixel values.
_NAMES = ("image_processor_type", "feature_extractor_type", "processor_class", "_valid_processor_keys", "auto_map")
# Settings that must have one of these values, with which they change nothing.
_WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "do_pad": (None, False),
    "pad_size": (None,),
    "data_format": (None, "channels_first"),
    "input_data_format": (None,),
    "return_tensors": (None, "pt"),
    "device": (None,),
    "disable_grouping": (None, False, True),
    "default_to_square": (None, False, True),
    "use_square_size": (None, False),
    "image_seq_length": (None,),
}


def has_image_processor(folder: Path) -> bool:
    """True if the checkpoint in ``folder`` says how images are read."""
    return _settings(folder) is not None


def read_image_processor(
    folder: Path,
    patch_size: int | None = None,
    sequence_length: int | None = None,
    usual_blocks: tuple[int, int] | None = None,
    max_pixels: int | None = None,
    *,
    has_own_blocks: bool = False,
) -> ImageProcessor | None:
    """The image processor of the checkpoint in ``folder``, whose patches are of ``patch_size``; None where it has none.
    ``sequence_length``: the tokens of a decoder that stand for an image. ``usual_blocks``: the fewest and the most
    blocks of patches where there is no ``min_pixels`` or ``max_pixels``; None: by ``size``. ``max_pixels``: fewer than
    those, as the user asks. ``has_own_blocks``: ``usual_blocks`` count, whatever the files say. Raises CheckpointError,
    ConfigError."""
    found = _settings(folder)
    if found is not None and has_own_blocks:
        found = replace(found, given={**found.given, "min_pixels": None, "max_pixels": None})
    return None if found is None else found.processor(patch_size, sequence_length, usual_blocks, max_pixels)


def _settings(folder: Path) -> _Settings | None:
    path = folder / "preprocessor_config.json"
    whole = folder / "processor_config.json"
    if whole.is_file() and isinstance(own := read_object(whole).get("image_processor"), dict):
        return _Settings(whole, own)  # transformers prefers it
    return _Settings(path, read_object(path)) if path.is_file() else None


@dataclass(frozen=True)
class _Settings:
    path: Path
    given: Mapping[str, Any]

    def processor(
        self,
        patch_size: int | None,
        sequence_length: int | None,
        usual_blocks: tuple[int, int] | None,
        max_pixels: int | None,
    ) -> ImageProcessor:
        """``patch_size`` and ``sequence_length``: of the model, which such settings of the processor must be."""
        named = self.given.get("image_processor_type") or self.given.get("feature_extractor_type") or ""
        kind = next((kind for kind in _DEFAULTS if named in [f"{kind}{ending}" for ending in _CLASS_ENDINGS]), None)
        if kind is None:
            raise self._unsupported("image_processor_type", f"supported are {' and '.join(_DEFAULTS)} image processors")
        values = {**_DEFAULTS[kind], **{name: value for name, value in self.given.items() if value is not None}}
        for name, value in self.given.items():
            if name in _DEFAULTS[kind] or name in _NAMES:
                continue
            if name == "image_seq_length" and sequence_length is not None:
                if value != sequence_length:
                    raise self._unsupported(name, f"the model's images have {sequence_length} patches")
                continue
            if value not in _WITHOUT_EFFECT.get(name, (None,)):
                raise self._unsupported(
                    name, "bei does not read it; a model that reads texts too can be built without images (--no-images)"
                )
        if (own := values.get("patch_size")) not in (None, patch_size):
            raise self._unsupported(
                "patch_size", f"it is {own}, and the model's patches have {patch_size} pixels a side"
            )
        if not values["do_convert_rgb"] and kind not in _OF_ANY_MODE:
            raise self._unsupported("do_convert_rgb", "images are always read as RGB")
        shortest, exact, bounds, budget = None, None, None, None
        if kind == "Qwen2VL":
            bounds = self._bounds(values, usual_blocks, max_pixels)
        elif kind == "Gemma4":
            budget = self._budget(values, max_pixels)
        elif max_pixels is not None:
            raise ConfigError(
                f"max_image_pixels is of images that keep their proportions, and those of {self.path} have the sizes "
                "that it says: leave it out."
            )
        elif "max_num_patches" in values:
            if not values["do_resize"] or values["size"] is not None:
                raise self._unsupported("do_resize", "images are resized to max_num_patches patches, and to no size")
        elif values["do_resize"]:
            shortest, exact = self._size(values["size"], kind)
        if kind in _WITH_FRACTIONS and values["do_resize"]:
            self._check_fractions(values, exact)
        normalizes = values["do_normalize"]
        found = ImageProcessor(
            shortest_edge=shortest,
            resize=exact,
            resample=self._resample(values["resample"]),
            crop=self._sides("crop_size", values["crop_size"]) if values["do_center_crop"] else None,
            rescale=self._number("rescale_factor", values["rescale_factor"]) if values["do_rescale"] else 1.0,
            mean=self._channels("image_mean", values["image_mean"]) if normalizes else (0.0, 0.0, 0.0),
            std=self._channels("image_std", values["image_std"]) if normalizes else (1.0, 1.0, 1.0),
            max_num_patches=self._count("max_num_patches", values),
            fractions=(kind in _WITH_FRACTIONS and bool(values["do_resize"])) or msgspec.UNSET,
            bounds=bounds or msgspec.UNSET,
            budget=budget or msgspec.UNSET,
        )
        if fault := next(processor_faults(found), None):
            raise CheckpointError(f"{self.path}: {fault}. Download the checkpoint again.")
        return found

    def _bounds(
        self, values: Mapping[str, Any], usual_blocks: tuple[int, int] | None, max_pixels: int | None
    ) -> PixelBounds:
        """The pixels of images that keep their proportions, ``max_pixels`` of them at most."""
        for name, only in (("do_resize", True), ("temporal_patch_size", _FRAMES), ("merge_size", _MERGED)):
            if values[name] != only or isinstance(only, bool) != isinstance(values[name], bool):
                raise self._unsupported(name, f"bei reads {only} of this image processor")
        size, edges = values["size"], ("shortest_edge", "longest_edge")
        elsewhere = {name for name in ("min_pixels", "max_pixels") if values[name] is not None}  # and passed over here
        if not isinstance(size, dict) or not set(size) <= {*edges, *elsewhere}:
            raise self._unsupported("size", "bei reads a shortest_edge and a longest_edge, both as numbers of pixels")
        found, block = [], (values["patch_size"] * _MERGED) ** 2
        usual = (
            (size.get(edge) for edge in edges) if usual_blocks is None else (count * block for count in usual_blocks)
        )
        for name, edge, otherwise in zip(("min_pixels", "max_pixels"), edges, usual, strict=True):
            count = otherwise if values[name] is None else values[name]
            if not _is_side(count):
                raise self._unsupported(name, f"it, or size.{edge}, must be a number of pixels")
            found.append(count)
        fewest, own = found
        if max_pixels is not None and not fewest <= max_pixels <= own:
            raise ConfigError(
                f"max_image_pixels is {max_pixels}, and images of {self.path} have from {fewest} to {own} pixels: "
                "choose a number of those."
            )
        bounds = PixelBounds(fewest=fewest, most=max_pixels or own, multiple=values["patch_size"] * _MERGED)
        most = bounds.most_multiples * _MERGED**2
        if most > MOST_PATCHES:
            fits = MOST_PATCHES // _MERGED**2 * block
            raise self._unsupported(
                "size" if values["max_pixels"] is None else "max_pixels",
                f"images of up to {bounds.most} pixels, and stripes, have up to {most} patches, and bei reads "
                f"{MOST_PATCHES} at most: build with --max-image-pixels {fits}, which larger images are shrunk to, or "
                "fewer",
            )
        return bounds

    def _budget(self, values: Mapping[str, Any], max_pixels: int | None) -> PixelBudget:
        """The pixels of an image, ``max_pixels`` at most."""
        for name, only in (("do_resize", True), ("size", None), ("do_center_crop", False)):
            if values[name] is not only:
                raise self._unsupported(name, f"bei reads {only} of this image processor")
        own, side = values["max_soft_tokens"], values["pooling_kernel_size"]
        if own not in _SOFT_TOKENS or isinstance(own, bool):
            raise self._unsupported("max_soft_tokens", f"it must be one of {', '.join(map(str, _SOFT_TOKENS))}")
        if not _is_side(side) or side < 1:
            raise self._unsupported("pooling_kernel_size", "it must be a number of patches")
        multiple = values["patch_size"] * side
        choices = {count * multiple**2: count for count in _SOFT_TOKENS if count <= own}
        if max_pixels is not None and max_pixels not in choices:
            pixels, tokens = (" or ".join(map(str, of)) for of in (choices, choices.values()))
            raise ConfigError(
                f"max_image_pixels is {max_pixels}, and images of {self.path} may have {pixels} pixels ({tokens} "
                "tokens): choose one of these."
            )
        return PixelBudget(most=max_pixels or own * multiple**2, multiple=multiple)

    def _check_fractions(self, values: Mapping[str, Any], exact: tuple[int, int] | None) -> None:
        """Refuse what such processors' resizing of fractions is not read for."""
        if exact is None:
            raise self._unsupported("size", 'bei reads {"height": n, "width": n} of this image processor')
        if values["do_center_crop"] or not values["do_rescale"]:
            name = "do_center_crop" if values["do_center_crop"] else "do_rescale"
            raise self._unsupported(name, "bei reads this image processor without a crop, and with rescaling")
        if self._resample(values["resample"]) not in FRACTION_FILTERS:
            raise self._unsupported(
                "resample", f"bei reads {' and '.join(FRACTION_FILTERS)} (2 and 3) of this image processor"
            )

    def _size(self, value: object, kind: str) -> tuple[int | None, tuple[int, int] | None]:
        """The shortest edge, or height and width."""
        is_square = self.given.get("default_to_square", kind in _SQUARE)
        if _is_side(value) and not is_square:  # of the first versions
            return value, None
        if isinstance(value, dict) and set(value) == {"shortest_edge"} and _is_side(value["shortest_edge"]):
            return value["shortest_edge"], None
        return None, self._sides("size", value)

    def _sides(self, name: str, value: object) -> tuple[int, int]:
        if _is_side(value):
            return value, value
        if isinstance(value, dict) and set(value) == {"height", "width"} and all(map(_is_side, value.values())):
            return value["height"], value["width"]
        raise self._unsupported(name, 'bei reads {"shortest_edge": n} and {"height": n, "width": n}')

    def _resample(self, value: object) -> Resample:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(_FILTERS):
            raise self._unsupported("resample", f"it must be a number from 0 to {len(_FILTERS) - 1}")
        return _FILTERS[value]

    def _count(self, name: str, values: Mapping[str, Any]) -> int | msgspec.UnsetType:
        if name not in values:
            return msgspec.UNSET
        if not _is_side(count := values[name]):
            raise self._unsupported(name, "it must be a number of patches")
        return count

    def _number(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._unsupported(name, "it must be a number")
        return float(value)

    def _channels(self, name: str, value: object) -> tuple[float, float, float]:
        if not isinstance(value, list | tuple) or len(value) != 3:
            raise self._unsupported(name, "it must have three numbers, of red, green and blue")
        red, green, blue = (self._number(name, each) for each in value)
        return red, green, blue

    def _unsupported(self, name: str, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path} has {name} = {str(self.given.get(name))[:80]!r}: {reason}.")


def _is_side(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
