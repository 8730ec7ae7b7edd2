"""Adapters (LoRA, arXiv:2106.09685) that a checkpoint stores beside its weights, one per task; one is merged.

They are in files of their own, as PEFT saves them (``peft_adapter``: jina-embeddings-v5), or among the weights, in the
names of torch's parametrizations (jinaai/xlm-roberta-flash-implementation). There a matrix W has factors A and B for
each task: the adapted one is W + B A * alpha / rank, a table W + A B * alpha / rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bei.errors import CheckpointError, ConfigError, WeightsError
from bei_build.weights.peft_adapter import CONFIG, PeftFactors, PeftStore, read_factors
from bei_build.weights.tensor_store import TensorStore, WrappedStore

# The name that selects the weights without any adapter.
NONE = "none"

_STORED = ".parametrizations.weight."
# The folder of adapters in files of their own.
_FOLDER = "adapters"


@dataclass(frozen=True)
class StoredFactors:
    """Of adapters among the weights."""

    rank: int
    scale: float


@dataclass(frozen=True)
class Adapter:
    """The adapter ``name``, chosen from ``names``; NONE for the weights without any. ``factors`` are None where there
    is nothing to merge."""

    name: str
    names: tuple[str, ...]
    factors: StoredFactors | PeftFactors | None

    def merged_with(self, store: TensorStore) -> TensorStore:
        """The adapted tensors. Raises WeightsError."""
        if isinstance(self.factors, PeftFactors):
            return PeftStore(store, self.factors)
        return store if self.factors is None else AdaptedStore(store, self.name, self.names, self.factors)


def choose_adapter(config: Any, folder: Path, asked: str | None) -> Adapter | None:
    """The adapter ``asked``, of those that ``config`` lists; None where it lists none. Raises CheckpointError,
    ConfigError."""
    is_stored = bool(getattr(config, "lora_adaptations", None))
    names = config.lora_adaptations if is_stored else _names_of_folders(config, folder)
    if not names:
        if asked is not None:
            raise ConfigError(f"The checkpoint has no adapters: leave adapter {asked!r} out.")
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"config.json has lora_adaptations {names!r}: they must be a list of names.")
    if asked not in (*names, NONE):
        chosen = "None is chosen" if asked is None else f"{asked!r} is none of them"
        raise ConfigError(
            f"The checkpoint has an adapter for each of its tasks: {', '.join(names)}. {chosen}: name one with "
            f"--adapter, or say --adapter {NONE} for its weights without any."
        )
    if is_stored:
        return Adapter(str(asked), tuple(names), _stored_factors(config))
    factors = None if asked == NONE else read_factors(folder / _FOLDER / str(asked))
    return Adapter(str(asked), tuple(names), factors)


def _names_of_folders(config: Any, folder: Path) -> Any:
    """The adapters in files of their own that ``config`` names; none where they were merged before. Raises
    CheckpointError."""
    names = getattr(config, "task_names", None)
    if isinstance(names, list) and (folder / _FOLDER).is_dir():
        return [name for name in names if (folder / _FOLDER / str(name) / CONFIG).is_file()]
    if "JinaEmbeddingsV5Model" in (getattr(config, "architectures", None) or ()):
        raise CheckpointError(
            f"{folder} has no adapters ({_FOLDER}/TASK/{CONFIG}), without which its class is not used. Download the "
            "checkpoint again."
        )
    return None


def _stored_factors(config: Any) -> StoredFactors:
    """Raises CheckpointError."""
    rank: Any = getattr(config, "lora_rank", None)
    alpha: Any = getattr(config, "lora_alpha", None)
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
        raise CheckpointError(
            f"config.json has lora_rank {rank!r} and lora_alpha {alpha!r}: they must be a number of rows, and a number."
        )
    return StoredFactors(rank, alpha / rank)


class AdaptedStore(WrappedStore):
    """The tensors of ``store`` with the adapter ``name`` merged, under the names they would have without adapters."""

    def __init__(self, store: TensorStore, name: str, names: tuple[str, ...], factors: StoredFactors) -> None:
        super().__init__(store)
        self._name = name
        self._names = names
        self._factors = factors
        stored = store.shapes
        originals = [name for name in stored if name.endswith(f"{_STORED}original")]
        self._modules = {f"{name.removesuffix(f'{_STORED}original')}.weight": name for name in originals}
        unmerged = {self._factor(name, kind) for name in self._modules for kind in "AB"}
        self._kept = stored.keys() - unmerged - set(originals)
        for name, original in self._modules.items():
            self._check(name, stored[original], stored)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        stored = self._store.shapes
        merged = {name: stored[original] for name, original in self._modules.items()}
        return {**{name: shape for name, shape in stored.items() if name in self._kept}, **merged}

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor called ``name``, float32."""
        if name not in self._modules:
            return self._store.read(name)
        weight = self._store.read(self._modules[name])
        if self._name == NONE:
            return weight
        index = self._names.index(self._name)
        a, b = (self._store.read(self._factor(name, kind))[index] for kind in "AB")
        product = b @ a if a.shape[1] == weight.shape[1] else a @ b
        merged: npt.NDArray[np.float32] = weight + product * np.float32(self._factors.scale)
        return merged

    def type_of(self, name: str) -> str:
        """The element type of the tensor called ``name``."""
        return self._store.type_of(self._modules.get(name, name))

    def _check(self, name: str, shape: tuple[int, ...], stored: Mapping[str, tuple[int, ...]]) -> None:
        """Raise WeightsError unless the factors of ``name`` have the shapes for a matrix or for a table."""
        count, rank = len(self._names), self._factors.rank
        rows, columns = shape
        found = tuple(stored.get(self._factor(name, kind)) for kind in "AB")
        matrix, table = ((count, rank, columns), (count, rows, rank)), ((count, rows, rank), (count, rank, columns))
        if found not in (matrix, table):
            raise WeightsError(
                f"The adapters of {name} have the shapes {found[0]} and {found[1]}, but config.json says {count} "
                f"adapters of rank {rank}: the two are not from the same checkpoint. Download it again."
            )

    @staticmethod
    def _factor(name: str, kind: str) -> str:
        return f"{name.removesuffix('.weight')}{_STORED}0.lora_{kind}"
