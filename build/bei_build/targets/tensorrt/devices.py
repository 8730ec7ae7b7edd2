"""GPUs that a plan is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bei.errors import ConfigError

if TYPE_CHECKING:
    from tensorrt_module import TensorRTRTXModule

_BF16_FROM = 80  # compute capability 8.0, Ampere
_FP8_FROM = 89  # 8.9, Ada

# GPUs with a kernel for packed attention, by compute capability. None is known: TensorRT-RTX has no kernel for it on
# any of its GPUs, and TensorRT itself has not been tried yet. On other GPUs the build would be done twice.
PACKED_ON: frozenset[int] = frozenset()


def without_bf16(capabilities: Sequence[int]) -> list[int]:
    """The ``capabilities`` without BF16 arithmetic."""
    return [capability for capability in capabilities if capability < _BF16_FROM]


def without_fp8(capabilities: Sequence[int]) -> list[int]:
    """The ``capabilities`` without FP8 arithmetic."""
    return [capability for capability in capabilities if capability < _FP8_FROM]


def architecture(capability: int) -> str:
    """``SM89``: TensorRT's name for compute capability 8.9."""
    return f"SM{capability}"


def dotted(capability: int) -> str:
    """``8.9``: NVIDIA's notation for SM89."""
    return f"{capability // 10}.{capability % 10}"


def parse_capabilities(words: Sequence[str], trt: TensorRTRTXModule) -> tuple[int, ...]:
    """The setting ``compute_capability`` as numbers, each once. Raises ConfigError for ones that the library does not
    support."""
    known = sorted(int(name[2:]) for name in trt.ComputeCapability.__members__ if name.startswith("SM"))
    for word in words:
        if word not in map(str, known):
            have = ", ".join(map(str, known))
            raise ConfigError(f"compute_capability {word!r}: TensorRT-RTX {trt.__version__} compiles for {have}.")
    return tuple(dict.fromkeys(map(int, words)))
