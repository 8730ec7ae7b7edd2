"""One linear layer of each expert in FP8, for all experts or some, while the others keep their precision.

An expert's input has its own scale, and so has each row of its matrix. ``grouped``: tokens sorted by expert, one
product for all (``torch._scaled_grouped_mm``). Otherwise each expert multiplies all tokens, by the method for a linear
layer of its size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bei_build.spec.quantization import LayerQuantization
from bei_build.torch_graph.fp8 import (
    FP8,
    LinearInput,
    Rounded,
    Rounding,
    choose_product,
    product_of,
    rounded_matrix,
    to_fp8,
    with_ones,
)
from bei_build.torch_graph.parameters import ExpertMatrices

_GROUPED_ON = (9, 0)  # compute capability for which torch._scaled_grouped_mm has FP8 kernels with row scales


class FP8Experts(nn.Module):
    """FP8 replacement of ``like``, without values: ``fill`` sets them. Matrices and scales are not parameters.

    ``layers`` and ``roundings``: one for each expert; None: it keeps its precision. ``each``: the method for a single
    expert's product; ``against_groups``: reasons against one product for all, empty where there are none.
    """

    def __init__(
        self,
        like: ExpertMatrices,
        layers: Sequence[LayerQuantization | None],
        roundings: Sequence[Rounding | None],
    ) -> None:
        super().__init__()
        self.stored_shape = like.weight.shape
        self._is_transposed = like.is_transposed
        self._layers = tuple(layers)
        self._dtype, device = like.weight.dtype, like.weight.device
        count, in_features, out_features = like.factors.shape
        in_fp8 = [index for index, layer in enumerate(layers) if layer is not None]
        left_high = [index for index, layer in enumerate(layers) if layer is None]
        self._places = {index: place for group in (in_fp8, left_high) for place, index in enumerate(group)}
        shape = out_features, in_features
        self.codes: Tensor
        self.scales: Tensor
        self.high: Tensor
        self.inverse: Tensor
        codes = torch.empty((len(in_fp8), *shape), dtype=FP8, device=device)
        self.register_buffer("codes", codes, persistent=False)
        scales = torch.empty((len(in_fp8), out_features), device=device)
        self.register_buffer("scales", scales, persistent=False)
        high = torch.empty((len(left_high), *shape), dtype=self._dtype, device=device)
        self.register_buffer("high", high, persistent=False)
        present = [rounding for rounding in roundings if rounding is not None]
        different = list(dict.fromkeys(present))
        self.roundings = nn.ModuleList(different)
        self._rounding_at = [None if rounding is None else different.index(rounding) for rounding in roundings]
        width = max(rounding.inverse.numel() for rounding in present)
        inverse = torch.cat([rounding.inverse.expand(1, width) for rounding in present])
        self.register_buffer("inverse", inverse, persistent=False)
        self.each = choose_product(in_features, out_features, device, self._dtype, has_one_scale=False)
        self.against_groups = self._against_groups(device, len(left_high), count)

    def _against_groups(self, device: torch.device, num_high: int, count: int) -> tuple[str, ...]:
        if self.each.product == "plain":
            return self.each.reasons
        capability = torch.cuda.get_device_capability(device)
        against = {
            f"{num_high} of {count} experts are not quantized": num_high > 0,
            f"one product for all experts gives bfloat16, and the model computes in {self._dtype}": (
                self._dtype is not torch.bfloat16
            ),
            "one FP8 product for all experts needs compute capability 9.0, and this GPU has "
            + ".".join(map(str, capability)): capability != _GROUPED_ON,
        }
        return tuple(reason for reason, is_so in against.items() if is_so)

    def fill(self, matrices: Tensor) -> None:
        """Round the ``matrices`` of all experts, float32, stacked as stored."""
        for index, matrix in enumerate(torch.unflatten(matrices, 0, (len(self._layers), -1))):
            layer, place = self._layers[index], self._places[index]
            matrix = matrix.T if self._is_transposed else matrix
            if layer is None:
                self.high[place].copy_(matrix)
                continue
            codes, scales = rounded_matrix(matrix, layer)
            self.codes[place].copy_(codes)
            self.scales[place].copy_(scales)

    def rounding(self, index: int) -> Rounding | None:
        """Rounding of the input of the expert at ``index``; None: it is not rounded."""
        at = self._rounding_at[index]
        if at is None:
            return None
        found = self.roundings[at]
        assert isinstance(found, Rounding)
        return found

    def product(self, index: int, value: LinearInput) -> Tensor:
        """Product [T, out] of ``value`` [T, in] with the expert at ``index``."""
        place, rounding = self._places[index], self.rounding(index)
        if rounding is None:
            assert isinstance(value, Tensor)
            return nn.functional.linear(value, self.high[place])
        rounded = value if isinstance(value, Rounded) else with_ones(rounding(value))
        scales = self.scales[place : place + 1]
        return product_of(rounded, self.codes[place], scales, None, self._dtype, self.each.product)

    def grouped(self, rows: Tensor, owners: Tensor, ends: Tensor) -> Tensor:
        """Product [n, out] of ``rows`` [n, in], sorted by their experts ``owners`` [n]; ``ends`` int32 [count] are the
        ends of the experts' groups."""
        codes = to_fp8(rows, self.inverse[owners])
        ones = torch.ones(rows.shape[0], device=rows.device)
        arguments = codes, self.codes.transpose(1, 2), ones, self.scales
        return torch._scaled_grouped_mm(*arguments, offs=ends, out_dtype=self._dtype, use_fast_accum=True)
