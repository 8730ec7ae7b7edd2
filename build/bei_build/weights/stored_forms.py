"""Tensors that are stored in another form than specs read: with leading axes, or beside factors of their outputs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from bei.errors import WeightsError
from bei_build.spec.stored_forms import StoredForms
from bei_build.weights.tensor_store import TensorStore, WrappedStore


class FormedStore(WrappedStore):
    """The tensors of ``store`` as specs read them, under their own names or those of joined layers. Raises WeightsError
    where a layer's factors are missing."""

    def __init__(self, store: TensorStore, forms: StoredForms) -> None:
        super().__init__(store)
        stored = store.shapes
        self._factors = {
            f"{module}{layer}.{kind}": f"{module}{factor}"
            for factor, layers in forms.factors.items()
            for layer in layers
            for module in _modules(stored, f"{layer}.weight")
            for kind in ("weight", "bias")
        }
        if missing := sorted(set(self._factors.values()) - stored.keys()):
            raise WeightsError(f"Tensor {missing[0]} is missing. Download the checkpoint again.")
        self._shifted = forms.shifted
        self._joined = {
            f"{name}.{kind}": [f"{part}.{kind}" for part in parts]
            for name, parts in forms.joined.items()
            for kind in ("weight", "bias")
            if all(f"{part}.{kind}" in stored for part in parts)
        }
        apart = [part for parts in self._joined.values() for part in parts]
        self._shapes = {
            name: _without_leading(shape, next((rank for end, rank in forms.ranks.items() if name.endswith(end)), 0))
            for name, shape in stored.items()
            if name not in self._factors.values() and name not in apart
        }
        self._summed = {
            name: axis
            for end, axis in forms.summed.items()
            for name, shape in stored.items()
            if name.endswith(end) and len(shape) > axis
        }
        for name, axis in self._summed.items():
            self._shapes[name] = tuple(size for place, size in enumerate(stored[name]) if place != axis)
        for name, parts in self._joined.items():
            self._shapes[name] = (sum(stored[part][0] for part in parts), *stored[parts[0]][1:])

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        return self._shapes

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor called ``name``, float32."""
        if name in self._joined:
            return np.concatenate([self._store.read(part) for part in self._joined[name]])
        if name in self._summed:
            total: npt.NDArray[np.float32] = self._store.read(name).sum(self._summed[name])
            return total
        if name in self._shifted:
            shifted: npt.NDArray[np.float32] = self._store.read(name) + np.float32(self._shifted[name])
            return shifted
        values = self._store.read(name).reshape(self._shapes[name])
        if (factors := self._factors.get(name)) is None:
            return values
        return (values.T * self._store.read(factors)).T

    def _is_changed(self, name: str) -> bool:
        return name in self._joined or name in self._factors or name in self._summed or name in self._shifted


def _modules(stored: Mapping[str, object], end: str) -> list[str]:
    """What stands before ``end`` in the names that have it."""
    return [name.removesuffix(end) for name in stored if name.endswith(f".{end}")]


def _without_leading(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """``shape`` without leading axes of length 1, as far as it has more than ``rank``; 0: unchanged."""
    while rank and len(shape) > rank and shape[0] == 1:
        shape = shape[1:]
    return shape
