"""Pooling of packed tokens, and normalization of the vectors: every row is read once, sums are FP32.

The order of summation depends only on a sequence's own length: equal texts have equal vectors in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

_COLUMNS = 128
_ELEMENTS = 4096  # elements of a program at a time


@triton.jit  # type: ignore[untyped-decorator]
def _pool_kernel(  # type: ignore[no-untyped-def]
    hidden,  # [T, width]
    starts,  # [B + 1], or in mode "row" the tokens [B]
    weights,  # [T], or None where they are not read
    output,  # [B, width]
    hidden_stride,
    width,
    LEAST: tl.constexpr,
    MODE: tl.constexpr,  # "row", "max", "sum", "mean", "mean_sqrt_len"
    NORMALIZES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < width
    first = tl.load(starts + sequence).to(tl.int64)
    if MODE == "row":
        result = tl.load(hidden + first * hidden_stride + column, mask=is_column, other=0.0).to(tl.float32)
    else:
        length = tl.load(starts + sequence + 1).to(tl.int64) - first
        count = tl.zeros([ROWS], tl.float32)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        if MODE == "max":
            total = tl.full([ROWS, COLUMNS], float("-inf"), tl.float32)
        for start in range(0, length, ROWS):
            token = start + tl.arange(0, ROWS)
            is_token = token < length
            is_there = is_token[:, None] & is_column[None, :]
            at = (first + token)[:, None] * hidden_stride + column[None, :]
            if MODE == "max":
                rows = tl.load(hidden + at, mask=is_there, other=float("-inf")).to(tl.float32)
                total = tl.maximum(total, rows, propagate_nan=tl.PropagateNan.ALL)
            else:
                rows = tl.load(hidden + at, mask=is_there, other=0.0).to(tl.float32)
                weight = tl.load(weights + first + token, mask=is_token, other=0.0)
                total += rows * weight[:, None]
                count += weight
        if MODE == "max":
            is_broken = tl.sum((total != total).to(tl.int32), 0) > 0  # tl.max skips NaN
            result = tl.where(is_broken, float("nan"), tl.max(total, 0))
        else:
            result = tl.sum(total, 0)
            if MODE == "mean":
                result = result / tl.maximum(tl.sum(count, 0), LEAST)
            if MODE == "mean_sqrt_len":
                result = result / tl.sqrt(tl.maximum(tl.sum(count, 0), LEAST))
    if NORMALIZES:
        of_columns = tl.where(is_column, result, 0.0)
        result = result / tl.maximum(tl.sqrt(tl.sum(of_columns * of_columns, 0)), 1e-12)
    tl.store(output + sequence * width + column, result, mask=is_column)


@triton_op("bei::pool", mutates_args={})
def pool(hidden: Tensor, starts: Tensor, weights: Tensor | None, mode: str, least: float, normalizes: bool) -> Tensor:
    """One vector per sequence from the states ``hidden`` [T, width], float32 [B, width].

    ``mode``: the "max", the "sum" of rows times ``weights``, float32 [T], or that divided by the sum of the weights
    ("mean") or its square root ("mean_sqrt_len"), which is at least ``least``; ``starts`` is then INT32 [B + 1]. In
    mode "row", ``starts`` [B] are the tokens whose rows are the vectors. ``normalizes``: to length 1.
    """
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    width = hidden.shape[1]
    num_sequences = starts.shape[0] - int(mode != "row")  # PyTorch 2.11 subtracts no bool from a size
    output = torch.empty((num_sequences, width), device=hidden.device, dtype=torch.float32)
    columns = triton.next_power_of_2(width) if normalizes else _COLUMNS
    rows = max(1, _ELEMENTS // columns)
    wrap_triton(_pool_kernel)[(num_sequences, triton.cdiv(width, columns))](
        hidden,
        starts,
        weights,
        output,
        hidden.stride(0),
        width,
        LEAST=least,
        MODE=mode,
        NORMALIZES=normalizes,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4 if columns * rows <= 4096 else 8,
    )
    return output
