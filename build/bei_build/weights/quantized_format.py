"""ModelOpt's quantization settings in a checkpoint: in hf_quant_config.json, in config.json, or in both.

Two forms are read: the nested one of hf_quant_config.json, and the flat one that config.json has as
``quantization_config``. Only FP8 is supported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bei.errors import CheckpointError

# Matrices are float8_e4m3fn times one scale, or one per row. Scales of inputs are stored, or computed for each input.
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
# Keys of the two forms for modules that are not quantized.
_EXCLUDED = ("exclude_modules", "ignore")


@dataclass(frozen=True)
class StoredFP8:
    """Settings of a checkpoint with matrices in FP8.

    ``excluded``: patterns (fnmatch) of modules that are not quantized, by their names in the checkpoint. Settings of an
    FP8 key-value cache are ignored: bei has none.
    """

    excluded: tuple[str, ...] = ()


def is_modelopt(settings: object) -> bool:
    """True if ``settings``, a ``quantization_config``, are ModelOpt's: not all of its versions name the method."""
    if not isinstance(settings, Mapping):
        return False
    producer = settings.get("producer")
    return settings.get("quant_method") == "modelopt" or (
        isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    )


def parse_fp8_settings(sources: Sequence[Mapping[str, Any]]) -> StoredFP8:
    """Parse ModelOpt's settings, from one place or two. Raises CheckpointError for another format."""
    settings, algorithms = [_flat(each) for each in sources], algorithms_of(sources)
    caches = [each for each in settings if each.get("kv_cache_quant_algo") or each.get("kv_cache_scheme")]
    if len(algorithms) > 1:
        raise CheckpointError(
            f"config.json and hf_quant_config.json name two formats ({', '.join(sorted(algorithms))}): they are not "
            "from the same checkpoint. Download it again."
        )
    if not algorithms and not caches:
        raise CheckpointError(
            "The checkpoint is quantized by ModelOpt, and neither config.json nor hf_quant_config.json names the "
            "format (quant_algo). Download it again."
        )
    unknown = algorithms - set(_ALGORITHMS)
    if unknown:
        raise CheckpointError(
            f"The checkpoint is quantized by ModelOpt ({unknown.pop()}): of its formats bei reads FP8 with one scale a "
            "matrix, or one a row. Build from the original 16- or 32-bit checkpoint; bei quantizes itself."
        )
    return StoredFP8(tuple(dict.fromkeys(pattern for each in settings for pattern in _patterns(each))))


def algorithms_of(sources: Sequence[Mapping[str, Any]]) -> set[str]:
    """The names of formats (quant_algo) in ModelOpt's settings."""
    named = (_flat(each).get("quant_algo") for each in sources)
    return {name for name in named if isinstance(name, str)}


def _flat(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = settings.get("quantization")
    return nested if isinstance(nested, Mapping) else settings


def _patterns(settings: Mapping[str, Any]) -> Sequence[str]:
    for key in _EXCLUDED:
        patterns = settings.get(key)
        if patterns is None:
            continue
        if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
            raise CheckpointError(
                f"The checkpoint's quantization has {key} = {patterns!r}: it must be a list of modules' names."
            )
        return patterns
    return ()
