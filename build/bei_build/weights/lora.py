"""Adapters (LoRA, arXiv:2106.09685) of a checkpoint: those that it stores for its tasks, and those of its users.

They are in files of their own, as PEFT saves them (``peft_adapter``: jina-embeddings-v5), or among the weights, in the
names of torch's parametrizations (jinaai/xlm-roberta-flash-implementation). There a matrix W has factors A and B for
each task: the adapted one is W + B A * alpha / rank, a table W + A B * alpha / rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bei.artifact.adapter_scales import AdapterScale
from bei.artifact.manifest import NO_ADAPTER
from bei.artifact.validation import adapter_fault
from bei.errors import CheckpointError, ConfigError, WeightsError
from bei_build.weights.peft_adapter import CONFIG, Factors, PeftAdapter, PeftFactors, PeftStore, read_adapter
from bei_build.weights.tensor_store import TensorStore, WrappedStore

# The name that selects the weights without any adapter.
NONE = NO_ADAPTER

_STORED = ".parametrizations.weight."
# The folder of adapters in files of their own.
_FOLDER = "adapters"


@dataclass(frozen=True)
class StoredFactors:
    """Of adapters among the weights."""

    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        """The factor of the product of both factors."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class Adapter:
    """The adapter ``name``, chosen from ``names``; NONE for the weights without any. ``factors`` are None where there
    is nothing to merge. ``base``: what is merged before."""

    name: str
    names: tuple[str, ...]
    factors: StoredFactors | PeftAdapter | None
    base: Adapter | None = None

    @property
    def changes_weights(self) -> bool:
        """False if the tensors are those of the files, under their names."""
        return self.factors is not None or (self.base is not None and self.base.changes_weights)

    @property
    def scales(self) -> dict[str, AdapterScale]:
        """Of what is merged, by name."""
        found = {} if self.base is None else self.base.scales
        if isinstance(self.factors, PeftAdapter):
            found[self.name] = self.factors.described
        elif self.factors is not None and self.name != NONE:
            found[self.name] = AdapterScale(rank=self.factors.rank, alpha=float(self.factors.alpha))
        return found

    def merged_with(self, store: TensorStore) -> TensorStore:
        """The adapted tensors. Raises WeightsError."""
        if self.base is not None:
            store = self.base.merged_with(store)
        if isinstance(self.factors, PeftAdapter):
            return PeftStore(store, self.factors)
        return store if self.factors is None else AdaptedStore(store, self.name, self.names, self.factors)


@dataclass(frozen=True)
class AdapterSet:
    """Adapters that one engine computes beside the weights of ``base``, by name. ``tasks``: those that the checkpoint
    has for its tasks. ``is_required``: its own code does not run without one."""

    base: Adapter
    adapters: Mapping[str, Adapter]
    tasks: tuple[str, ...] = ()
    is_required: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the order of the ids, from 1 on."""
        return tuple(self.adapters)

    @property
    def scales(self) -> dict[str, AdapterScale]:
        """Of those, and of what is merged into the base, by name."""
        return self.base.scales | {
            name: one for adapter in self.adapters.values() for name, one in adapter.scales.items()
        }

    def merged(self, number: int) -> Adapter:
        """What is merged for adapter ``number``; 0: the base's weights."""
        return self.adapters[self.names[number - 1]] if number else self.base

    def factors(self, store: TensorStore) -> list[FactorSource]:
        """The factors of each adapter, of tensors that ``base.merged_with`` has given. Raises WeightsError."""
        found: list[FactorSource] = []
        try:
            for adapter in self.adapters.values():
                if isinstance(adapter.factors, PeftAdapter):
                    found.append(PeftFactors(adapter.factors, store.shapes))
                else:
                    assert isinstance(store, AdaptedStore), "adapters among the weights are of the base's store"
                    found.append(TaskFactors(store, adapter.name))
        except BaseException:
            for source in found:
                source.close()
            raise
        return found


class FactorSource(Protocol):
    """The factors of one adapter."""

    @property
    def tensors(self) -> Mapping[str, int]:
        """The tensors that the adapter changes, and the rank of each one's factors."""

    def is_table(self, tensor: str) -> bool:
        """True if ``tensor`` has the factors of a table."""

    def read(self, tensor: str) -> Factors:
        """The factors of ``tensor``."""

    def close(self) -> None:
        """Unmap the file."""


