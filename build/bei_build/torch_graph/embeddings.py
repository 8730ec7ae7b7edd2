"""Embeddings before the layers, and shifted ids for a decoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from bei.engine.packing import FEATURE_SLOTS, image_features, pixel_levels, position_ids_but
from bei_build.spec.parts import DecoderSpec, EmbeddingsSpec, MaskDropoutSpec
from bei_build.spec.patches import PatchesSpec
from bei_build.spec.position_tables import axial_rows, position_rows
from bei_build.torch_graph.adapters import AdaptedTable
from bei_build.torch_graph.norms import Norm
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import Linear, Table, TensorOptions


class Patches(nn.Module):
    """Rows of an image's tokens: products of their normalized pixels, and learned ones of those before them."""

    def __init__(self, spec: PatchesSpec, width: int, options: TensorOptions) -> None:
        super().__init__()
        self._spec = spec
        shape = (spec.width,) if spec.flat else (3, spec.size, spec.size)
        self.weight = options.empty(width, *shape)
        self.bias = options.empty(width) if spec.bias else None
        self.class_row = options.empty(width) if spec.class_token else None
        self.registers = options.empty(spec.registers, width) if spec.registers else None
        self.reads = (pixel_levels(spec.width), *(("position_ids",) if spec.num_leading else ()))

    def forward(self, step: PackedStep) -> Tensor:
        """[T, width]."""
        spec = self._spec
        levels = step[pixel_levels(spec.width)].view(-1, spec.size**2, 3)
        # Channel by channel: AOTInductor takes no tensors that forward makes of Python's numbers.
        channels = zip(levels.unbind(2), spec.scales, spec.shifts, strict=True)
        pixels = torch.stack([level * scale + shift for level, scale, shift in channels], 2)
        pixels = pixels.flatten(1).to(self.weight.dtype)
        matrix: Tensor = self.weight
        if spec.flat != "pixels":
            matrix = matrix.view(-1, 3, spec.size, spec.size).permute(0, 2, 3, 1).flatten(1)
        product = functional.linear(pixels, matrix, self.bias)
        return self._behind_leading(product, step["position_ids"]) if spec.num_leading else product

    def _behind_leading(self, patches: Tensor, position_ids: Tensor) -> Tensor:
        rows = [] if self.class_row is None else [self.class_row.unsqueeze(0)]
        if self.registers is not None:
            rows.append(self.registers)
        count = self._spec.num_leading
        leading = torch.cat(rows)
        if count > 1:
            leading = leading.index_select(0, position_ids.clamp(max=count - 1))
        return torch.where((position_ids < count).unsqueeze(1), leading, patches)


class AxialTables(nn.Module):
    """Positions of patches: rows of a table of columns and of one of rows, added."""

    def __init__(self, num_rows: int, width: int, options: TensorOptions) -> None:
        super().__init__()
        self.weight = options.empty(2, num_rows, width)

    def forward(self, columns: Tensor, rows: Tensor) -> Tensor:
        """[T, width]."""
        return functional.embedding(columns, self.weight[0]) + functional.embedding(rows, self.weight[1])


