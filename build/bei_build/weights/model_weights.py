"""A checkpoint's tensors under the names of its spec. Opening them checks names and shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from bei.errors import WeightsError
from bei_build.families.base import AS_STORED, Family
from bei_build.spec.adapters import A, B
from bei_build.spec.dtypes import FloatArray
from bei_build.spec.head_layers import HeadLayer
from bei_build.spec.model_spec import HeadSpec, ModelSpec
from bei_build.spec.parts import DenseSpec
from bei_build.spec.position_tables import resized_grid
from bei_build.spec.weight_shapes import Shape
from bei_build.weights.adapted import adapters_spec, stacked_factor
from bei_build.weights.dequantize import open_dequantized
from bei_build.weights.gguf_names import GgufNames
from bei_build.weights.gguf_store import SUFFIX, GgufStore, dequantized_types
from bei_build.weights.lora import Adapter, AdapterSet, FactorSource
from bei_build.weights.onnx_file import SUFFIX as ONNX_SUFFIX
from bei_build.weights.onnx_names import OnnxNames
from bei_build.weights.onnx_store import OnnxStore
from bei_build.weights.packed import PackedStore
from bei_build.weights.packed_format import StoredPacked
from bei_build.weights.quantized_format import StoredFP8
from bei_build.weights.shared_rows import SharedRowsStore
from bei_build.weights.stored_forms import FormedStore
from bei_build.weights.stored_names import StoredNames, layer_of
from bei_build.weights.table_of_4_bits import FORM, TableOf4Bits
from bei_build.weights.tensor_store import (
    QUANTIZED_TABLE,
    RenamedStore,
    TensorStore,
    open_file,
    open_weights,
    weight_files,
)

# Tensors that a quantized checkpoint stores in place of a matrix, or beside it.
_QUANTIZED = (
    *(".qweight", ".qzeros", ".scales", ".g_idx"),  # GPTQ, AWQ
    *(".SCB", ".absmax", ".quant_map"),  # bitsandbytes
    *(".weight_packed", ".weight_shape", ".weight_zero_point"),  # compressed-tensors
    *(".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".input_scale", ".pre_quant_scale"),  # FP8, FP4
)

# Parts of the names that PEFT gives an adapter's tensors.
_ADAPTER = ("lora_", "base_layer.", "modules_to_save.", "ia3_l")

# Modules that a tensor may join by head, in this order.
_JOINED = (".query.weight", ".key.weight", ".value.weight")

# Position tables, whose first, unused rows are not read.
_POSITIONS = ("embeddings.position.weight", "decoder.embeddings.position.weight")

# Our name of the word table.
_WORDS = "embeddings.word.weight"
# Kinds of tensors of a layer that a side module may hold.
_KINDS = ("weight", "bias", "residual.weight")

# Relative tolerance between stored sines and frequencies and computed ones: a few roundings of float32, or the one of a
# 16-bit type.
_EXACT, _ROUNDED = 1e-6, 2**-8
_ROTATION = 1e-4  # between frequencies and the same ones out of factors
_NARROW = ("BF16", "F16", "torch.bfloat16", "torch.float16")
_SMALLEST = 1e-7  # the rounding error of small numbers in float16

Shapes: TypeAlias = Mapping[str, Shape]


@dataclass(frozen=True)
class SideModule:
    """Weights of a head that lie outside the transformer's files (a sentence-transformers module, a .pt file).

    ``location`` is a folder or a file; its tensors are called ``{stored}.weight`` and ``{stored}.bias``, that of a
    residual ``residual.weight``. One file may hold several modules.
    """

    location: Path
    stored: str = "linear"


@dataclass(frozen=True)
class _Source:
    """The location of one of our weights: rows ``start`` to ``end`` of a stored tensor; all rows where ``end`` is
    None."""

    store: TensorStore
    name: str
    start: int = 0
    end: int | None = None


class ModelWeights:
    """The weights of ``spec``, read from ``folder`` and from the ``modules`` of its heads (by layer name).

    ``tied``: a language model's last matrix may be that of its embeddings. ``adapter`` is merged; ``adapters``
    are those of the spec. ``fp8``: the checkpoint's FP8 settings; such matrices are read times their scales.
    ``packed``: how its matrices are packed.
    ``stored_types``: the element types of the tensors in ``folder``; ``dequantized``: the forms among them whose
    numbers are computed. ``is_renamed``: the model's library would not find the tensors under their stored names.
    Raises WeightsError naming the tensors that are missing, misshapen, left over, or differ from the computed values.
    """

    def __init__(
        self,
        spec: ModelSpec,
        family: Family,
        folder: Path,
        modules: Mapping[str, SideModule],
        *,
        tied: bool = True,
        adapter: Adapter | None = None,
        adapters: AdapterSet | None = None,
        fp8: StoredFP8 | None = None,
        packed: StoredPacked | None = None,
    ) -> None:
        self._spec = spec
        self._names = StoredNames(family, tied)
        self._joined_by_head = family.joined_by_head
        dense = [
            layer for head in spec.heads for layer in (*head.token_layers, *head.layers) if isinstance(layer, DenseSpec)
        ]
        self._rows = {f"{layer.name}.weight": layer.rows for layer in dense if layer.rows}
        self._factors = {f"{layer.name}.weight": layer.factors for layer in dense if layer.factors}
        self._sources: dict[str, _Source] = {}
        self._stack = ExitStack()
        try:
            store = self._opened(_open(folder, family, fp8, packed))
            self.stored_types = store.types
            renamed = (RenamedStore, FormedStore, GgufNames, OnnxNames)
            self.is_renamed = isinstance(store, renamed) or packed is not None
            self.dequantized: tuple[str, ...] = (packed.name,) if packed else ()
            if isinstance(store, TableOf4Bits):
                self.dequantized = (FORM,)
            if isinstance(store, GgufNames):
                self.dequantized = dequantized_types(store.types)
                _check_rotation(store, spec)
            merged = adapters.base if adapters else adapter
            self._store = self._opened(merged.merged_with(store)) if merged else store
            self._adapters: list[FactorSource] = adapters.factors(self._store) if adapters else []
            for source in self._adapters:
                self._stack.callback(source.close)
            self._map_checkpoint(self._store, modules)
            self._map_modules(modules)
        except BaseException:  # an interrupt too must unmap the files
            self.close()
            raise

    def read(self, name: str) -> FloatArray:
        """The weight called ``name`` in ``spec.weights()``, float32; KeyError if there is none."""
        if name in self._factors:
            return np.array([self._factors[name]], np.float32)
        layer, _, kind = name.rpartition(".")
        if kind in (A, B):
            of = self._sources[f"{layer}.weight"]
            rows_of = partial(self._rows_of, of, f"{layer}.weight")
            return stacked_factor(kind, of.name, self._adapters, layer, rows_of)
        source = self._sources[name]
        array = source.store.read(source.name)
        if name in self._rows:
            return np.stack([_combination(array, row) for row in self._rows[name]])
        if name in _POSITIONS:
            return self._fitted(array[self._position_offset(name) :])
        return self._rows_of(source, name, array)

    def is_untied(self, name: str) -> bool:
        """True if ``name``, which may be the embeddings' matrix, is also stored on its own with other numbers."""
        own, embeddings = self._sources[name], self._sources["embeddings.word.weight"]
        return own.name != embeddings.name and not np.array_equal(
            own.store.read(own.name), embeddings.store.read(embeddings.name)
        )

    def row_scales(self, name: str) -> FloatArray | None:
        """The scale of each row of a matrix stored in FP8, float32 [out]: ``read`` gives numbers of float8_e4m3fn times
        these. None: ``name`` is not stored in FP8, or not stored at all."""
        source = self._matrix_source(name)
        scales = source.store.row_scales(source.name) if source else None
        return self._rows_of(source, name, scales)[:, 0] if source and scales is not None else None

    def input_scale(self, name: str) -> float | None:
        """The scale for inputs of the matrix called ``name``; None: the checkpoint has none."""
        source = self._matrix_source(name)
        return source.store.input_scale(source.name) if source else None

    def stored_tensors(self, *, of_all: bool = False) -> Iterator[tuple[str, FloatArray]]:
        """Names and float32 values, as stored, of the tensors that belong to the model; buffers do not. ``of_all``:
        also those of towers that this model is not."""
        read = {source.name for source in self._sources.values() if source.store is self._store}
        for name in self._store.shapes:
            if of_all or name in read or self._names.is_read(name):
                yield name, self._store.read(name)

    def _matrix_source(self, name: str) -> _Source | None:
        return self._sources.get(name) if name not in self._rows and name not in self._factors else None

    def _rows_of(self, source: _Source, name: str, array: FloatArray) -> FloatArray:
        """The rows of ``array`` [rows, any], the tensor that ``source`` names, that belong to ``name``."""
        if source.end is None:
            return array
        if self._joined_by_head and name.endswith(_JOINED):
            heads = array.reshape(-1, len(_JOINED), self._spec.attentions[0].head_dim, array.shape[1])
            return heads[:, source.start // (source.end - source.start)].reshape(-1, array.shape[1])
        return array[source.start : source.end]

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
        elsewhere = {f"{module}.{kind}" for module in modules for kind in _KINDS} | self._factors.keys()
        shapes = {
            name: shape
            for name, shape in self._spec.weights()
            if name not in elsewhere and not name.endswith((f".{A}", f".{B}"))
        }
        chosen = {name: self._names.find(name, stored) for name in shapes}
        copies = {name: self._names.copies(name, stored) for name in shapes}
        computed = {tensor: values for tensor in stored if (values := self._names.computed(tensor))}
        wanted: dict[str, Shape] = {}
        taken: dict[tuple[str, str], int] = {}  # rows of a tensor that one layer has used so far
        for name in self._names.in_table_order(shapes):
            tensor, shape = chosen[name], shapes[name]
            if name in self._rows:  # the table may have any number of rows
                shape = (stored.get(tensor, shape)[0], shape[1])
            if name in _POSITIONS:
                shape = (self._stored_positions(shape[0]) + self._position_offset(name), shape[1])
            if layer := layer_of(name):  # parts of one layer may be joined in a tensor; a table is one tensor
                start = taken.get((tensor, layer), 0)
                taken[tensor, layer] = start + shape[0]
                self._sources[name] = _Source(store, tensor, start, start + shape[0])
                shape = (start + shape[0], *shape[1:])
            else:
                self._sources[name] = _Source(store, tensor)
            wanted[tensor] = shape
        for head in self._spec.heads:
            self._check_labels(head, chosen, shapes, stored)
        checked = computed.keys() | {tensor for tensors in copies.values() for tensor in tensors}
        counted = {tensor for tensor in stored if self._names.is_read(tensor)} - checked
        _check_shapes(wanted, {tensor: stored[tensor] for tensor in stored if tensor in wanted or tensor in counted})
        for tensor, copy in sorted({(chosen[name], copy) for name in copies for copy in copies[name]}):
            _check_copy(store, tensor, copy)
        for tensor, values in computed.items():
            _check_computed(store, tensor, values(self._spec, stored[tensor]))

    def _position_offset(self, name: str) -> int:
        decoder = self._spec.decoder
        of = decoder.embeddings if decoder and name.startswith("decoder.") else self._spec.embeddings
        return of.position_offset

    def _stored_positions(self, num_rows: int) -> int:
        """Rows of the stored position table, of which ``num_rows`` are made."""
        patches = self._spec.embeddings.patches
        if patches is None or patches.stored_side is None:
            return num_rows
        return patches.class_token + patches.stored_side**2

    def _fitted(self, table: FloatArray) -> FloatArray:
        """The position table for the images that the model reads."""
        patches = self._spec.embeddings.patches
        if patches is None or patches.stored_side is None or patches.grid is None:
            return table
        first, square = np.split(table, [int(patches.class_token)])
        none = np.zeros((patches.registers, table.shape[1]), np.float32)
        grid = resized_grid(square, patches.stored_side, patches.grid, antialias=patches.antialias)
        return np.concatenate([first, none, grid])

    def _check_labels(
        self, head: HeadSpec, chosen: Mapping[str, str], shapes: Mapping[str, Shape], stored: Shapes
    ) -> None:
        """Raise WeightsError where a classifier's last matrix has another number of labels than config.json."""
        stored_layers = [layer for layer in head.layers if isinstance(layer, DenseSpec) and not layer.factors]
        name = f"{stored_layers[-1].name}.weight" if stored_layers else ""
        if head.output != "logits" or name not in chosen or name in self._rows:
            return
        found, wanted = stored.get(chosen[name], shapes[name]), shapes[name]
        if found != wanted and found[1:] == wanted[1:]:
            raise WeightsError(
                f"Tensor {chosen[name]} gives {found[0]} scores, and config.json says {wanted[0]} (transformers takes "
                f'2 where it says nothing; a reward model has 1): write "num_labels": {found[0]} into config.json, or '
                "an id2label of as many names."
            )

    def _map_modules(self, modules: Mapping[str, SideModule]) -> None:
        shapes = dict(self._spec.head_weights())
        for name, module in modules.items():
            store = self._opened(
                open_weights(module.location) if module.location.is_dir() else open_file(module.location)
            )
            kinds = [kind for kind in _KINDS if f"{name}.{kind}" in shapes]
            beside = {one.stored for one in modules.values() if one.location == module.location} - {module.stored}
            others = tuple(f"{stored}." for stored in beside)  # that the file has for other layers
            stored = {tensor: shape for tensor, shape in store.shapes.items() if not tensor.startswith(others)}
            plain = not any("." in tensor for tensor in stored)  # a bare state dict of one linear layer
            names = {kind: kind if plain or "." in kind else f"{module.stored}.{kind}" for kind in kinds}
            _check_shapes({names[kind]: shapes[f"{name}.{kind}"] for kind in kinds}, stored)
            self._sources.update({f"{name}.{kind}": _Source(store, names[kind]) for kind in kinds})


def _open(
    folder: Path, family: Family, fp8: StoredFP8 | None = None, packed: StoredPacked | None = None
) -> TensorStore:
    """The tensors of ``folder`` under the names that the family's library uses. Raises WeightsError."""
    (file, *_) = weight_files(folder)
    if file.suffix == SUFFIX:
        return GgufNames(GgufStore(file), family)
    if file.suffix == ONNX_SUFFIX:
        store: TensorStore = OnnxNames(OnnxStore(file), family)
    elif file.name == QUANTIZED_TABLE[0]:
        store = TableOf4Bits(folder)
    else:
        store = open_dequantized(folder, fp8) if fp8 else open_weights(folder)
    try:
        if packed:
            store = PackedStore(store, packed)
        names = StoredNames(family)
        library = names.unwrapped(store.shapes)
        if any(stored != name for stored, name in library.items()):
            store = RenamedStore(store, library)
        if family.stored_forms is not None:
            store = FormedStore(store, family.stored_forms)
        return SharedRowsStore(store, names.find(_WORDS, store.shapes)) if family.shares_rows else store
    except BaseException:  # an interrupt too must unmap the files
        store.close()
        raise


def _check_rotation(store: GgufNames, spec: ModelSpec) -> None:
    """Raise WeightsError where ``store`` rotates by other frequencies than ``spec``."""
    stored, rope = store.rope_frequencies(), spec.attentions[0].rope
    if stored is not None and (rope is None or not np.allclose(stored, rope.inv_freq, rtol=_ROTATION)):
        raise WeightsError(
            "The GGUF file scales its rotations (rope_freqs.weight) by other factors than config.json's rope_scaling: "
            "the two are not from the same checkpoint."
        )


def _check_copy(store: TensorStore, tensor: str, copy: str) -> None:
    """Raise WeightsError where ``copy``, another name of ``tensor``, holds other values."""
    if store.shapes[tensor] != store.shapes[copy] or not np.array_equal(store.read(tensor), store.read(copy)):
        raise WeightsError(
            f"Tensors {tensor} and {copy} are the same weights in this architecture, and hold different values: take "
            "the one out that is not the model's."
        )


def _check_computed(store: TensorStore, tensor: str, values: FloatArray) -> None:
    """Raise WeightsError where ``tensor`` holds other numbers than ``values``, which bei computes in its place."""
    stored = store.read(tensor)
    if stored.shape != values.shape:
        raise WeightsError(
            f"Tensor {tensor} has shape {list(stored.shape)}, but config.json implies {list(values.shape)}: the two "
            "are not from the same checkpoint. Download it again."
        )
    tolerance = _ROUNDED if store.type_of(tensor) in _NARROW else _EXACT
    if not np.allclose(stored, values, rtol=tolerance, atol=_SMALLEST):
        off = np.abs(stored - values).max()
        raise WeightsError(
            f"Tensor {tensor} is off by {off:.2g} from what config.json implies, which bei computes in its place: "
            "models with another one are not supported. If its values are an accident, take the tensor out."
        )


def _combination(matrix: FloatArray, row: tuple[tuple[int, float], ...]) -> FloatArray:
    """The sum of rows of ``matrix``, each given as (index, factor)."""
    total = np.zeros(matrix.shape[1], np.float32)
    for index, factor in row:
        total += np.float32(factor) * matrix[index]
    return total


def with_adapters(
    spec: ModelSpec,
    family: Family,
    folder: Path,
    adapters: AdapterSet,
    *,
    tied: bool = True,
    fp8: StoredFP8 | None = None,
    packed: StoredPacked | None = None,
) -> ModelSpec:
    """``spec`` with the ``adapters`` of the weights in ``folder``. Raises WeightsError."""
    with ExitStack() as stack:
        opened = _open(folder, family, fp8, packed)
        stack.callback(opened.close)
        store = adapters.base.merged_with(opened)
        stack.callback(store.close)
        sources = adapters.factors(store)
        for source in sources:
            stack.callback(source.close)
        names, stored = StoredNames(family, tied), store.shapes
        found = adapters_spec(spec, adapters, sources, lambda name: names.find(name, stored), names.is_read)
    return replace(spec, adapters=found)


def stored_width(location: Path) -> int:
    """Number of rows of the matrix in the file ``location``. Raises WeightsError, MissingDependencyError."""
    store = open_file(location)
    try:
        widths = [shape[0] for shape in store.shapes.values() if len(shape) == 2]
    finally:
        store.close()
    if len(widths) != 1:
        raise WeightsError(f"{location} does not hold one linear layer. Download the checkpoint again.")
    return widths[0]


def stored_shape(name: str, family: Family, folder: Path) -> tuple[int, int]:
    """Rows and columns of the matrix with our name ``name``. Raises WeightsError."""
    store = _open(folder, family)
    try:
        shapes = store.shapes
    finally:
        store.close()
    stored = StoredNames(family).find(name, shapes)
    if len(shape := shapes.get(stored, ())) != 2:
        raise WeightsError(f"Tensor {stored} is missing or no matrix. Download the checkpoint again.")
    return shape[0], shape[1]


def with_stored_widths(heads: tuple[HeadSpec, ...], family: Family, folder: Path) -> tuple[HeadSpec, ...]:
    """``heads`` with the width of AS_STORED layers taken from their matrices in ``folder``. Raises WeightsError."""

    def resolved(layer: HeadLayer) -> HeadLayer:
        if not isinstance(layer, DenseSpec) or layer.out_features != AS_STORED:
            return layer
        return replace(layer, out_features=stored_shape(f"{layer.name}.weight", family, folder)[0])

    return tuple(replace(head, token_layers=tuple(resolved(layer) for layer in head.token_layers)) for head in heads)


def _check_shapes(wanted: Shapes, stored: Shapes) -> None:
    """Raise WeightsError unless ``stored`` has exactly the tensors ``wanted``, in these shapes."""
    missing = sorted(wanted.keys() - stored.keys())
    extra = sorted(stored.keys() - wanted.keys())
    _refuse_quantized_and_adapters(extra)
    wrong = sorted(name for name in wanted.keys() & stored.keys() if wanted[name] != stored[name])
    if wrong:
        name = wrong[0]
        raise WeightsError(
            f"Tensor {name} has shape {list(stored[name])}, but config.json implies "
            f"{list(wanted[name])}{_and_more(wrong)}: the two are not from the same checkpoint. Download it again."
        )
    if missing:
        raise WeightsError(f"Tensor {missing[0]} is missing{_and_more(missing)}. Download the checkpoint again.")
    if extra:
        raise WeightsError(
            f"Tensor {extra[0]} is not part of this architecture{_and_more(extra)}: building without it would give "
            "other vectors than the checkpoint's. Merge adapters before the build."
        )


def _refuse_quantized_and_adapters(extra: list[str]) -> None:
    """Name quantized tensors and adapters first: they explain the tensors that are missing because of them."""
    quantized = [name for name in extra if name.endswith(_QUANTIZED) or ".quant_state." in name]
    if quantized:
        raise WeightsError(
            f"Tensor {quantized[0]}{_and_more(quantized)} belongs to a quantized checkpoint: build from the original "
            "16- or 32-bit one; bei quantizes itself (--precision int8)."
        )
    adapters = [name for name in extra if any(part in name for part in _ADAPTER)]
    if adapters:
        raise WeightsError(
            f"Tensor {adapters[0]}{_and_more(adapters)} belongs to an adapter. Merge adapters before the build "
            "(peft: merge_and_unload, then save_pretrained)."
        )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
