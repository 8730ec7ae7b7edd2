"""A LoRA adapter (arXiv:2106.09685) in a folder as PEFT saves it, merged into the weights of its base model.

The adapted matrix is W + B A * scale; scale is alpha / rank, or alpha / sqrt(rank) where the adapter is rank-stabilized
(arXiv:2312.03732).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bei.errors import CheckpointError, WeightsError
from bei_build.files.json_settings import read_object
from bei_build.files.size_limits import check_sizes
from bei_build.weights.tensor_store import TensorStore, WrappedStore, open_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
_FACTORS = (".lora_A.weight", ".lora_B.weight")
# Keys of the config that say how it was trained, where it is from, or which modules it has (as its tensors do).
_NO_EFFECT = (
    *(
        "peft_type",
        "task_type",
        "base_model_name_or_path",
        "auto_mapping",
        "revision",
        "peft_version",
        "inference_mode",
    ),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying"),
    *("lora_dropout", "init_lora_weights", "loftq_config", "eva_config", "corda_config", "qalora_group_size"),
    *("r", "lora_alpha", "use_rslora", "megatron_core", "inference_mode"),
)
# Values of all others with which an adapter is what the formula above says.
_NEUTRAL: tuple[object, ...] = (None, False, "none", [], {})


@dataclass(frozen=True)
class PeftFactors:
    """Where an adapter's tensors are, and the factor of their product."""

    file: Path
    rank: int
    scale: float


def read_factors(folder: Path) -> PeftFactors:
    """What ``folder`` says of its adapter. Raises CheckpointError for one that is not plain LoRA on linear layers."""
    path = folder / CONFIG
    config = read_object(path)
    check_sizes(path, config)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{path} has peft_type {config.get('peft_type')!r}; bei merges LORA alone.")
    for key, value in config.items():
        if key not in _NO_EFFECT and value not in _NEUTRAL:
            raise CheckpointError(
                f"{path} has {key} = {json.dumps(value)[:80]}, which bei does not merge: merge it with PEFT "
                "(merge_and_unload, then save_pretrained), and build the result."
            )
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise CheckpointError(f"{path} has r = {rank!r} and lora_alpha = {alpha!r}: both must be numbers above 0.")
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    return PeftFactors(folder / WEIGHTS, rank, alpha / divisor)


class PeftStore(WrappedStore):
    """The tensors of ``store``, and an adapter's product added to those that it changes. Raises WeightsError for an
    adapter of another model."""

    def __init__(self, store: TensorStore, factors: PeftFactors) -> None:
        super().__init__(store)
        self._scale = np.float32(factors.scale)
        self._adapter = open_file(factors.file)
        try:
            self._changed = _changed(store.shapes, self._adapter.shapes, factors)
        except BaseException:
            self._adapter.close()
            raise

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor called ``name``, float32."""
        weight = self._store.read(name)
        if name not in self._changed:
            return weight
        a, b = (self._adapter.read(f"{self._changed[name]}{kind}") for kind in _FACTORS)
        merged: npt.NDArray[np.float32] = weight + b @ a * self._scale
        return merged

    def close(self) -> None:
        """Unmap the files."""
        self._adapter.close()
        super().close()


def _changed(stored: Mapping[str, Any], found: Mapping[str, Any], factors: PeftFactors) -> dict[str, str]:
    """Names of the base's matrices, and of the modules in the adapter that change them."""
    changed: dict[str, str] = {}
    for tensor in found:
        module = next((tensor.removesuffix(kind) for kind in _FACTORS if tensor.endswith(kind)), None)
        if module is None or not module.startswith(_PREFIX):
            raise WeightsError(f"{factors.file} has a tensor {tensor}, which is no factor of a linear layer.")
        name = _base_name(f"{module.removeprefix(_PREFIX)}.weight", stored)
        if name is None:
            raise WeightsError(f"{factors.file} changes {module}, which the base model does not have.")
        shapes = tuple(tuple(found.get(f"{module}{kind}", ())) for kind in _FACTORS)
        rows, columns = stored[name]
        if shapes != ((factors.rank, columns), (rows, factors.rank)):
            raise WeightsError(
                f"{factors.file} has factors of {shapes[0]} and {shapes[1]} for {name} of {(rows, columns)} and rank "
                f"{factors.rank}: the two are not from the same checkpoint. Download it again."
            )
        if changed.setdefault(name, module) != module:
            raise WeightsError(f"{factors.file} changes {name} twice. Download it again.")
    if not changed:
        raise WeightsError(f"{factors.file} has no tensors. Download it again.")
    return changed


def _base_name(name: str, stored: Mapping[str, Any]) -> str | None:
    """The base's name of ``name``: task classes put one more part in front of it, and base classes none."""
    for candidate in (name, name.partition(".")[2], f"model.{name}"):
        if len(stored.get(candidate, ())) == 2:
            return candidate
    return None
