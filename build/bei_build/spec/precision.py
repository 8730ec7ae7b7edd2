"""The one table of precisions: what each means for a graph, whichever target it is for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bei.errors import ConfigError
from bei_build.spec.dtypes import DType
from bei_build.spec.quantization import Format


@dataclass(frozen=True)
class Precision:
    """``storage``: how matrices and tables are stored, and what GPUs compute in (CPUs are told when an engine is
    loaded). ``quantized``: the format of the linear layers that are quantized, inputs and matrices; None: none are."""

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
    """Raise ConfigError unless ``precision`` is "auto" or among those that ``target`` has."""
    known = ("auto", *supported)
    if precision not in known:
        raise ConfigError(f"Target {target} has no precision {precision!r}. Precisions: {', '.join(known)}.")
