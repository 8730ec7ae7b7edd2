"""Matrices that are stored in few bits, as float32: (number - zero point) * scale, with the scale of its group."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from bei.errors import WeightsError
from bei_build.weights.packed_format import StoredPacked
from bei_build.weights.tensor_store import SafetensorsStore, TensorStore, WrappedStore

Shape = tuple[int, ...]
_Numbers = npt.NDArray[np.float32]

_FP8 = "F8_E4M3"
# AWQ packs eight columns of a matrix into a word in the order 0, 2, 4, 6, 1, 3, 5, 7: the place of each in it.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# What the tensors beside a matrix are called. Those of inputs and of a cache are not read.
_BESIDE = ("weight_scale", "weight_scale_2", "weight_global_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
_GROUPED = ("qzeros", "scales", "g_idx")
_IGNORED = (".input_scale", ".input_global_scale", ".input_zero_point", ".k_scale", ".v_scale", ".output_scale")
# What holds the numbers of a matrix, by method.
_WORDS: Mapping[str, tuple[str, ...]] = {
    "gptq": ("qweight",),
    "awq": ("qweight",),
    "compressed-tensors": ("weight_packed", "weight"),
    "modelopt": ("weight",),
}


class PackedStore(WrappedStore):
    """The tensors of ``store`` with each packed matrix under the name that it has unpacked. Raises WeightsError."""

    def __init__(self, store: TensorStore, stored: StoredPacked) -> None:
        super().__init__(store)
        if not isinstance(store, SafetensorsStore):
            raise WeightsError("The checkpoint has packed weights that are not safetensors: convert them.")
        self.packed = stored
        self._safetensors = store
        self._stored = store.shapes
        self._modules: dict[str, str] = {}
        for name in self._stored:
            module, _, part = name.rpartition(".")
            is_scaled = part != "weight" or f"{module}.weight_scale" in self._stored
            if part in _WORDS[stored.method] and is_scaled:
                self._modules[f"{module}.weight"] = module
        if not self._modules:
            raise WeightsError(
                f"config.json says that matrices have {stored.name} form, and none of them is packed: take "
                "quantization_config out if they are as they were trained."
            )
        used = {
            f"{module}.{part}"
            for module in self._modules.values()
            for part in (*_WORDS[stored.method], *(_GROUPED if "qweight" in _WORDS[stored.method] else _BESIDE))
        }
        kept = {name: shape for name, shape in self._stored.items() if name not in used and not name.endswith(_IGNORED)}
        self._shapes = {**kept, **{name: self._shape(module) for name, module in self._modules.items()}}

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of every tensor by name."""
        return self._shapes

    def type_of(self, name: str) -> str:
        """The element type of the tensor called ``name``."""
        module = self._modules.get(name)
        return self.packed.name if module is not None else self._store.type_of(name)

    def read(self, name: str) -> _Numbers:
        """The tensor called ``name``, float32."""
        if (module := self._modules.get(name)) is None:
            return self._store.read(name)
        matrix = _READERS[self.packed.method](self, module)
        if matrix.shape != self._shapes[name] or not np.isfinite(matrix).all():
            raise self.damaged(module, "does not give finite numbers in its shape")
        return np.ascontiguousarray(matrix)

    def gptq(self, module: str) -> _Numbers:
        """GPTQ's: numbers packed by rows of the transposed matrix, and ``g_idx``, the group of each."""
        bits, offset = self.packed.bits, self.packed.zero_offset
        rows, columns = self._shape(module)
        numbers = unpacked(self.integers(f"{module}.qweight").T, bits, columns)
        zeros = unpacked(self.integers(f"{module}.qzeros"), bits, rows).astype(np.int32)
        if offset and (zeros == (1 << bits) - 1).any():
            raise self.damaged(module, "has a zero point that its readers take for two different numbers")
        groups = self._groups(f"{module}.g_idx", columns, len(zeros))
        scales = self._scales(f"{module}.scales", (len(zeros), rows))
        matrix: _Numbers = (numbers - (zeros + offset).T[:, groups]) * scales.T[:, groups]
        return matrix.astype(np.float32)

    def awq(self, module: str) -> _Numbers:
        """AWQ's: numbers packed by columns of the transposed matrix, in an order of its own."""
        rows, columns = self._shape(module)

        def ordered(name: str) -> npt.NDArray[np.uint8]:
            numbers = unpacked(self.integers(f"{module}.{name}"), 4, rows)
            return numbers.reshape(len(numbers), -1, 8)[:, :, _AWQ_PLACES].reshape(len(numbers), rows)

        zeros = ordered("qzeros").astype(np.int32)
        groups = self._groups("", columns, len(zeros))
        scales = self._scales(f"{module}.scales", (len(zeros), rows))
        matrix: _Numbers = (ordered("qweight") - zeros[groups]).T * scales[groups].T
        return matrix.astype(np.float32)

    def compressed(self, module: str) -> _Numbers:
        """compressed-tensors', by the types of what is stored."""
        rows, columns = shape = self._shape(module)
        scale_type = self._kind(module, "weight_scale")
        packed = f"{module}.weight_packed"
        if packed in self._stored and self._store.type_of(packed) == "U8":
            scales = self._float_scales(module) if scale_type == _FP8 else self._power_scales(module)
            if f"{module}.weight_global_scale" in self._stored:
                scales = scales / self._one_scale(module, "weight_global_scale")
            return self._four_bits(packed) * self._spread(scales, shape, module)
        if packed in self._stored:
            half = 1 << (self.packed.bits - 1)
            numbers = unpacked(self.integers(packed), self.packed.bits, columns).astype(np.int32) - half
        elif (kind := self._kind(module, "weight")) == _FP8:
            scales = self._power_scales(module) if scale_type == "U8" else self._store.read(f"{module}.weight_scale")
            return self._safetensors.read_fp8(f"{module}.weight") * self._spread(scales, shape, module)
        elif kind == "I8":
            numbers = self._store.read_integers(f"{module}.weight").astype(np.int32)
        else:
            raise self.damaged(module, f"is stored as {kind} with scales")
        scales = self._store.read(f"{module}.weight_scale")
        if (name := f"{module}.weight_zero_point") in self._stored:
            zeros = self._zeros(name, scales.shape, rows)
            return (numbers - self._spread(zeros, shape, module)) * self._spread(scales, shape, module)
        return numbers.astype(np.float32) * self._spread(scales, shape, module)

    def modelopt(self, module: str) -> _Numbers:
        """ModelOpt's: FP4 with two scales, or FP8 with powers of two."""
        shape = self._shape(module)
        if self.packed.bits == 4:
            scales = self._float_scales(module) * self._one_scale(module, "weight_scale_2")
            return self._four_bits(f"{module}.weight") * self._spread(scales, shape, module)
        if (kind := self._kind(module, "weight")) != _FP8:
            raise self.damaged(module, f"is stored as {kind}")
        numbers = self._safetensors.read_fp8(f"{module}.weight")
        return numbers * self._spread(self._power_scales(module), shape, module)

    def integers(self, name: str) -> npt.NDArray[np.int64]:
        """The tensor of words called ``name``."""
        if name not in self._stored or self._store.type_of(name) not in ("I32", "U32"):
            raise WeightsError(f"Tensor {name} of the packed matrices is missing, or has no 32-bit words.")
        return self._store.read_integers(name)

    def damaged(self, module: str, how: str) -> WeightsError:
        """The error for the matrix of ``module``."""
        return WeightsError(
            f"The packed matrix {module} {how}, and is to have {self.packed.name} form. Download the checkpoint again."
        )

    def _shape(self, module: str) -> Shape:
        """Rows and columns of the matrix of ``module``, checked against the sizes of what is stored."""
        method, bits = self.packed.method, self.packed.bits
        words = next(n for part in _WORDS[method] if (n := f"{module}.{part}") in self._stored)
        if len(stored := self._stored[words]) != 2:
            raise self.damaged(module, f"has {len(stored)} dimensions")
        if method == "gptq":
            return stored[1], stored[0] * 32 // bits
        if method == "awq":
            return stored[1] * 8, stored[0]
        if self._store.type_of(words) == "U8":
            return stored[0], stored[1] * 2
        if not words.endswith("weight_packed"):
            return stored
        if f"{module}.weight_shape" not in self._stored or self._stored[f"{module}.weight_shape"] != (2,):
            raise self.damaged(module, "has no weight_shape")
        rows, columns = (int(size) for size in self._store.read_integers(f"{module}.weight_shape"))
        if (rows, -(-columns * bits // 32)) != stored or columns < 1:
            raise self.damaged(
                module, f"has weight_shape [{rows}, {columns}] and {list(stored)} words of {bits} bits each"
            )
        return rows, columns

    def _groups(self, name: str, columns: int, count: int) -> npt.NDArray[np.int64]:
        """The group of each column: ``g_idx``, or neighbours."""
        size = columns if self.packed.group == -1 else self.packed.group
        groups = np.arange(columns) // size
        if name in self._stored:
            groups = self._store.read_integers(name)
        elif count != -(-columns // size):
            raise WeightsError(
                f"A packed matrix of {columns} columns has {count} scales a row, and group_size is {size}: correct "
                "group_size in the checkpoint's quantization_config."
            )
        if groups.shape != (columns,) or groups.min(initial=0) < 0 or groups.max(initial=0) >= count:
            raise WeightsError(f"The groups of a packed matrix of {columns} columns do not fit its {count} scales.")
        return groups

    def _scales(self, name: str, shape: Shape) -> _Numbers:
        if self._stored.get(name) != shape:
            raise WeightsError(f"Tensor {name} is missing, or its shape is not {list(shape)}.")
        return self._store.read(name)

    def _spread(self, scales: _Numbers, shape: Shape, module: str) -> _Numbers:
        """A scale for each number of a matrix of ``shape``."""
        rows, columns = shape
        found, strategy = scales.shape, self.packed.strategy
        if scales.size == 1:
            return scales.reshape(1, 1)
        if strategy in ("tensor", "channel") and found in ((rows,), (rows, 1)):
            return scales.reshape(rows, 1)
        if strategy == "block" and self.packed.block:
            high, wide = self.packed.block
            if found == (-(-rows // high), -(-columns // wide)):
                return scales.repeat(high, axis=0)[:rows].repeat(wide, axis=1)[:, :columns]
        size = columns if self.packed.group == -1 else self.packed.group
        if strategy in ("group", "tensor_group") and found == (rows, -(-columns // size)):
            return scales[:, self._groups(f"{module}.weight_g_idx", columns, found[1])]
        raise self.damaged(module, f"has shape {list(shape)} and scales of {list(found)} by {strategy}")

    def _zeros(self, name: str, shape: Shape, rows: int) -> _Numbers:
        """Zero points in the shape of the scales: one each, or packed by columns."""
        if self._store.type_of(name) != "I32":
            return self._store.read_integers(name).astype(np.float32)
        bits = self.packed.bits
        words = self.integers(name)
        if words.shape != (-(-rows * bits // 32), *shape[1:]):
            raise WeightsError(f"Tensor {name} has shape {list(words.shape)} for scales of {list(shape)}.")
        zeros: _Numbers = unpacked(words.T, bits, rows).T.astype(np.float32) - (1 << (bits - 1))
        return zeros

    def _float_scales(self, module: str) -> _Numbers:
        if (kind := self._kind(module, "weight_scale")) != _FP8:
            raise self.damaged(module, f"has scales of type {kind}")
        return self._safetensors.read_fp8(f"{module}.weight_scale")

    def _power_scales(self, module: str) -> _Numbers:
        """Scales that are stored as exponents of two, E8M0."""
        if (kind := self._kind(module, "weight_scale")) != "U8":
            raise self.damaged(module, f"has scales of type {kind}")
        exponents = self._store.read_integers(f"{module}.weight_scale")
        if (exponents == 255).any():  # the format's NaN
            raise self.damaged(module, "has scales that are no numbers")
        return np.ldexp(np.float32(1), (exponents - 127).astype(np.int32)).astype(np.float32)

    def _kind(self, module: str, part: str) -> str:
        """The element type of ``part`` of ``module``."""
        if (name := f"{module}.{part}") not in self._stored:
            raise self.damaged(module, f"has no {part}")
        return self._store.type_of(name)

    def _one_scale(self, module: str, part: str) -> np.float32:
        """The scale of the whole matrix."""
        self._kind(module, part)
        if (scale := self._store.read(f"{module}.{part}")).size != 1 or not scale.item() > 0:
            raise self.damaged(module, f"has {part} of {list(scale.shape)}, or not above 0")
        return np.float32(scale.item())

    def _four_bits(self, name: str) -> _Numbers:
        """FP4, E2M1: two numbers a byte, the first in its low bits."""
        if (kind := self._store.type_of(name)) != "U8":
            raise WeightsError(f"Tensor {name} is {kind}, and is to have two numbers of 4 bits a byte.")
        content = self._store.read_integers(name).astype(np.uint8)
        return _FP4[np.stack([content & 15, content >> 4], axis=-1)].reshape(len(content), -1)


_READERS: Mapping[str, Callable[[PackedStore, str], _Numbers]] = {
    "gptq": PackedStore.gptq,
    "awq": PackedStore.awq,
    "compressed-tensors": PackedStore.compressed,
    "modelopt": PackedStore.modelopt,
}


def unpacked(words: npt.NDArray[np.int64], bits: int, count: int) -> npt.NDArray[np.uint8]:
    """The first ``count`` numbers of ``bits`` bits in each row of 32-bit ``words``, the lowest bits first. Raises
    WeightsError where there are fewer."""
    if words.ndim != 2 or not len(words):
        raise WeightsError(f"A packed matrix has words of shape {list(words.shape)}.")
    content = np.ascontiguousarray(words.astype("<u4")).view(np.uint8)
    if content.shape[1] * 8 < count * bits or content.shape[1] * 8 >= count * bits + 32:
        raise WeightsError(
            f"A packed matrix has {content.shape[1] // 4} words a row for {count} numbers of {bits} bits."
        )
    each = np.unpackbits(content, axis=1, bitorder="little")[:, : count * bits]
    numbers = np.packbits(each.reshape(len(words), count, bits), axis=-1, bitorder="little")
    return numbers.reshape(len(words), count)