class Embeddings(nn.Module):
    """Sum of word, position and type rows, then a norm and a projection.

    ``with_words``: this module owns the word table; a decoder gets the encoder's as an argument.
    """

    def __init__(
        self, spec: EmbeddingsSpec, hidden_size: int, options: TensorOptions, *, with_words: bool = True
    ) -> None:
        super().__init__()
        self._spec = spec
        self._shares = spec.patches.shares if spec.patches else None
        width = spec.width or hidden_size
        self.patch = Patches(spec.patches, width, options) if spec.patches else None
        self.word = Table(spec.vocab_size, width, options) if with_words and not spec.patches else None
        self._axes = axial_rows(spec.patches) if spec.patches and spec.patches.axial else ()
        if self._shares:
            self.position = Table(spec.max_positions, width, options.fp32)
        elif self._axes:
            self.axial_position = AxialTables(spec.max_positions, width, options)
        elif spec.max_positions:
            self.position = Table(spec.max_positions, width, options)
        if spec.type_vocab_size:
            self.types = Table(spec.type_vocab_size, width, options)
        if spec.task_vocab_size:
            self.task = Table(spec.task_vocab_size, width, options)
        self._width, self._features = width, image_features(width * (1 + spec.image_layers))
        self.norm = Norm(spec.norm, width, options) if spec.norm else None
        self.projection = Linear(width, hidden_size, True, options) if spec.width else None
        self.reads = tuple(
            name
            for name, is_read in {
                **dict.fromkeys(self._axes, True),
                position_rows(spec): bool(spec.max_positions) and not self._shares and not self._axes,
                self._shares.name if self._shares else "": self._shares is not None,
                "token_type_ids": spec.type_vocab_size > 1,
                "cu_query_lens": spec.mask_dropout is not None,
                "sequence_ids": spec.mask_dropout is not None,
                self._features: spec.reads_images,
                FEATURE_SLOTS: spec.reads_images,
            }.items()
            if is_read
        )

    def image_part(self, part: int, step: PackedStep) -> Tensor:
        """One part of the rows of an image tower that stand for tokens, float32 [T, width]; zeros of other tokens."""
        columns = slice(part * self._width, (part + 1) * self._width)
        return step[self._features][:, columns].index_select(0, step[FEATURE_SLOTS])

    def forward(self, input_ids: Tensor, words: Table | None, step: PackedStep) -> Tensor:
        """States of the tokens ``input_ids`` [T], or of an image's, [T, hidden]."""
        spec = self._spec
        if self.patch:
            total = self.patch(step)
        else:
            assert words is not None
            total = words(input_ids)
        if spec.scale != 1.0:
            total = total * spec.scale
        if spec.reads_images:
            total = torch.where((step[FEATURE_SLOTS] > 0).unsqueeze(1), self.image_part(0, step).to(total.dtype), total)
        if spec.mask_dropout:
            total = total * _factors(input_ids, spec.mask_dropout, step).unsqueeze(1).to(total.dtype)
        if self._shares:
            resized = step[self._shares.name] @ self.position.weight
            total = total + resized.to(total.dtype)
        elif self._axes:
            total = total + self.axial_position(*(step[axis] for axis in self._axes))
        elif spec.max_positions:
            total = total + self.position(step[position_rows(spec)])
        if spec.type_vocab_size == 1:
            adapted = isinstance(self.types, AdaptedTable)
            total = total + (self.types(torch.zeros_like(input_ids)) if adapted else self.types.weight)
        elif spec.type_vocab_size:
            total = total + self.types(step["token_type_ids"])
        if spec.task_vocab_size:
            total = total + self.task.weight[:1]
        if self.norm:
            total = self.norm(total)
        return self.projection(total) if self.projection else total  # type: ignore[no-any-return]


def _factors(input_ids: Tensor, spec: MaskDropoutSpec, step: PackedStep) -> Tensor:
    """Factors of the tokens' rows, float32 [T]."""
    others = (input_ids != spec.token_id).float()
    ratio = step.of_sequences(torch.ones_like(others), "sum") / step.of_sequences(others, "sum")
    return others * (ratio * (1.0 - spec.share)).index_select(0, step["sequence_ids"])


class ShiftedIds(nn.Module):
    """Ids for a decoder of ``spec``: each token's is that of the token before it."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self._start_id = spec.start_id
        self.reads: tuple[str, ...] = ("position_ids",)
        if spec.start_id is None:
            assert spec.padding_id is not None
            self._counted = position_ids_but(spec.padding_id)
            self.reads += ("cu_query_lens", "first_index", "sequence_ids", self._counted)

    def forward(self, input_ids: Tensor, step: PackedStep) -> Tensor:
        """Shifted ids, INT32 [T]."""
        before = functional.pad(input_ids[:-1], (1, 0))
        if self._start_id is None:
            counts = step.index_of_sequences(step[self._counted], "max")
            index = step["first_index"] + (counts - 1).clamp(min=0)
            start = input_ids.index_select(0, index).index_select(0, step["sequence_ids"])
        else:
            start = torch.full_like(before, self._start_id)
        return torch.where(step["position_ids"] == 0, start, before)
