"""Which GPUs a plan is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bei.errors import ConfigError

if TYPE_CHECKING:
    from tensorrt_module import TensorRTRTXModule

_BF16_FROM = 80  # compute capability 8.0, Ampere
_FP8_FROM = 89  # 8.9, Ada

# GPUs that were seen to build packed attention, by compute capability. None was seen to: TensorRT-RTX has no kernel for
# it on any of its GPUs, and TensorRT itself has not been asked yet. Elsewhere the build would have to be done twice.
PACKED_ON: frozenset[int] = frozenset()


def without_bf16(capabilities: Sequence[int]) -> list[int]:
    """Those of ``capabilities`` that do not compute in BF16."""
    return [capability for capability in capabilities if capability < _BF16_FROM]


def without_fp8(capabilities: Sequence[int]) -> list[int]:
    """Those of ``capabilities`` that do not compute in FP8."""
    return [capability for capability in capabilities if capability < _FP8_FROM]


def architecture(capability: int) -> str:
    """``SM89``: TensorRT's word for compute capability 8.9."""
    return f"SM{capability}"


def dotted(capability: int) -> str:
    """``8.9``: NVIDIA's word for SM89."""
    return f"{capability // 10}.{capability % 10}"


def parsed(words: Sequence[str], trt: TensorRTRTXModule) -> tuple[int, ...]:
    """The setting ``compute_capability`` in numbers, each once. Raises ConfigError for those the library has not."""
    known = sorted(int(name[2:]) for name in trt.ComputeCapability.__members__ if name.startswith("SM"))
    for word in words:
        if word not in map(str, known):
            have = ", ".join(map(str, known))
            raise ConfigError(f"compute_capability {word!r}: TensorRT-RTX {trt.__version__} compiles for {have}.")
    return tuple(dict.fromkeys(map(int, words)))
