"""Element types of tensors."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float32]


class DType(Enum):
    """Element types of a graph's tensors."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    UINT8 = "uint8"
    INT32 = "int32"

    @property
    def numpy(self) -> np.dtype[Any]:
        """Numpy dtype (bfloat16 and float8_e4m3fn are ml_dtypes')."""
        import ml_dtypes

        dtypes: dict[DType, Any] = {
            DType.FP32: np.float32,
            DType.FP16: np.float16,
            DType.BF16: ml_dtypes.bfloat16,
            DType.FP8: ml_dtypes.float8_e4m3fn,
            DType.INT8: np.int8,
            DType.INT32: np.int32,
        }
        dtype: np.dtype[Any] = np.dtype(dtypes[self])
        return dtype
