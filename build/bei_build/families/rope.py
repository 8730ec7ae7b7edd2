"""Rotary frequencies from an HF config. Formulas: transformers, modeling_rope_utils.py, in float32 too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bei.errors import CheckpointError
from bei_build.spec.parts import RopeSpec

_Frequencies = npt.NDArray[np.float32]


def rope_from_config(
    config: Any, head_dim: int, layer_type: str | None = None, *, partial: bool = False, interleaved: bool = False
) -> RopeSpec:
    """The rotation of ``config.rope_parameters``, or of its entry for ``layer_type``. Raises CheckpointError.

    ``partial``: transformers' class obeys partial_rotary_factor; most ignore it, or fail. ``interleaved``: neighbouring
    components of a head rotate together.
    """
    rope = _rope(config, head_dim, layer_type, partial)
    return replace(rope, interleaved=True) if interleaved else rope


def _rope(config: Any, head_dim: int, layer_type: str | None, partial: bool) -> RopeSpec:
    config.standardize_rope_params()  # older keys (rope_theta, rope_scaling) become today's
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    kind = parameters.get("rope_type", "default")
    share = parameters.get("partial_rotary_factor", 1.0)
    if share != 1.0 and not partial:
        raise CheckpointError(
            f"config.json has partial_rotary_factor = {share!r}; bei's {config.model_type} family supports only 1.0."
        )
    dim = int(head_dim * share)
    if not parameters["rope_theta"] > 0:
        raise CheckpointError(f"config.json has rope_theta = {parameters['rope_theta']!r}: it must be positive.")
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    plain = (1.0 / np.float32(parameters["rope_theta"]) ** exponents).astype(np.float32)
    if kind in ("default", "dynamic"):  # dynamic: texts are no longer than the range it starts at (max_positions)
        return RopeSpec(_tuple(plain))
    if kind == "linear":
        return RopeSpec(_tuple(plain / np.float32(parameters["factor"])))
    if kind == "llama3":
        return RopeSpec(_tuple(_llama3(plain, parameters)))
    if kind == "yarn":
        return _yarn(plain, dim, parameters, config.max_position_embeddings)
    if kind == "longrope":
        return _longrope(plain, parameters, config.max_position_embeddings)
    raise CheckpointError(
        f"config.json asks for rope_type {kind!r}. Supported: default, linear, dynamic, llama3, yarn, longrope."
    )


def plain_rope(theta: float, head_dim: int) -> RopeSpec:
    """The rotation of a model without scaling."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return RopeSpec(_tuple((1.0 / np.float32(theta) ** exponents).astype(np.float32)))


def _llama3(plain: _Frequencies, parameters: Mapping[str, Any]) -> _Frequencies:
    """Llama 3.1: long waves slowed by ``factor``, short ones unchanged, a ramp between."""
    factor, context = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    waves = 2 * math.pi / plain
    ramp = (context / waves - low) / (high - low)
    between = (1 - ramp) * plain / factor + ramp * plain
    return np.where(waves > context / low, plain / factor, np.where(waves < context / high, plain, between))


def _yarn(plain: _Frequencies, dim: int, parameters: Mapping[str, Any], max_positions: int) -> RopeSpec:
    """YaRN (arXiv:2309.00071, sections 3.2 to 3.4)."""
    context, theta = parameters["original_max_position_embeddings"], parameters["rope_theta"]
    factor = parameters.get("factor") or max_positions / context

    def magnitude(scale: float, by: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * by * math.log(scale) + 1.0

    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        part, whole = parameters.get("mscale"), parameters.get("mscale_all_dim")
        attention_factor = magnitude(factor, part) / magnitude(factor, whole) if part and whole else magnitude(factor)

    def component(rotations: float) -> float:
        """The component that makes so many rotations within the original context."""
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first = component(parameters.get("beta_fast") or 32)
    last = component(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = (last - first) or 0.001
    slowed = np.clip((np.arange(dim // 2, dtype=np.float32) - first) / width, 0, 1)
    return RopeSpec(_tuple(plain / factor * slowed + plain * (1 - slowed)), float(attention_factor))


def _longrope(plain: _Frequencies, parameters: Mapping[str, Any], max_positions: int) -> RopeSpec:
    """LongRoPE (arXiv:2402.13753): a factor for each frequency, one list for short texts, one for texts beyond the
    context."""
    context = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor") or max_positions / context
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))
    short, long = (plain / np.array(parameters[name], np.float32) for name in ("short_factor", "long_factor"))
    return RopeSpec(_tuple(short), float(attention_factor), _tuple(long), int(context))


def _tuple(frequencies: npt.NDArray[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in frequencies.astype(np.float32))
