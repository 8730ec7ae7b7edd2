"""The activation of an MLP, gated or plain, and its result rounded to FP8; with "identity", the rounding alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

# Names of ``bei_build.spec.parts.Activation``.
SUPPORTED = frozenset(
    {
        *("gelu", "gelu_tanh", "gelu_10", "quick_gelu", "relu", "relu2", "relu6", "leaky_relu", "elu", "silu"),
        *("hardswish", "mish", "tanh", "sigmoid", "identity"),
    }
)
_COLUMNS = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _activate_kernel(  # type: ignore[no-untyped-def]
    value,  # [rows, width]
    other,  # [rows, width] or None
    inverse,  # 1 or ``width`` numbers, or None
    output,  # [rows, width]
    value_stride,
    other_stride,
    width,
    ACTIVATION: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_there = column < width
    x = tl.load(value + row * value_stride + column, mask=is_there, other=0.0).to(tl.float32)
    # tanh(x) as 2 sigmoid(2 x) - 1: Triton's own is the GPU library's.
    if ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "gelu_10":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
        x = tl.clamp(x, -10.0, 10.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "quick_gelu":
        x = x * tl.sigmoid(1.702 * x)
    elif ACTIVATION == "relu":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "relu2":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        x = x * x
    elif ACTIVATION == "relu6":
        x = tl.clamp(x, 0.0, 6.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "leaky_relu":
        x = tl.where(x > 0.0, x, 0.01 * x)
    elif ACTIVATION == "elu":
        x = tl.where(x > 0.0, x, tl.exp(x) - 1.0)
    elif ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "hardswish":
        x = x * tl.clamp(x + 3.0, 0.0, 6.0, propagate_nan=tl.PropagateNan.ALL) / 6.0
    elif ACTIVATION == "mish":
        # tanh(log(1 + e)) is n / (n + 2) with n = e (e + 2); from 20 on it is 1.
        power = tl.exp(tl.minimum(x, 20.0))
        power = power * (power + 2.0)
        x = x * (power / (power + 2.0))
    elif ACTIVATION == "tanh":
        x = 2.0 * tl.sigmoid(2.0 * x) - 1.0
    elif ACTIVATION == "sigmoid":
        x = tl.sigmoid(x)
    if other is not None:
        x *= tl.load(other + row * other_stride + column, mask=is_there, other=0.0).to(tl.float32)
    if inverse is not None:
        if BY_CHANNEL:
            x *= tl.load(inverse + column, mask=is_there, other=0.0)
        else:
            x *= tl.load(inverse)
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(output + row * width + column, x.to(output.dtype.element_ty), mask=is_there)


@triton_op("bei::activate", mutates_args={})
def activate(value: Tensor, other: Tensor | None, inverse: Tensor | None, activation: str) -> Tensor:
    """``activation`` of ``value`` [T, width], times ``other`` [T, width] if it is given.

    The result has the type of ``value``, or, with ``inverse``, 1 or ``width`` float32, is multiplied by it and rounded
    to FP8 (float8_e4m3fn). Rows may have any stride, like parts of one product; ``activation`` is one of ``SUPPORTED``.
    """
    assert activation in SUPPORTED, activation
    value, gated = (_rows(value), None if other is None else _rows(other))
    num_rows, width = value.shape
    dtype = value.dtype if inverse is None else torch.float8_e4m3fn
    output = torch.empty((num_rows, width), device=value.device, dtype=dtype)
    wrap_triton(_activate_kernel)[(num_rows, triton.cdiv(width, _COLUMNS))](
        value,
        gated,
        inverse,
        output,
        value.stride(0),
        0 if gated is None else gated.stride(0),
        width,
        ACTIVATION=activation,
        BY_CHANNEL=inverse is not None and inverse.numel() > 1,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )
    return output


def _rows(value: Tensor) -> Tensor:
    return value if value.stride(1) == 1 else value.contiguous()
