"""Settings of checkpoints with matrices in few bits: GPTQ, AWQ, compressed-tensors, ModelOpt's NVFP4 and MXFP8.

Only forms from which the matrix follows by exact arithmetic are read; what they say of inputs is left aside, since bei
rounds inputs only where a build is asked to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bei.errors import CheckpointError

_MOST_GROUP = 1 << 20
_GPTQ_BITS = (2, 4, 8)
# compressed-tensors' formats, and of their weights' settings those that change what a number means.
_FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
# ModelOpt's names, and the components of a row that share a scale.
MODELOPT = {"NVFP4": 16, "MXFP8": 32}


@dataclass(frozen=True)
class StoredPacked:
    """Packed matrices. ``name`` is for people. ``group``: components of a row that share a scale; -1: all of them.

    ``strategy``: compressed-tensors' word for what shares a scale; ``block``: rows and columns of its blocks.
    ``zero_offset``: what is added to GPTQ's zero points, which its first form stores less one.
    """

    method: str
    name: str
    bits: int
    group: int = -1
    strategy: str = "group"
    block: tuple[int, int] | None = None
    zero_offset: int = 0


def parse_packed(settings: Mapping[str, Any]) -> StoredPacked | None:
    """The form that ``settings``, a ``quantization_config``, describe; None for another method. Raises
    CheckpointError for a variant that is not read."""
    method = settings.get("quant_method")
    if method == "gptq":
        return _gptq(settings)
    if method == "awq":
        return _awq(settings)
    return _compressed_tensors(settings) if method == "compressed-tensors" else None


def modelopt_packed(algorithm: str) -> StoredPacked:
    """The form of ModelOpt's ``algorithm``, one of ``MODELOPT``."""
    bits = 4 if algorithm == "NVFP4" else 8
    return StoredPacked("modelopt", f"ModelOpt's {algorithm}", bits, MODELOPT[algorithm])


def _gptq(settings: Mapping[str, Any]) -> StoredPacked:
    bits, form = settings.get("bits"), _said(settings, ("checkpoint_format", "format"), "gptq")
    if bits not in _GPTQ_BITS or type(bits) is not int:
        raise _refused("GPTQ", f"bits = {bits!r}", "2, 4 and 8")
    if form not in ("gptq", "gptq_v2"):
        raise _refused("GPTQ", f"checkpoint_format = {form!r:.40}", "gptq and gptq_v2")
    return StoredPacked("gptq", f"GPTQ's {bits}-bit", bits, _group(settings), zero_offset=int(form == "gptq"))


def _awq(settings: Mapping[str, Any]) -> StoredPacked:
    bits, version = settings.get("bits", settings.get("w_bit")), _said(settings, ("version", "format"), "gemm")
    if bits != 4 or version != "gemm":
        raise _refused("AWQ", f"bits = {bits!r}, version = {version!r:.40}", "4 bits in version gemm")
    if settings.get("zero_point", True) is not True:
        raise _refused("AWQ", "zero_point = false", "stored zero points")
    return StoredPacked("awq", "AWQ's 4-bit", 4, _group(settings))


def _said(settings: Mapping[str, Any], names: Sequence[str], usual: str) -> str:
    """The one value of the keys ``names``, which mean the same, in lower case. Raises CheckpointError for two."""
    found = {str(settings[name]).lower() for name in names if settings.get(name)}
    if len(found) > 1:
        both = f"{' and '.join(names)}, which differ ({', '.join(sorted(found))})"
        raise CheckpointError(f"The checkpoint's quantization_config has {both}: correct one.")
    return next(iter(found), usual)


def _group(settings: Mapping[str, Any]) -> int:
    """Raises CheckpointError where it is missing too: libraries take 128 then, quantizers' own files -1."""
    group = settings.get("group_size", settings.get("q_group_size"))
    if type(group) is not int or not (group == -1 or 1 <= group <= _MOST_GROUP):
        raise CheckpointError(f"The checkpoint's quantization_config has group_size = {group!r:.40}: correct it.")
    return group


def _compressed_tensors(settings: Mapping[str, Any]) -> StoredPacked:
    form = settings.get("format")
    for key in ("sparsity_config", "transform_config"):
        content = settings.get(key)
        if content and not (isinstance(content, Mapping) and content.get("format", "") == "dense"):
            raise _refused("compressed-tensors", key, "dense matrices without transforms")
    if form not in _FORMATS:
        raise _refused("compressed-tensors", f"format = {form!r:.40}", ", ".join(_FORMATS))
    groups = settings.get("config_groups")
    found = [*groups.values()] if isinstance(groups, Mapping) else []
    given = [group.get("weights") for group in found if isinstance(group, Mapping)]
    weights = [one for one in given if isinstance(one, Mapping)]
    if not found or len(weights) != len(found):
        raise CheckpointError(
            "The checkpoint's quantization_config has no config_groups with weights. Download it again."
        )
    keys = ("num_bits", "type", "strategy", "group_size", "symmetric", "block_structure")
    if any(one.get(key) != weights[0].get(key) for one in weights for key in keys):
        raise _refused("compressed-tensors", "config_groups of several kinds", "one kind of weights")
    bits, strategy, block = (weights[0].get(key) for key in ("num_bits", "strategy", "block_structure"))
    if type(bits) is not int or not 1 <= bits <= 8 or strategy not in _STRATEGIES:
        raise _refused(
            "compressed-tensors", f"{bits!r:.20} bits by {strategy!r:.40}", f"1 to 8, by {', '.join(_STRATEGIES)}"
        )
    is_block = isinstance(block, list) and len(block) == 2 and all(type(one) is int and one > 0 for one in block)
    if strategy == "block" and not is_block:
        raise _refused("compressed-tensors", f"block_structure = {block!r:.40}", "two numbers")
    group = _group({"group_size": weights[0].get("group_size") or -1})
    return StoredPacked(
        "compressed-tensors",
        f"compressed-tensors' {form}",
        bits,
        group,
        strategy,
        (block[0], block[1]) if is_block and isinstance(block, list) else None,
    )


def _refused(method: str, what: str, read: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint is quantized ({method}, {what}); of this method bei reads {read}. Build from the original 16- "
        "or 32-bit checkpoint; bei quantizes itself (--precision int8)."
    )
