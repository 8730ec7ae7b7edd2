"""Linear layers in FP8: inputs and matrices are numbers of float8_e4m3fn (arXiv:2209.05433), their product is 16 bits.

By ``Quantization`` a layer has one scale for its input, and one for each row of its matrix. A value is multiplied by
the reciprocal of its scale, not divided: PyTorch, Triton and Inductor all round a product of two numbers alike, and a
quotient each in its own way. On the CPU sums are at least FP32; on GPUs they are those of ``use_fast_accum``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from bei_build.spec.dtypes import FloatArray
from bei_build.spec.quantization import LARGEST, LEAST_OF_A_ROW, LayerQuantization
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import Linear, TensorOptions

FP8 = torch.float8_e4m3fn
Product: TypeAlias = Literal["tensorwise", "rowwise", "grouped", "plain"]

_LARGEST = LARGEST["fp8"]
_SIZE_STEP = 16  # for both sides of a matrix, in torch._scaled_mm
_PRODUCT_TYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ProductChoice:
    """The method for a layer's product, and the reasons against a faster one; empty for the fastest."""

    product: Product
    reasons: tuple[str, ...] = ()


def choose_product(
    in_features: int, out_features: int, device: torch.device, dtype: torch.dtype, *, has_one_scale: bool
) -> ProductChoice:
    """The fastest possible method for a product.

    ``tensorwise``: ``torch._scaled_mm`` with one scale per side; ``rowwise``: with one per row of the matrix.
    ``plain``: the numbers as FP32, which runs anywhere and is slow. (``grouped``, for experts: ``fp8_experts``.)
    """
    against = {
        f"FP8 products need CUDA, and the device is {device.type}": device.type != "cuda",
        f"FP8 products give bfloat16 or float16, and the model computes in {dtype}": dtype not in _PRODUCT_TYPES,
        f"a matrix of {out_features} x {in_features}, no multiples of {_SIZE_STEP}": bool(
            in_features % _SIZE_STEP or out_features % _SIZE_STEP
        ),
    }
    reasons = tuple(reason for reason, is_so in against.items() if is_so)
    if reasons:
        return ProductChoice("plain", reasons)
    if has_one_scale:
        return ProductChoice("tensorwise")
    return ProductChoice("rowwise", ("rows of the matrix have scales of their own",))


class Rounded(NamedTuple):
    """``codes`` float8_e4m3fn [T, width]; ``ones`` float32 [T, 1], in place of row scales, which are part of the
    matrix's scales."""

    codes: Tensor
    ones: Tensor


LinearInput: TypeAlias = "Tensor | Rounded"


class Rounding(nn.Module):
    """Rounding to FP8 for the linear layers that read the values; too large ones become the largest, NaN stays.

    ``inverse`` float32 [1, 1], or [1, width] where channels are smoothed: the factor of values. Compare roundings by
    ``identity``: while a module is exported, each access to a module that has several owners gives another object.
    """

    reads = ("token_ones",)

    def __init__(self, layer: LayerQuantization, options: TensorOptions) -> None:
        super().__init__()
        self.identity = object()
        self._fusions = options.fusions
        factors = np.array(layer.smoothing or (1.0,), np.float64)
        # Of two dimensions: Inductor makes constants of short vectors, and fills them in again in each step.
        inverse = torch.from_numpy((_LARGEST / (layer.input_amax * factors)).astype(np.float32)[None])
        self.inverse: Tensor
        self.register_buffer("inverse", inverse.to(options.device), persistent=False)

    def forward(self, value: Tensor) -> Tensor:
        """``value`` [T, width] as float8_e4m3fn."""
        if self._fusions.has("activation"):
            from bei_build.torch_graph.fused.activate import activate  # Triton is not always installed

            codes: Tensor = activate(value, None, self.inverse, "identity")
            return codes
        return to_fp8(value, self.inverse)


