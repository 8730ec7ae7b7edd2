"""A Hugging Face style checkpoint for TensorRT-LLM: config.json, safetensors, and ModelOpt's settings for FP8.

Tensors are read, converted and written one after the other; the layout of the files is known before the first is read.
Matrices in FP8 are float8_e4m3fn [out, in] with a scalar float32 ``weight_scale``, the largest absolute value / 448.
There is no ``input_scale``, so TensorRT-LLM quantizes activations dynamically, per tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from bei_build.spec.weight_shapes import Shape
from bei_build.weights.safetensors_file import TYPES, StoredTensor, write_safetensors

CONFIG = "config.json"
_QUANTIZATION = "hf_quant_config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"

_LARGEST_FP8 = 448.0
_MOST_BYTES = 4 << 30  # maximum of a file, unless one tensor alone is larger

# Reads the weight with that name, float32.
Read: TypeAlias = Callable[[str], npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Tensor:
    """One of our weights, as it is stored.

    ``weight`` is our name of it, ``stored`` the checkpoint's. ``scale_group``: our names of the matrices that share its
    FP8 scale, itself among them, because TensorRT-LLM multiplies by them in one product; None: not in FP8.
    """

    weight: str
    stored: str
    shape: Shape
    scale_group: tuple[str, ...] | None = None


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Sequence[Tensor],
    read: Read,
    dtype: str,
    unquantized: Sequence[str],
    producer: Mapping[str, str],
    most_bytes: int = _MOST_BYTES,
) -> None:
    """Write ``tensors`` into ``folder``, as ``dtype`` ("BF16", "F16") where they are not in FP8, and ``config``.

    ``unquantized``: modules that are not quantized, as ModelOpt's patterns; written where some tensor is in FP8.
    ``producer`` has a name and a version. Raises ValueError for a weight that is not finite in ``dtype``.
    """
    if any(tensor.scale_group for tensor in tensors):
        config = {**config, "quantization_config": _inline_quantization(unquantized, producer)}
        write_json(folder / _QUANTIZATION, _quantization(unquantized, producer))
    write_json(folder / CONFIG, config)
    shards = _sharded(list(_entries(tensors, read, dtype)), most_bytes)
    if len(shards) == 1:
        write_safetensors(folder / _WEIGHTS, shards[0])
        return
    names = [f"model-{index:05}-of-{len(shards):05}.safetensors" for index in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(folder / name, shard)
    weight_map = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    total = sum(entry.num_bytes for shard in shards for entry in shard)
    write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write indented JSON with keys in order, so that equal builds are equal bytes."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _entries(tensors: Sequence[Tensor], read: Read, dtype: str) -> Iterator[StoredTensor]:
    scales = _Scales(read)
    for tensor in tensors:
        if tensor.scale_group is None:
            yield StoredTensor(tensor.stored, dtype, tensor.shape, _Converted(tensor, read, dtype))
            continue
        yield StoredTensor(tensor.stored, "F8_E4M3", tensor.shape, _Quantized(tensor, read, scales))
        yield StoredTensor(f"{tensor.stored}_scale", "F32", (), _Scale(tensor.scale_group, scales))


class _Scales:
    """The FP8 scale of each group, computed once. Matrices are read one by one, and again when they are written."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._known: dict[tuple[str, ...], np.float32] = {}

    def scale_of(self, group: tuple[str, ...]) -> np.float32:
        """Largest absolute value / 448; 1 for zeros."""
        if group not in self._known:
            largest = max(float(np.abs(_finite(name, self._read(name))).max()) for name in group)
            self._known[group] = np.float32(largest / _LARGEST_FP8 if largest else 1.0)
        return self._known[group]


@dataclass(frozen=True)
class _Converted:
    tensor: Tensor
    read: Read
    dtype: str

    def __call__(self) -> npt.NDArray[Any]:
        with np.errstate(over="ignore"):  # an overflow is reported as an error of ours
            converted = self.read(self.tensor.weight).astype(TYPES[self.dtype])
        return _finite(self.tensor.weight, converted)


@dataclass(frozen=True)
class _Quantized:
    tensor: Tensor
    read: Read
    scales: _Scales

    def __call__(self) -> npt.NDArray[Any]:
        assert self.tensor.scale_group is not None
        scaled = self.read(self.tensor.weight) / self.scales.scale_of(self.tensor.scale_group)
        quantized: npt.NDArray[Any] = np.clip(scaled, -_LARGEST_FP8, _LARGEST_FP8).astype(TYPES["F8_E4M3"])
        return quantized


@dataclass(frozen=True)
class _Scale:
    group: tuple[str, ...]
    scales: _Scales

    def __call__(self) -> npt.NDArray[Any]:
        return np.array(self.scales.scale_of(self.group), np.float32)


def _finite(name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if not np.isfinite(values).all():
        raise ValueError(f"weight {name} is not finite in {values.dtype}")
    return values


def _sharded(entries: Sequence[StoredTensor], most_bytes: int) -> list[list[StoredTensor]]:
    shards: list[list[StoredTensor]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.num_bytes > most_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.num_bytes
    return shards


def _quantization(unquantized: Sequence[str], producer: Mapping[str, str]) -> dict[str, Any]:
    """hf_quant_config.json in ModelOpt's older, nested form, which all versions of TensorRT-LLM read."""
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": list(unquantized)}
    return {"producer": dict(producer), "quantization": quantization}


def _inline_quantization(unquantized: Sequence[str], producer: Mapping[str, str]) -> dict[str, Any]:
    """ModelOpt's newer, flat form of the same settings, for config.json. Activations are scaled dynamically."""
    eight_bits = {"num_bits": 8, "type": "float"}
    group = {
        "weights": {**eight_bits, "dynamic": False},
        "input_activations": {**eight_bits, "dynamic": True},
        "targets": ["Linear"],
    }
    return {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "config_groups": {"group_0": group},
        "ignore": list(unquantized),
        "producer": dict(producer),
    }
