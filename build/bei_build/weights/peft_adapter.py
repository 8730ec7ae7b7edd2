"""A LoRA adapter (arXiv:2106.09685) in a folder as PEFT saves it: its factors, and a base model with them merged.

The adapted matrix is W + B A * scale; scale is alpha / rank, or alpha / sqrt(rank) where the adapter is rank-stabilized
(arXiv:2312.03732). A table is W + A^T B^T * scale.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bei.artifact.adapter_scales import AdapterScale
from bei.errors import CheckpointError, WeightsError
from bei_build.files.json_settings import read_object
from bei_build.files.size_limits import check_sizes
from bei_build.weights.tensor_store import TensorStore, WrappedStore, open_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"

_PREFIX = "base_model.model."
# Ends of the names of a matrix's factors, and of a table's.
_MATRIX = (".lora_A.weight", ".lora_B.weight")
_TABLE = (".lora_embedding_A", ".lora_embedding_B")
# Keys of the config that say how it was trained, where it is from, or which modules it has (as its tensors do).
_NO_EFFECT = (
    *("peft_type", "task_type", "base_model_name_or_path", "auto_mapping", "revision", "peft_version"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying"),
    *("lora_dropout", "loftq_config", "eva_config", "corda_config", "qalora_group_size", "inference_mode"),
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "megatron_core"),
)
# Values of all others with which an adapter is what the formula above says.
_NEUTRAL: tuple[object, ...] = (None, False, "none", [], {})
# Beginnings of factors that leave the base model's weights as they are.
_INITIALIZED: tuple[object, ...] = (None, True, False, "gaussian", "eva", "orthogonal")
# Patterns of module names are regular expressions of a stranger: a few repetitions, none of them of a group.
_REPETITIONS, _OF_GROUP = re.compile(r"[*+?{]"), re.compile(r"\)[*+?{]")
_MOST_REPETITIONS = 3


class Factors(NamedTuple):
    """The term of one weight: of a matrix [out, in] ``a`` [rank, in], of a table [rows, width] ``a`` [rows, rank];
    ``b`` [out or width, rank], which has the scale."""

    a: npt.NDArray[np.float32]
    b: npt.NDArray[np.float32]


@dataclass(frozen=True)
class PeftAdapter:
    """A folder's adapter: ``file`` has its tensors. ``ranks`` and ``alphas``: by patterns of module names, of those
    whose ``rank`` and ``alpha`` are others."""

    file: Path
    rank: int
    alpha: float
    is_rank_stabilized: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    @property
    def described(self) -> AdapterScale:
        """For the manifest."""
        return AdapterScale(
            rank=self.rank,
            alpha=float(self.alpha),
            is_rank_stabilized=self.is_rank_stabilized,
            rank_pattern=dict(self.ranks),
            alpha_pattern={name: float(alpha) for name, alpha in self.alphas.items()},
        )

    def rank_of(self, module: str) -> int:
        """The rank of the factors of ``module`` (peft: ``LoraModel._create_and_replace``)."""
        return int(_by_pattern(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> np.float32:
        """The factor of the product of both factors."""
        rank = self.rank_of(module)
        return np.float32(
            _by_pattern(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilized else rank)
        )


def read_adapter(folder: Path) -> PeftAdapter:
    """What ``folder`` says of its adapter. Raises CheckpointError for one that is not plain LoRA."""
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {CONFIG}: it is no adapter as PEFT saves it.")
    config = read_object(path)
    check_sizes(path, config)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{path} has peft_type {config.get('peft_type')!r}; bei computes LORA alone.")
    for key, value in config.items():
        neutral = _INITIALIZED if key == "init_lora_weights" else _NEUTRAL
        if key not in _NO_EFFECT and not any(value == same and type(value) is type(same) for same in neutral):
            raise CheckpointError(
                f"{path} has {key} = {json.dumps(value)[:80]}, which bei does not compute: merge it with PEFT "
                "(merge_and_unload, then save_pretrained), and build the result."
            )
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    if not _is_rank(rank) or not _is_number(alpha):
        raise CheckpointError(f"{path} has r = {rank!r} and lora_alpha = {alpha!r}: both must be numbers above 0.")
    ranks, alphas = (_patterns(path, config, key) for key in ("rank_pattern", "alpha_pattern"))
    if not all(map(_is_rank, ranks.values())) or not all(map(_is_number, alphas.values())):
        raise CheckpointError(f"{path} has a rank_pattern or an alpha_pattern that is no number above 0.")
    file = folder / WEIGHTS
    file = folder / _PICKLED if not file.exists() and (folder / _PICKLED).exists() else file
    return PeftAdapter(file, rank, alpha, bool(config.get("use_rslora")), ranks, alphas)


def _is_rank(value: object) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _patterns(path: Path, config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The patterns of ``key``. Raises CheckpointError for those that could take for ever."""
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} has {key} {found!r:.80}: it must hold numbers by names of modules.")
    for pattern in found:
        try:
            re.compile(pattern)
            is_simple = not _OF_GROUP.search(pattern) and len(_REPETITIONS.findall(pattern)) <= _MOST_REPETITIONS
        except re.error:
            is_simple = False
        if not is_simple:
            raise CheckpointError(
                f"{path} has a {key} for {pattern[:80]!r}, which bei does not read: write names of modules there."
            )
    return found


