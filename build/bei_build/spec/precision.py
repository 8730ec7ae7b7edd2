"""The table of precisions: storage and quantized formats, for every target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bei.errors import ConfigError
from bei_build.spec.dtypes import DType
from bei_build.spec.quantization import Format


@dataclass(frozen=True)
class Precision:
    """``storage``: the type in which matrices and tables are stored, and in which GPUs compute (CPUs are told when an
    engine is loaded). ``quantized``: the format of quantized linear layers, inputs and matrices; None: none are
    quantized."""

    storage: DType
    quantized: Format | None = None


PRECISIONS: Mapping[str, Precision] = {
    "bf16": Precision(DType.BF16),
    "fp16": Precision(DType.FP16),
    "fp32": Precision(DType.FP32),
    "fp8": Precision(DType.BF16, "fp8"),
    "int8": Precision(DType.BF16, "int8"),
}


def check_precision(target: str, precision: str, supported: Iterable[str]) -> None:
    """Raise ConfigError unless ``precision`` is "auto" or one that ``target`` supports."""
    known = ("auto", *supported)
    if precision not in known:
        raise ConfigError(f"Target {target} has no precision {precision!r}. Precisions: {', '.join(known)}.")