def to_fp8(value: Tensor, inverse: Tensor) -> Tensor:
    """``value`` times the broadcast float32 ``inverse``, as numbers of FP8."""
    return (value.float() * inverse).clamp(-_LARGEST, _LARGEST).to(FP8)


def rounded_matrix(
    matrix: Tensor, layer: LayerQuantization, row_scales: FloatArray | None = None
) -> tuple[Tensor, Tensor]:
    """``matrix`` float32 [out, in] as numbers of FP8, and their scales [out], multiplied by that of the layer's input.

    ``row_scales`` [out]: scales of a matrix that is in FP8 already; None: a scale per row, by its largest value.
    """
    if layer.smoothing is not None:
        matrix = matrix * torch.tensor(layer.smoothing, device=matrix.device)
    if row_scales is None:
        scales = matrix.abs().amax(1).clamp_min(LEAST_OF_A_ROW) / _LARGEST
    else:
        scales = torch.from_numpy(row_scales.copy()).to(matrix.device)
    codes = (matrix / scales[:, None]).clamp(-_LARGEST, _LARGEST).to(FP8)
    return codes, scales * (layer.input_amax / _LARGEST)


def with_ones(codes: Tensor, step: PackedStep | None = None) -> Rounded:
    """``codes`` [T, width] as input of linear layers.

    The ones are those of the ``step``, an input: a compiled graph would fill them in again for each product. None: they
    are made here.
    """
    if step is None:
        return Rounded(codes, torch.ones((codes.shape[0], 1), device=codes.device, dtype=torch.float32))
    return Rounded(codes, step["token_ones"].unsqueeze(1))


def product_of(
    rounded: Rounded, codes: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype, product: Product
) -> Tensor:
    """``rounded`` [T, in] times ``codes`` [out, in] with ``scales`` [1, out], plus ``bias``, in ``dtype``."""
    if product == "plain":  # products of two numbers of FP8 are exact in FP32, and sums are FP32
        total = nn.functional.linear(rounded.codes.float(), codes.float()) * scales
        return (total if bias is None else total + bias.float()).to(dtype)
    is_rowwise = product == "rowwise"
    of_rows, of_columns = (rounded.ones, scales) if is_rowwise else (rounded.ones[:1], scales[:, :1])
    arguments = rounded.codes, codes.t(), of_rows, of_columns
    return torch._scaled_mm(*arguments, bias=bias, out_dtype=dtype, use_fast_accum=True)


def has_one_scale(scales: Tensor) -> bool:
    """True if all ``scales`` [1, out] of a matrix are equal."""
    return bool((scales == scales[0, 0]).all())


