"""A checkpoint's tensors under the names of its spec. Opening them checks names and shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bei.errors import WeightsError
from bei_build.families.base import Family
from bei_build.graph.writer import FloatArray
from bei_build.spec import DenseSpec, ModelSpec, Shape
from bei_build.weights import TensorStore, open_file, open_weights

# Checkpoints converted from TensorFlow call a norm's parameters gamma and beta; transformers accepts both.
_OLD_KINDS = {"weight": "gamma", "bias": "beta"}

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class SideModule:
    """Weights of a head that lie outside the transformer's files (a sentence-transformers module, a .pt file).

    ``location`` is a folder or a file; its tensors are called ``{stored}.weight`` and ``{stored}.bias``.
    """

    location: Path
    stored: str = "linear"


@dataclass(frozen=True)
class _Source:
    """Where one of our weights lies: rows ``start`` to ``end`` of a stored tensor; all where ``end`` is None."""

    store: TensorStore
    name: str
    start: int = 0
    end: int | None = None


class ModelWeights:
    """The weights of ``spec``, read from ``folder`` and from the ``modules`` of its heads (by layer name).

    Raises WeightsError naming the tensors that are missing, misshapen or left over.
    """

    def __init__(self, spec: ModelSpec, family: Family, folder: Path, modules: Mapping[str, SideModule]) -> None:
        self._spec = spec
        self._family = family
        self._differences = {
            f"{layer.name}.weight": layer.rows
            for head in spec.heads
            for layer in (*head.token_layers, *head.layers)
            if isinstance(layer, DenseSpec) and layer.rows
        }
        self._sources: dict[str, _Source] = {}
        self._stack = ExitStack()
        try:
            self._map_checkpoint(self._opened(open_weights(folder)), modules)
            self._map_modules(modules)
        except BaseException:
            self.close()
            raise

    def read(self, name: str) -> FloatArray:
        """The weight called ``name`` in ``spec.weights()``, float32; KeyError if there is none."""
        source = self._sources[name]
        array = source.store.read(source.name)
        if name in self._differences:
            plus, minus = self._differences[name]
            difference: FloatArray = (array[plus] - array[minus])[None]
            return difference
        if name == "embeddings.position.weight":
            return array[self._spec.embeddings.position_offset :]
        return array if source.end is None else array[source.start : source.end]

    def close(self) -> None:
        """Unmap the files."""
        self._stack.close()

    def __enter__(self) -> ModelWeights:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _opened(self, store: TensorStore) -> TensorStore:
        self._stack.callback(store.close)
        return store

    def _map_checkpoint(self, store: TensorStore, modules: Mapping[str, SideModule]) -> None:
        stored = store.shapes
        shapes = {name: shape for name, shape in self._spec.weights() if name.rsplit(".", 1)[0] not in modules}
        chosen = {name: _stored_name(name, self._family, stored) for name in shapes}
        wanted: Shapes = {}
        for name in _in_table_order(shapes, self._family):
            tensor, shape = chosen[name], shapes[name]
            if name in self._differences:  # of how many rows the table is does not matter
                shape = (stored.get(tensor, shape)[0], shape[1])
            if name == "embeddings.position.weight":
                shape = (shape[0] + self._spec.embeddings.position_offset, shape[1])
            start = wanted[tensor][0] if tensor in wanted and self._is_joined(name) else 0
            self._sources[name] = _Source(store, tensor, start, start + shape[0] if self._is_joined(name) else None)
            wanted[tensor] = (start + shape[0], *shape[1:])
        unused = tuple(f"{prefix}{start}" for prefix in ("", self._family.prefix) for start in self._family.unused)
        _compare(wanted, {n: s for n, s in stored.items() if n in wanted or not n.startswith(unused)})

    def _is_joined(self, name: str) -> bool:
        """Whether the tensor of ``name`` may hold several of ours: parts of a layer can, a tied table is one tensor."""
        return name.startswith("layers.")

    def _map_modules(self, modules: Mapping[str, SideModule]) -> None:
        shapes = dict(self._spec.head_weights())
        for name, module in modules.items():
            store = self._opened(
                open_weights(module.location) if module.location.is_dir() else open_file(module.location)
            )
            kinds = [kind for kind in ("weight", "bias") if f"{name}.{kind}" in shapes]
            plain = not any("." in tensor for tensor in store.shapes)  # a bare state dict of one linear layer
            names = {kind: kind if plain else f"{module.stored}.{kind}" for kind in kinds}
            _compare({names[kind]: shapes[f"{name}.{kind}"] for kind in kinds}, store.shapes)
            self._sources.update({f"{name}.{kind}": _Source(store, names[kind]) for kind in kinds})


def _in_table_order(names: Mapping[str, Shape], family: Family) -> list[str]:
    """``names`` in the order of the family's table, which is that of the rows of joined tensors."""
    rank = {template: index for index, template in enumerate(family.weights)}
    return sorted(names, key=lambda name: rank.get(_template(name.rsplit(".", 1)[0]), 0))


def _template(module: str) -> str:
    return re.sub(r"^layers\.\d+", "layers.{i}", module)


def _stored_name(name: str, family: Family, stored: Mapping[str, tuple[int, ...]]) -> str:
    """The checkpoint's name of ``name``: the first of the family's alternatives that is there."""
    module, kind = name.rsplit(".", 1)
    index = re.match(r"layers\.(\d+)\.", module)
    whole = family.weights.get(_template(name))
    alternatives = family.weights[_template(module)] if whole is None else whole
    plain = [
        alternative.replace("{i}", index[1] if index else "")
        for alternative in ((alternatives,) if isinstance(alternatives, str) else alternatives)
    ]
    candidates = plain if whole is not None else [f"{module}.{k}" for module in plain for k in (kind, _OLD_KINDS[kind])]
    prefixes = (family.prefix, "", *(f"{alias}." for alias in family.aliases))
    names = [f"{prefix}{candidate}" for candidate in candidates for prefix in prefixes]
    return next((candidate for candidate in names if candidate in stored), candidates[0])


def _compare(wanted: Shapes, stored: Shapes) -> None:
    missing = sorted(wanted.keys() - stored.keys())
    extra = sorted(stored.keys() - wanted.keys())
    wrong = sorted(name for name in wanted.keys() & stored.keys() if wanted[name] != stored[name])
    if wrong:
        name = wrong[0]
        raise WeightsError(
            f"Tensor {name} has shape {list(stored[name])}, but config.json implies {list(wanted[name])}"
            f"{_and_more(wrong)}: the two are not of the same checkpoint. Download it again."
        )
    if missing:
        raise WeightsError(f"Tensor {missing[0]} is missing{_and_more(missing)}. Download the checkpoint again.")
    if extra:
        raise WeightsError(
            f"Tensor {extra[0]} is not part of this architecture{_and_more(extra)}: building without it would give "
            "other vectors than the checkpoint's. Merge adapters before the build."
        )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
