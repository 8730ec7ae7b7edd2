"""Writing safetensors: tensors are made, and written, one after the other; the library's writer wants all at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

_ALIGNMENT = 8  # alignment of the data after the header, which safetensors pads with blanks

# Names of element types in safetensors, and numpy's.
TYPES: Mapping[str, npt.DTypeLike] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I64": np.int64,
    "I32": np.int32,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. ``values`` makes it when it is written; ``dtype`` is one of ``TYPES``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: Callable[[], npt.NDArray[Any]]

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(TYPES[self.dtype]).itemsize


def write_safetensors(path: Path, tensors: Sequence[StoredTensor]) -> None:
    """Write the format: length of the header, the header, and the tensors end to end, all little-endian.

    Raises ValueError for values of another shape.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in tensors:
            values = tensor.values()
            if values.shape != tensor.shape:
                raise ValueError(f"weight {tensor.name} has shape {values.shape}, not {tensor.shape}")
            file.write(np.ascontiguousarray(values.reshape(-1)).view(np.uint8).data)