class FP8Linear(nn.Module):
    """``value @ weight.T + bias`` in FP8, without values: ``fill`` sets them. Its matrix and scales are not parameters.

    ``row_scales`` [out]: scales of a matrix that is in FP8 already. ``keeps_weight``: keep the unrounded matrix too,
    for ``exact``.
    """

    def __init__(
        self,
        like: Linear,
        rounding: Rounding,
        layer: LayerQuantization,
        row_scales: FloatArray | None = None,
        *,
        keeps_weight: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = like.in_features, like.out_features
        self.bias: nn.Parameter | None = like.bias
        self.rounding = rounding
        self._layer = layer
        self._row_scales = row_scales
        self._dtype = like.weight.dtype
        self.has_one_scale = False
        self._product: Product = "plain"
        device = like.weight.device
        self.codes: Tensor
        self.scales: Tensor
        self.register_buffer("codes", torch.empty(like.weight.shape, dtype=FP8, device=device), persistent=False)
        self.register_buffer("scales", torch.empty((1, self.out_features), device=device), persistent=False)
        self.weight: Tensor | None
        self.register_buffer("weight", like.weight.data if keeps_weight else None, persistent=False)

    @property
    def choice(self) -> ProductChoice:
        """The method for the product, which depends on the values."""
        sizes = self.in_features, self.out_features
        return choose_product(*sizes, self.codes.device, self._dtype, has_one_scale=self.has_one_scale)

    def choose(self, *, has_one_scale: bool) -> None:
        """Choose the method for a matrix whose rows have the same scale, or not."""
        self.has_one_scale = has_one_scale
        self._product = self.choice.product

    def fill(self, matrix: Tensor) -> None:
        """Round ``matrix`` float32 [out, in], with a scale per row."""
        if self.weight is not None:
            self.weight.copy_(matrix)
        codes, scales = rounded_matrix(matrix, self._layer, self._row_scales)
        self.codes.copy_(codes)
        self.scales.copy_(scales)
        self.choose(has_one_scale=has_one_scale(self.scales))

    def forward(self, value: LinearInput) -> Tensor:
        """Product [T, out] with ``value`` [T, in], which is rounded here unless it is already."""
        rounded = value if isinstance(value, Rounded) else with_ones(self.rounding(value))
        return product_of(rounded, self.codes, self.scales, self.bias, self._dtype, self._product)

    def exact(self, value: Tensor) -> Tensor:
        """The product with the matrix before rounding. Only with ``keeps_weight``."""
        assert self.weight is not None
        return nn.functional.linear(value, self.weight, self.bias)

    def plain(self, rounded: Rounded) -> Tensor:
        """The slow twin of the fast product."""
        return product_of(rounded, self.codes, self.scales, self.bias, self._dtype, "plain")

    @property
    def stored_shape(self) -> torch.Size:
        """Shape of the weight that ``fill`` takes."""
        return self.codes.shape

    @staticmethod
    def can_join(parts: Sequence[nn.Module]) -> bool:
        """True if all ``parts`` are in FP8 and read one rounded input."""
        return rounding_of(*parts) is not None

    @classmethod
    def joined(cls, parts: Sequence[FP8Linear]) -> JoinedFP8Linear:
        """``parts`` as one layer."""
        return JoinedFP8Linear(parts)


class JoinedFP8Linear(FP8Linear):
    """Layers with one rounded input as one product; a part without a bias has zeros in the joined one."""

    def __init__(self, parts: Sequence[FP8Linear]) -> None:
        nn.Module.__init__(self)
        first = parts[0]
        self.sizes = [part.out_features for part in parts]
        self.in_features, self.out_features = first.in_features, sum(self.sizes)
        self.rounding, self._dtype, self.weight = first.rounding, first._dtype, None
        self.register_buffer("codes", torch.cat([part.codes for part in parts]), persistent=False)
        self.register_buffer("scales", torch.cat([part.scales for part in parts], 1), persistent=False)
        self.bias = None
        if any(part.bias is not None for part in parts):
            missing = [first.scales.new_zeros(size, dtype=self._dtype) for size in self.sizes]
            biases = [zeros if part.bias is None else part.bias for part, zeros in zip(parts, missing, strict=True)]
            self.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
        self.choose(has_one_scale=has_one_scale(self.scales))


def round_once(value: LinearInput, rounding: Rounding | None, step: PackedStep) -> LinearInput:
    """``value`` rounded for layers with ``rounding``, unless it is already."""
    return value if rounding is None or isinstance(value, Rounded) else with_ones(rounding(value), step)


def rounding_of(*layers: nn.Module) -> Rounding | None:
    """The common rounding of the inputs of ``layers``; None if one of them does not round, or differently."""
    first = layers[0]
    if not isinstance(first, FP8Linear):
        return None
    rounding, others = first.rounding, layers[1:]
    is_shared = all(isinstance(it, FP8Linear) and it.rounding.identity is rounding.identity for it in others)
    return rounding if is_shared else None


def common_rounding(module: nn.Module, names: tuple[str, ...]) -> Rounding | None:
    """``rounding_of`` the linear layers ``names`` of ``module``, joined or not."""
    joined = getattr(module, "_".join(names), None)
    return rounding_of(*((joined,) if joined is not None else (getattr(module, name) for name in names)))
