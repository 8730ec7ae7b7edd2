"""Tensors of a GGUF file, read from their places in it and dequantized by the ``gguf`` package, llama.cpp's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bei.errors import WeightsError
from bei.utils.libraries import importing
from bei_build.weights.gguf_file import GgufHeader, StoredTensor, read_header
from bei_build.weights.tensor_store import TensorStore

SUFFIX = ".gguf"
# Types that hold the numbers themselves; of all others a number is a product of what is stored.
_PLAIN = ("F32", "F16", "BF16")


class GgufStore(TensorStore):
    """The tensors of ``file`` under llama.cpp's names. One is in memory at a time. Raises WeightsError for places that
    are outside of the file, overlap or are not aligned, and for types that are not read."""

    def __init__(self, file: Path) -> None:
        with importing("gguf", "gguf", "Reading a GGUF file"):
            from gguf import constants, quants
        self._file = file
        self.header: GgufHeader = read_header(file)
        self._dequantize: Any = quants.dequantize
        self._sizes: Mapping[Any, tuple[int, int]] = constants.GGML_QUANT_SIZES
        self._kind_of: Any = constants.GGMLQuantizationType
        if self.header.value("split.count", int, 0) > 1:
            raise WeightsError(
                f"{file} is one of several parts: join them (llama-gguf-split --merge) and name the whole."
            )
        self._kinds = {kind: self._known(kind) for kind in {one.kind for one in self.header.tensors.values()}}
        self._check_places(file.stat().st_size - self.header.data_start)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        return {name: tensor.shape for name, tensor in self.header.tensors.items()}

    @property
    def types(self) -> frozenset[str]:
        """The element types of the tensors: F32, Q8_0, ..."""
        return frozenset(kind.name for kind in self._kinds.values())

    def type_of(self, name: str) -> str:
        """The element type of the tensor called ``name``: F32, Q8_0, ..."""
        return str(self._kinds[self.header.tensors[name].kind].name)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor called ``name``, float32."""
        tensor = self.header.tensors[name]
        kind = self._kinds[tensor.kind]
        with self._file.open("rb") as file:
            file.seek(self.header.data_start + tensor.offset)
            content = np.fromfile(file, np.uint8, self._num_bytes(tensor))
        if len(content) != self._num_bytes(tensor):
            raise WeightsError(f"{self._file} became shorter while it was read.")
        rows = content.reshape(*tensor.shape[:-1], -1)
        array: npt.NDArray[np.float32] = self._dequantize(rows, kind)
        return np.ascontiguousarray(array, np.float32).reshape(tensor.shape)

    def read_integers(self, name: str) -> npt.NDArray[np.int64]:
        """Raises WeightsError: of a GGUF file no tensor of integers is read."""
        raise WeightsError(f"Tensor {name} is {self.type_of(name)}, and must hold integers.")

    def close(self) -> None:
        """Nothing is kept open."""

    def _known(self, kind: int) -> Any:
        """The library's constant of type ``kind``. Raises WeightsError if it cannot make numbers of it."""
        try:
            known = self._kind_of(kind)
            self._dequantize(np.zeros((1, self._sizes[known][1]), np.uint8), known)
        except (ValueError, KeyError, NotImplementedError) as error:
            name = next((one.name for one in self._kind_of if one == kind), f"number {kind}")
            raise WeightsError(
                f"{self._file} has tensors of type {name}, of which the gguf package makes no numbers: take a file of "
                "another quantization (Q8_0, Q6_K, ...), or a newer gguf package."
            ) from error
        return known

    def _num_bytes(self, tensor: StoredTensor) -> int:
        block, size = self._sizes[self._kinds[tensor.kind]]
        return tensor.num_elements // block * size

    def _check_places(self, num_bytes: int) -> None:
        end, before = 0, ""
        for name, tensor in sorted(self.header.tensors.items(), key=lambda item: item[1].offset):
            block, _ = self._sizes[self._kinds[tensor.kind]]
            if tensor.shape[-1] % block:
                raise self._misplaced(name, f"has rows of {tensor.shape[-1]}, which is no multiple of {block}")
            if tensor.offset % self.header.alignment:
                raise self._misplaced(name, f"begins at {tensor.offset:,}, which is no multiple of the alignment")
            if tensor.offset < end:
                raise self._misplaced(name, f"begins within {before!a}")
            end, before = tensor.offset + self._num_bytes(tensor), name
            if end > num_bytes:
                raise self._misplaced(name, f"ends at {end:,} of {num_bytes:,} bytes")

    def _misplaced(self, name: str, how: str) -> WeightsError:
        return WeightsError(f"{self._file} is damaged: its tensor {name!a} {how}. Download it again.")


def dequantized_types(types: frozenset[str]) -> tuple[str, ...]:
    """Those of ``types`` whose numbers were computed of what is stored."""
    return tuple(sorted(types - set(_PLAIN)))
