"""Tensors of a checkpoint folder: safetensors by memory map, PyTorch files through torch only.

This module handles file formats, not models. One tensor is in memory at a time.
"""

from __future__ import annotations

import json
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bei.errors import CheckpointError, WeightsError
from bei.utils.libraries import importing
from bei.utils.untrusted_files import UnfitError, check_regular, within
from bei_build.files.foreign_formats import foreign_kind
from bei_build.files.json_settings import read_object
from bei_build.weights.onnx_file import find_onnx

_SAFETENSORS = "model.safetensors"
_PYTORCH = "pytorch_model.bin"
# The file of a folder that ``checkpoint.gguf_folder`` has laid out.
GGUF = "model.gguf"
# Those that ``table_of_4_bits`` reads.
QUANTIZED_TABLE = ("model_rest.safetensors", "embedding.q4_k_m.bin")
_SAFETENSORS_TYPES = ("F64", "F32", "F16", "BF16")
# Pages of a mapped file stay in memory after reading until the file is unmapped.
_MOST_MAPPED = 256 << 20
# A safetensors header has some 100 bytes per tensor. The library needs ten times its size, and a gigabyte to parse it.
_MOST_HEADER_BYTES = 10_000_000


class TensorStore(ABC):
    """Named tensors of a checkpoint. Floating tensors are read as float32."""

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by name."""

    @property
    @abstractmethod
    def types(self) -> frozenset[str]:
        """The element types of the tensors, in the file format's own words."""

    @abstractmethod
    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor called ``name``, float32. bfloat16 and float16 widen exactly."""

    @abstractmethod
    def type_of(self, name: str) -> str:
        """The element type of the tensor called ``name``, in the file format's own words."""

    @abstractmethod
    def read_integers(self, name: str) -> npt.NDArray[np.int64]:
        """The integer tensor called ``name``. Raises WeightsError."""

    def row_scales(self, name: str) -> npt.NDArray[np.float32] | None:
        """The scale of each row of the matrix called ``name``, float32 [rows, 1]; None if it is not stored in FP8."""
        return None

    def input_scale(self, name: str) -> float | None:
        """The scale for inputs of the matrix called ``name``; None: the checkpoint has none."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Unmap the files."""


class SafetensorsStore(TensorStore):
    """One or more safetensors files, memory-mapped; they are remapped before much of them is in memory."""

    def __init__(self, files: list[Path]) -> None:
        # bfloat16 tensors have the numpy dtype that ml_dtypes registers.
        import ml_dtypes  # noqa: F401

        self._handles: dict[Path, Any] = {}
        self._files: dict[str, Path] = {}
        self._num_read = 0
        for file in files:
            try:
                self._handles[file] = _mapped(file)
            except WeightsError:
                self.close()
                raise
            for name in self._handles[file].keys():  # noqa: SIM118  # a handle is no mapping
                if (other := self._files.setdefault(name, file)) != file:
                    self.close()
                    raise _stored_twice(name, other, file)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        return {name: tuple(self._slice(name).get_shape()) for name in self._files}

    @property
    def types(self) -> frozenset[str]:
        """The element types of the tensors: F32, BF16, ..."""
        return frozenset(self._slice(name).get_dtype() for name in self._files)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor called ``name``, float32."""
        stored = self.type_of(name)
        if stored not in _SAFETENSORS_TYPES:
            raise _quantized(name, stored)
        tensor = self._handles[self._files[name]].get_tensor(name)
        self._num_read += tensor.nbytes
        if self._num_read > _MOST_MAPPED:
            self._map_anew()
        return np.ascontiguousarray(tensor, dtype=np.float32)

    def type_of(self, name: str) -> str:
        """The element type of the tensor called ``name``: F32, BF16, ..."""
        return str(self._slice(name).get_dtype())

    def read_integers(self, name: str) -> npt.NDArray[np.int64]:
        """The integer tensor called ``name``. Raises WeightsError."""
        if not (stored := self.type_of(name)).startswith(("I", "U")):
            raise _no_integers(name, stored)
        return np.asarray(self._handles[self._files[name]].get_tensor(name), np.int64)

    def read_fp8(self, name: str) -> npt.NDArray[np.float32]:
        """The numbers of tensor ``name``, of type F8_E4M3, as float32, not multiplied by a scale."""
        # safetensors has no numpy arrays of this type, so the bytes are read here.
        with self._files[name].open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(length))[name]
            start, end = entry["data_offsets"]
            file.seek(8 + length + start)
            content = file.read(end - start)
        import ml_dtypes

        codes = np.frombuffer(content, ml_dtypes.float8_e4m3fn)
        return codes.astype(np.float32).reshape(entry["shape"])

    def close(self) -> None:
        """Unmap the files."""
        for handle in self._handles.values():
            handle.__exit__(None, None, None)
        self._handles.clear()

    def _slice(self, name: str) -> Any:
        return self._handles[self._files[name]].get_slice(name)

    def _map_anew(self) -> None:
        """Remap the files to free the pages that were read. Tensors returned before are copies."""
        self.close()
        self._handles = {file: _mapped(file) for file in dict.fromkeys(self._files.values())}
        self._num_read = 0


def _mapped(file: Path) -> Any:
    with importing("safetensors", "cpu", "Reading weights"):
        from safetensors import SafetensorError, safe_open
    try:
        _check_header(file)
        return safe_open(file, framework="numpy").__enter__()  # type: ignore[no-untyped-call]
    except (SafetensorError, OSError, UnfitError) as error:
        raise WeightsError(
            f"{file} is not a readable safetensors file ({error}). Download the checkpoint again."
        ) from error


def _check_header(file: Path) -> None:
    """Raise UnfitError for a header longer than its file or than any checkpoint's, before the library parses it."""
    check_regular(file)
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
    if not 2 <= length <= min(_MOST_HEADER_BYTES, file.stat().st_size - 8):
        raise UnfitError(f"its header is said to have {length:,} bytes")


