"""The residual sum, its norm, and the norm's result rounded to FP8: each row is read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

_ELEMENTS = 1024  # elements of a program with narrow rows: 16 bytes per thread are read at once


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm_kernel(  # type: ignore[no-untyped-def]
    hidden,  # [rows, width]
    added,  # [rows, width] or None, as all that follow
    weight,  # [width]
    bias,  # [width]
    inverse,  # 1 or ``width`` numbers
    total,  # [rows, width]
    normalized,  # [rows, width]
    codes,  # [rows, width]
    num_rows,
    width,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    FACTOR: tl.constexpr,
    IS_RMS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    is_column = column < width
    is_there = (row < num_rows)[:, None] & is_column[None, :]
    at = row.to(tl.int64)[:, None] * width + column[None, :]
    value = tl.load(hidden + at, mask=is_there, other=0.0).to(tl.float32)
    if added is not None:
        value += tl.load(added + at, mask=is_there, other=0.0).to(tl.float32) * FACTOR
    if total is not None:
        tl.store(total + at, value.to(total.dtype.element_ty), mask=is_there)
    if not IS_RMS:
        value = tl.where(is_there, value - (tl.sum(value, 1) / width)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 1) / width + EPS)
    result = value * scale[:, None]
    if weight is not None:
        result *= (tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32) + OFFSET)[None, :]
    if bias is not None:
        result += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if normalized is not None:
        tl.store(normalized + at, result.to(normalized.dtype.element_ty), mask=is_there)
    if codes is not None:
        if BY_CHANNEL:
            result *= tl.load(inverse + column, mask=is_column, other=0.0)[None, :]
        else:
            result *= tl.load(inverse)
        result = tl.clamp(result, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(codes + at, result.to(codes.dtype.element_ty), mask=is_there)


@triton_op("bei::add_norm", mutates_args={})
def add_norm(
    hidden: Tensor,
    added: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    inverse: Tensor | None,
    eps: float,
    offset: float,
    factor: float,
    is_rms: bool,
    wants_total: bool,
    wants_normalized: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum ``hidden + added * factor`` [T, width], its norm, and that rounded to FP8 (float8_e4m3fn).

    The norm is LayerNorm or, ``is_rms``, RMSNorm, times ``weight + offset``, plus ``bias``. Results that are not
    requested are empty; with ``inverse``, 1 or ``width`` float32, the norm is multiplied by it and rounded to FP8.
    """
    hidden = hidden.contiguous()
    num_rows, width = hidden.shape
    total = torch.empty_like(hidden) if wants_total else hidden.new_empty(0)
    normalized = torch.empty_like(hidden) if wants_normalized else hidden.new_empty(0)
    shape = (num_rows, width) if inverse is not None else (0,)
    codes = hidden.new_empty(shape, dtype=torch.float8_e4m3fn)
    columns = triton.next_power_of_2(width)
    rows = max(1, _ELEMENTS // columns)
    wrap_triton(_add_norm_kernel)[((num_rows + rows - 1) // rows,)](
        hidden,
        None if added is None else added.contiguous(),
        weight,
        bias,
        inverse,
        total if wants_total else None,
        normalized if wants_normalized else None,
        codes if inverse is not None else None,
        num_rows,
        width,
        EPS=eps,
        OFFSET=offset,
        FACTOR=factor,
        IS_RMS=is_rms,
        BY_CHANNEL=inverse is not None and inverse.numel() > 1,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=min(16, max(4, columns // 512)),
    )
    return total, normalized, codes