def _by_pattern(values: Mapping[str, float], module: str, otherwise: float) -> float:
    """The value of the first pattern that ``module`` ends with (peft: ``get_pattern_key``)."""
    return next((value for key, value in values.items() if re.match(rf"(.*\.)?({key})$", module)), otherwise)


class PeftFactors:
    """The factors of ``adapter`` by the names of the base model's tensors, which have the shapes ``stored``. Raises
    WeightsError for an adapter of another model."""

    def __init__(self, adapter: PeftAdapter, stored: Mapping[str, Any]) -> None:
        self._adapter = adapter
        self._store = open_file(adapter.file)
        try:
            self._changed = _changed(stored, self._store.shapes, adapter)
        except BaseException:
            self.close()
            raise

    @property
    def tensors(self) -> Mapping[str, int]:
        """The tensors that the adapter changes, and the rank of each one's factors."""
        return {name: self._adapter.rank_of(module) for name, (module, _) in self._changed.items()}

    def is_table(self, tensor: str) -> bool:
        """True if ``tensor`` has the factors of a table."""
        return self._changed[tensor][1] is _TABLE

    def read(self, tensor: str) -> Factors:
        """The factors of ``tensor``."""
        module, kinds = self._changed[tensor]
        a, b = (self._store.read(f"{_PREFIX}{module}{kind}") for kind in kinds)
        return Factors(np.ascontiguousarray(a.T) if kinds is _TABLE else a, b * self._adapter.scale_of(module))

    def close(self) -> None:
        """Unmap the file."""
        self._store.close()


class PeftStore(WrappedStore):
    """The tensors of ``store``, and an adapter's term added to those that it changes. Raises WeightsError for an
    adapter of another model."""

    def __init__(self, store: TensorStore, adapter: PeftAdapter) -> None:
        super().__init__(store)
        self._factors = PeftFactors(adapter, store.shapes)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor called ``name``, float32."""
        weight = super().read(name)
        if not self._is_changed(name):
            return weight
        a, b = self._factors.read(name)
        merged: npt.NDArray[np.float32] = weight + (a @ b.T if self._factors.is_table(name) else b @ a)
        return merged

    def _is_changed(self, name: str) -> bool:
        return name in self._factors.tensors

    def close(self) -> None:
        """Unmap the files."""
        self._factors.close()
        super().close()


def _changed(
    stored: Mapping[str, Any], found: Mapping[str, Any], adapter: PeftAdapter
) -> dict[str, tuple[str, tuple[str, str]]]:
    """Names of the base's tensors, the modules in the adapter that change them, the ends of their factors' names."""
    changed: dict[str, tuple[str, tuple[str, str]]] = {}
    for tensor in found:
        kinds = next((kinds for kinds in (_MATRIX, _TABLE) if tensor.endswith(kinds)), None)
        if kinds is None or not tensor.startswith(_PREFIX):
            raise WeightsError(f"{adapter.file} has a tensor {tensor}, which is no factor of a linear layer or table.")
        module = tensor.removeprefix(_PREFIX).removesuffix(next(kind for kind in kinds if tensor.endswith(kind)))
        name = _base_name(f"{module}.weight", stored)
        if name is None:
            raise WeightsError(f"{adapter.file} changes {module}, which the base model does not have.")
        _check_shapes(adapter, found, module, kinds, name, tuple(stored[name]))
        if changed.setdefault(name, (module, kinds)) != (module, kinds):
            raise WeightsError(f"{adapter.file} changes {name} twice. Download it again.")
    if not changed:
        raise WeightsError(f"{adapter.file} has no tensors. Download it again.")
    return changed


def _check_shapes(
    adapter: PeftAdapter,
    found: Mapping[str, Any],
    module: str,
    kinds: tuple[str, str],
    name: str,
    shape: tuple[int, int],
) -> None:
    """Raise WeightsError unless both factors of ``module`` fit the base's tensor ``name`` of ``shape``."""
    shapes = tuple(tuple(found.get(f"{_PREFIX}{module}{kind}", ())) for kind in kinds)
    rank, (rows, columns) = adapter.rank_of(module), shape
    wanted = ((rank, rows), (columns, rank)) if kinds is _TABLE else ((rank, columns), (rows, rank))
    if shapes != wanted:
        raise WeightsError(
            f"{adapter.file} has factors of {shapes[0]} and {shapes[1]} for {name} of {shape} and rank {rank}: the two "
            "are not from the same checkpoint. Download it again."
        )


def _base_name(name: str, stored: Mapping[str, Any]) -> str | None:
    """The base's name of ``name``: task classes put one more part in front of it, and base classes none."""
    for candidate in (name, name.partition(".")[2], f"model.{name}"):
        if len(stored.get(candidate, ())) == 2:
            return candidate
    ends = [each for each in stored if each.endswith(f".{name}") and len(stored[each]) == 2]
    return ends[0] if len(ends) == 1 else None