def _check_archive(file: Path) -> None:
    """Raise UnfitError for an archive with compressed entries, which torch never writes: a few bytes could expand to
    terabytes."""
    with zipfile.ZipFile(file) as archive:
        packed = next((part.filename for part in archive.infolist() if part.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:
        raise UnfitError(f"its part {packed[:80]!a} is compressed")


class TorchStore(TensorStore):
    """``pytorch_model.bin``: a pickle, so only torch's weights-only loader reads it."""

    def __init__(self, files: list[Path]) -> None:
        purpose = f"Reading {files[0].name}, a pickle, with the weights-only loader,"
        remedy = "install its CPU build, or take a revision of the repository that has safetensors (they need nothing)"
        with importing("torch", None, purpose, remedy=remedy):
            import torch

        self._tensors: dict[str, Any] = {}
        files_of: dict[str, Path] = {}
        for file in files:
            try:
                check_regular(file)
                # Files from torch before 1.6 are not zip archives and cannot be mapped.
                if is_archive := zipfile.is_zipfile(file):
                    _check_archive(file)
                content = torch.load(file, map_location="cpu", weights_only=True, mmap=is_archive)
            except Exception as error:  # a damaged pickle may raise anything; nothing of it is executed
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                raise WeightsError(
                    f"{file} was refused by torch's weights-only loader ({reason}). Use a safetensors checkpoint."
                ) from error
            if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
                raise WeightsError(f"{file} does not map names to tensors. Use a safetensors checkpoint.")
            for name in content:
                if (other := files_of.setdefault(name, file)) != file:
                    raise _stored_twice(name, other, file)
            self._tensors.update(content)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    @property
    def types(self) -> frozenset[str]:
        """The element types of the tensors: torch.float32, torch.bfloat16, ..."""
        return frozenset(str(tensor.dtype) for tensor in self._tensors.values())

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor called ``name``, float32."""
        tensor = self._tensors[name]
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise _quantized(name, tensor.dtype)
        array: npt.NDArray[np.float32] = tensor.float().contiguous().numpy()
        return array

    def type_of(self, name: str) -> str:
        """The element type of the tensor called ``name``: torch.float32, torch.bfloat16, ..."""
        return str(self._tensors[name].dtype)

    def read_integers(self, name: str) -> npt.NDArray[np.int64]:
        """The integer tensor called ``name``. Raises WeightsError."""
        tensor = self._tensors[name]
        if tensor.is_floating_point() or tensor.is_complex():
            raise _no_integers(name, tensor.dtype)
        array: npt.NDArray[np.int64] = tensor.long().contiguous().numpy()
        return array

    def close(self) -> None:
        """Drop the tensors."""
        self._tensors.clear()


class WrappedStore(TensorStore):
    """A store that changes or renames some tensors of ``store`` and passes the others through."""

    def __init__(self, store: TensorStore) -> None:
        self._store = store

    def _stored_name(self, name: str) -> str:
        """The name in ``store`` of the tensor called ``name``."""
        return name

    def _is_changed(self, name: str) -> bool:
        """True if ``read`` gives other numbers than are stored, so that the scales of an FP8 matrix are not theirs."""
        return False

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        return self._store.shapes

    @property
    def types(self) -> frozenset[str]:
        """The element types of the stored tensors."""
        return self._store.types

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor called ``name``, float32."""
        return self._store.read(self._stored_name(name))

    def type_of(self, name: str) -> str:
        """The element type of the tensor called ``name``."""
        return self._store.type_of(self._stored_name(name))

    def read_integers(self, name: str) -> npt.NDArray[np.int64]:
        """The integer tensor called ``name``. Raises WeightsError."""
        return self._store.read_integers(self._stored_name(name))

    def row_scales(self, name: str) -> npt.NDArray[np.float32] | None:
        """The scale of each row of the matrix called ``name``; None if its numbers are not those stored in FP8."""
        return None if self._is_changed(name) else self._store.row_scales(self._stored_name(name))

    def input_scale(self, name: str) -> float | None:
        """The scale for inputs of the matrix called ``name``; None if its numbers are not those stored with it."""
        return None if self._is_changed(name) else self._store.input_scale(self._stored_name(name))

    def close(self) -> None:
        """Unmap the files."""
        self._store.close()


class RenamedStore(WrappedStore):
    """The tensors of ``store`` under new names; ``names`` maps stored names to new ones."""

    def __init__(self, store: TensorStore, names: Mapping[str, str]) -> None:
        super().__init__(store)
        self._stored = {name: stored for stored, name in names.items()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        shapes = self._store.shapes
        return {name: shapes[stored] for name, stored in self._stored.items()}

    def _stored_name(self, name: str) -> str:
        return self._stored[name]


def weight_files(folder: Path) -> list[Path]:
    """The weight files: safetensors (one or sharded) if there are any, else PyTorch's, a GGUF file, or an ONNX file
    (without those that hold its tensors: ``onnx_file.external_files``)."""
    for name in (_SAFETENSORS, _PYTORCH):
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return list(_shards(folder, index))
    for names in ((GGUF,), QUANTIZED_TABLE):
        if all((folder / name).is_file() for name in names):
            return [folder / name for name in names]
    if (file := find_onnx(folder)) is not None:
        return [file]
    kind = foreign_kind(folder)
    raise WeightsError(
        f"{folder} has neither {_SAFETENSORS} nor {_PYTORCH} (nor an index of shards)"
        + (f", but {kind}." if kind else ". Download the checkpoint again.")
    )


def open_weights(folder: Path) -> TensorStore:
    """Open the weights of ``folder``. Raises WeightsError, and MissingDependencyError for .bin without torch."""
    return _open(weight_files(folder))


def check_weights(folder: Path) -> None:
    """Open the safetensors of ``folder``, if it has any, and close them. Raises WeightsError.

    This is quick, so that damaged files are found before libraries are loaded, which takes seconds.
    """
    if any((folder / name).is_file() for name in (_SAFETENSORS, f"{_SAFETENSORS}.index.json")):
        open_weights(folder).close()


def open_file(path: Path) -> TensorStore:
    """Open one file of weights. Raises the errors of ``open_weights``."""
    return _open([path])


def _open(files: list[Path]) -> TensorStore:
    if files[0].suffix == ".safetensors":
        return SafetensorsStore(files)
    if files[0].suffix not in (".bin", ".pt", ".pth"):
        raise WeightsError(
            f"{files[0].name} is no file of weights that bei reads here: safetensors or .bin are needed."
        )
    return TorchStore(files)


def _quantized(name: str, dtype: object) -> WeightsError:
    return WeightsError(
        f"Tensor {name} is {dtype}, not 16-, 32- or 64-bit floating point: the checkpoint seems to be quantized. "
        "Use the original 16- or 32-bit checkpoint; bei quantizes at build time."
    )


def _no_integers(name: str, dtype: object) -> WeightsError:
    return WeightsError(f"Tensor {name} is {dtype}, and must hold integers. Download the checkpoint again.")


def _stored_twice(name: str, first: Path, second: Path) -> WeightsError:
    return WeightsError(
        f"Tensor {name} is in {first.name} and in {second.name}: the two are not from the same checkpoint. Download "
        "it again."
    )


def _shards(folder: Path, index: Path) -> Iterator[Path]:
    try:
        names = sorted({str(name) for name in read_object(index)["weight_map"].values()})
    except (CheckpointError, LookupError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} is not an index of shards ({error!r}). Download the checkpoint again.") from error
    for name in names:
        try:
            path = within(folder, name)
        except UnfitError as error:
            raise WeightsError(
                f"{index.name} names a file that bei does not read: {error}. Download the checkpoint again."
            ) from error
        if not path.is_file():
            raise WeightsError(f"{index.name} names {name}, which is not in {folder}. Download the checkpoint again.")
        yield path
    if not names:
        raise WeightsError(f"{index} names no files. Download the checkpoint again.")
