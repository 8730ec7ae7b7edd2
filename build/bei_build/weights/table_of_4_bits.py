"""The quantized form of RikkaBotan's SSE (its class SSEQ): a table of 4 bits in a file of its own.

``embedding.q4_k_m.bin`` is no GGUF form in spite of its name. It holds two numbers of a row in a byte, the first one in
the high bits, and behind all rows one float32 scale a row: number q of a row stands for (q / 7.5 - 1) times its scale.
The other tensors are in ``model_rest.safetensors``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bei.errors import WeightsError
from bei_build.weights.tensor_store import QUANTIZED_TABLE, SafetensorsStore, WrappedStore

_REST, _TABLE = QUANTIZED_TABLE
FORM = "4-bit"
_NAME, _WIDTH_OF = "embedding.weight", "dyt.alpha"
_MIDDLE = np.float32(7.5)
_SCALE_BYTES = 4


class TableOf4Bits(WrappedStore):
    """The tensors of ``folder``, with its table dequantized under ``embedding.weight``. Raises WeightsError."""

    def __init__(self, folder: Path) -> None:
        super().__init__(SafetensorsStore([folder / _REST]))
        self._file = folder / _TABLE
        width = (*self._store.shapes.get(_WIDTH_OF, ()), 0)[0]
        size = self._file.stat().st_size
        row = width // 2 + _SCALE_BYTES
        if not width or width % 2 or not size or size % row or _NAME in self._store.shapes:
            self.close()
            raise WeightsError(
                f"{self._file} has {size:,} bytes, which are no rows of {width} numbers of 4 bits with a scale each: "
                f"it does not belong to {_REST}. Download the checkpoint again."
            )
        self._rows, self._width = size // row, width

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        return {**self._store.shapes, _NAME: (self._rows, self._width)}

    @property
    def types(self) -> frozenset[str]:
        """The element types of the stored tensors."""
        return self._store.types | {FORM}

    def type_of(self, name: str) -> str:
        """The element type of the tensor called ``name``."""
        return FORM if name == _NAME else self._store.type_of(name)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor called ``name``, float32."""
        if name != _NAME:
            return self._store.read(name)
        codes = np.fromfile(self._file, np.uint8, self._rows * self._width // 2).reshape(self._rows, -1)
        scales = np.fromfile(self._file, np.dtype("<f4"), self._rows, offset=codes.size)
        numbers = np.stack([codes >> 4, codes & 15], axis=-1).reshape(self._rows, self._width)
        return (numbers.astype(np.float32) / _MIDDLE - np.float32(1)) * scales[:, None]