def choose_adapters(
    config: Any, folder: Path, asked: str | None, loras: Mapping[str, Path], repository: Adapter | None = None
) -> tuple[Adapter | None, AdapterSet | None]:
    """The adapter to merge, ``asked`` of those that ``config`` lists, and the adapters to compute beside the weights:
    all that it lists where none is asked for, and ``loras``, folders by name. ``repository``: the adapter of a
    repository without a model, which is merged. Raises CheckpointError, ConfigError."""
    is_stored = bool(getattr(config, "lora_adaptations", None))
    names = config.lora_adaptations if is_stored else _names_of_folders(config, folder)
    if not names:
        if asked is not None:
            raise ConfigError(f"The checkpoint has no adapters: leave adapter {asked!r} out.")
        own: dict[str, Adapter] = {}
        merged = repository
    else:
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"config.json has lora_adaptations {names!r}: they must be a list of names.")
        if asked not in (*names, NONE, None):
            raise ConfigError(
                f"The checkpoint has an adapter for each of its tasks: {', '.join(names)}. {asked!r} is none of them: "
                f"name one with --adapter, say --adapter {NONE} for its weights without any, or leave it out for all."
            )
        stored = _stored_factors(config) if is_stored else None
        wanted = names if asked is None else [asked] if asked != NONE else []
        own = {name: Adapter(name, tuple(names), stored or read_adapter(folder / _FOLDER / name)) for name in wanted}
        merged = own[str(asked)] if asked in own else Adapter(NONE, tuple(names), stored)
    if asked is not None and not loras:
        return merged, None
    if not own and not loras:
        return merged, None
    tasks = own if asked is None else {}
    base = merged or Adapter(NONE, (), None)
    if both := tasks.keys() & loras.keys():
        raise ConfigError(f"The checkpoint has an adapter {sorted(both)[0]!r} itself: give yours another name.")
    added = {name: Adapter(name, tuple(loras), read_adapter(path), base) for name, path in loras.items()}
    for name in (*tasks, *added):
        if fault := adapter_fault(name):
            raise ConfigError(f"An adapter's name cannot be used: {fault}.")
    required = bool(tasks) and not is_stored
    return (None if asked is None else merged), AdapterSet(base, {**tasks, **added}, tuple(tasks), required)


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
    return StoredFactors(rank, alpha)


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
        weight = super().read(name)
        if not self._is_changed(name):
            return weight
        a, b = self.factors(name, self._name)
        merged: npt.NDArray[np.float32] = weight + (a @ b.T if self.is_table(name) else b @ a)
        return merged

    @property
    def adapted(self) -> Mapping[str, int]:
        """The tensors that adapters change, and the rank of their factors."""
        return dict.fromkeys(self._modules, self._factors.rank)

    def is_table(self, name: str) -> bool:
        """True if ``name`` has the factors of a table: A [rows, rank], where a matrix has [rank, columns]."""
        rows, _ = self._store.shapes[self._modules[name]]
        return self._store.shapes[self._factor(name, "A")][1:] == (rows, self._factors.rank)

    def factors(self, name: str, adapter: str) -> Factors:
        """The factors of the tensor ``name`` for the task ``adapter``."""
        index = self._names.index(adapter)
        a, b = (self._store.read(self._factor(name, kind))[index] for kind in "AB")
        return Factors(a, (b.T if self.is_table(name) else b) * np.float32(self._factors.scale))

    def _stored_name(self, name: str) -> str:
        return self._modules.get(name, name)

    def _is_changed(self, name: str) -> bool:
        return name in self._modules and self._name != NONE

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


class TaskFactors:
    """The factors of the task ``name``, among the weights in ``store``."""

    def __init__(self, store: AdaptedStore, name: str) -> None:
        self._store = store
        self._name = name

    @property
    def tensors(self) -> Mapping[str, int]:
        """The tensors that the adapter changes, and the rank of each one's factors."""
        return self._store.adapted

    def is_table(self, tensor: str) -> bool:
        """True if ``tensor`` has the factors of a table."""
        return self._store.is_table(tensor)

    def read(self, tensor: str) -> Factors:
        """The factors of ``tensor``."""
        return self._store.factors(tensor, self._name)

    def close(self) -> None:
        """The store is the weights' own."""
