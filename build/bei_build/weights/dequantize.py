"""Tensors that ModelOpt has quantized to FP8, as float32: each matrix times its scale or scales."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bei.errors import WeightsError
from bei_build.weights.quantized_format import StoredFP8
from bei_build.weights.tensor_store import SafetensorsStore, WrappedStore, open_weights

_FP8 = "F8_E4M3"
# Scales of a key-value cache, which bei does not have.
_CACHE_SCALES = (".k_scale", ".v_scale")

Shape = tuple[int, ...]


class DequantizedStore(WrappedStore):
    """The tensors of ``store`` without those that hold scales. Raises WeightsError for unsupported scales."""

    def __init__(self, store: SafetensorsStore, stored: StoredFP8) -> None:
        super().__init__(store)
        self._safetensors = store
        self._excluded = stored.excluded
        shapes = store.shapes
        self._scaled = {name for name in shapes if name.endswith(".weight") and f"{name}_scale" in shapes}
        for name in shapes:
            if name in self._scaled:
                self._check(name, shapes)
            elif store.type_of(name) == _FP8:
                raise WeightsError(
                    f"Tensor {name} is {_FP8}, and {name}_scale is missing. Download the checkpoint again."
                )
        self._with_inputs = {name for name in self._scaled if _input_scale(name) in shapes}
        used = {f"{name}_scale" for name in self._scaled} | {_input_scale(name) for name in self._with_inputs}
        self._shapes = {
            name: shape for name, shape in shapes.items() if name not in used and not name.endswith(_CACHE_SCALES)
        }

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shape of every tensor by name."""
        return self._shapes

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor called ``name``, float32."""
        if name not in self._scaled:
            return self._store.read(name)
        matrix: npt.NDArray[np.float32] = self._safetensors.read_fp8(name) * self._scales(name)
        return matrix

    def row_scales(self, name: str) -> npt.NDArray[np.float32] | None:
        """The scale of each row of the matrix called ``name``, float32 [rows, 1]; None if it is not stored in FP8."""
        if name not in self._scaled:
            return None
        return np.broadcast_to(self._scales(name), (self._shapes[name][0], 1))

    def input_scale(self, name: str) -> float | None:
        """The scale for inputs of the matrix called ``name``; None where the checkpoint has none, or excludes its
        module from quantization."""
        module = name.removesuffix(".weight")
        is_excluded = any(fnmatchcase(module, pattern) for pattern in self._excluded)
        if name not in self._with_inputs or is_excluded:
            return None
        return float(self._positive(_input_scale(name))[0, 0])

    def _scales(self, name: str) -> npt.NDArray[np.float32]:
        """Scales of the matrix called ``name``, [1, 1] or [rows, 1]."""
        return self._positive(f"{name}_scale")

    def _positive(self, name: str) -> npt.NDArray[np.float32]:
        """The scales called ``name`` as a column. Raises WeightsError unless all are finite and above 0."""
        scales = self._store.read(name).reshape(-1, 1)
        if not (np.isfinite(scales).all() and (scales > 0).all()):
            raise WeightsError(f"Tensor {name} has scales that are not above 0. Download the checkpoint again.")
        return scales

    def _check(self, name: str, shapes: Mapping[str, Shape]) -> None:
        kind, shape, scales = self._store.type_of(name), shapes[name], shapes[f"{name}_scale"]
        if kind != _FP8:
            raise WeightsError(
                f"Tensor {name} is {kind} and has a scale: of quantized matrices bei reads {_FP8}. Build from the "
                "original 16- or 32-bit checkpoint."
            )
        inputs = shapes.get(_input_scale(name), ())
        if len(shape) != 2 or scales not in ((), (1,), shape[:1], (shape[0], 1)) or inputs not in ((), (1,)):
            raise WeightsError(
                f"Tensor {name} has shape {list(shape)}, its scales have {list(scales)} and its inputs' "
                f"{list(inputs)}: bei reads one scale a matrix or one a row, and one for inputs. Build from the "
                "original 16- or 32-bit checkpoint."
            )


def open_dequantized(folder: Path, stored: StoredFP8) -> DequantizedStore:
    """Open the weights of ``folder``. Raises WeightsError."""
    store = open_weights(folder)
    try:
        if not isinstance(store, SafetensorsStore):
            raise WeightsError(f"{folder} has weights in FP8 that are not safetensors: convert them.")
        return DequantizedStore(store, stored)
    except BaseException:  # an interrupt too must unmap the files
        store.close()
        raise


def _input_scale(name: str) -> str:
    return f"{name.removesuffix('.weight')}.input_scale"
