"""Queries and keys of packed tokens: the norm of each head, if the model has one, and the rotation, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

_ELEMENTS = 1024  # elements of a program


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_kernel(  # type: ignore[no-untyped-def]
    query,  # [T, query_heads, head_dim]
    key,  # [T, key_heads, head_dim]
    query_weight,  # [head_dim] or None, as the next three
    query_bias,  # [head_dim]
    key_weight,  # [head_dim]
    key_bias,  # [head_dim]
    cos,  # [positions, rotary_dim / 2]
    sin,  # [positions, rotary_dim / 2]
    rows,  # [T], rows of cos and sin
    turned_query,  # [T, query_heads, head_dim]
    turned_key,  # [T, key_heads, head_dim]
    query_stride,
    key_stride,
    query_heads,
    key_heads,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # half of the rotated components
    IS_INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,  # "", "layer" or "rms"
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,  # HEAD_DIM, rounded up to a power of two
):
    token = tl.program_id(0).to(tl.int64)
    query_blocks = tl.cdiv(query_heads, HEADS)
    is_query = tl.program_id(1) < query_blocks
    block = tl.program_id(1) - tl.where(is_query, 0, query_blocks)
    head = block * HEADS + tl.arange(0, HEADS)
    component = tl.arange(0, WIDTH)
    # The component that each one rotates with, and its side of the pair.
    if IS_INTERLEAVED:
        pair = component // 2
        is_first = component % 2 == 0
        partner = tl.where(is_first, component + 1, component - 1)
    else:
        pair = component % HALF
        is_first = component < HALF
        partner = tl.where(is_first, component + HALF, component - HALF)
    turns = component < 2 * HALF
    partner = tl.where(turns, partner, component)

    if is_query:
        source = query + token * query_stride
        target = turned_query + token * query_heads * HEAD_DIM
    else:
        source = key + token * key_stride
        target = turned_key + token * key_heads * HEAD_DIM
    count = tl.where(is_query, query_heads, key_heads)
    is_component = component < HEAD_DIM
    is_there = (head < count)[:, None] & is_component[None, :]
    first = head[:, None] * HEAD_DIM
    own = tl.load(source + first + component[None, :], mask=is_there, other=0.0).to(tl.float32)
    other = tl.load(source + first + partner[None, :], mask=is_there, other=0.0).to(tl.float32)
    if NORM != "":
        centred = own
        if NORM == "layer":
            mean = (tl.sum(own, 1) / HEAD_DIM)[:, None]
            centred = tl.where(is_there, own - mean, 0.0)
            other -= mean
        scale = tl.rsqrt(tl.sum(centred * centred, 1) / HEAD_DIM + EPS)[:, None]
        own = centred * scale
        other *= scale
        if query_weight is not None:
            weight = tl.where(is_query, query_weight, key_weight)
            own *= (tl.load(weight + component, mask=is_component, other=0.0).to(tl.float32) + OFFSET)[None, :]
            other *= (tl.load(weight + partner, mask=is_component, other=0.0).to(tl.float32) + OFFSET)[None, :]
        if query_bias is not None:
            bias = tl.where(is_query, query_bias, key_bias)
            own += tl.load(bias + component, mask=is_component, other=0.0).to(tl.float32)[None, :]
            other += tl.load(bias + partner, mask=is_component, other=0.0).to(tl.float32)[None, :]
    at = tl.load(rows + token).to(tl.int64) * HALF + pair
    cosine = tl.load(cos + at, mask=turns, other=1.0)[None, :]
    sine = tl.load(sin + at, mask=turns, other=0.0)
    sine = tl.where(is_first, -sine, sine)[None, :]
    turned = own * cosine + other * sine
    tl.store(target + first + component[None, :], turned.to(turned_query.dtype.element_ty), mask=is_there)


@triton_op("bei::rotate", mutates_args={})
def rotate(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: Tensor,
    query_weight: Tensor | None,
    query_bias: Tensor | None,
    key_weight: Tensor | None,
    key_bias: Tensor | None,
    norm: str,
    eps: float,
    offset: float,
    is_interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """``query`` [T, heads, head_dim] and ``key`` [T, key_heads, head_dim], normalized by head and rotated.

    ``norm`` is "layer", "rms", or "" for none; its factor is ``weight + offset`` [head_dim]. ``cos`` and ``sin`` are
    float32 [positions, rotary_dim / 2], with row ``rows[t]`` for token t; halves of the first rotary_dim components
    rotate together or, ``is_interleaved``, neighbours. Heads of a token are contiguous, tokens may have any stride.
    """
    query, key = (part if part.stride()[1:] == (part.shape[2], 1) else part.contiguous() for part in (query, key))
    num_tokens, query_heads, head_dim = query.shape
    key_heads = key.shape[1]
    turned = [torch.empty((num_tokens, it.shape[1], head_dim), device=it.device, dtype=it.dtype) for it in (query, key)]
    width = triton.next_power_of_2(head_dim)
    heads = max(1, _ELEMENTS // width)
    blocks = triton.cdiv(query_heads, heads) + triton.cdiv(key_heads, heads)
    wrap_triton(_rotate_kernel)[(num_tokens, blocks)](
        query,
        key,
        query_weight,
        query_bias,
        key_weight,
        key_bias,
        cos,
        sin,
        rows,
        *turned,
        query.stride(0),
        key.stride(0),
        query_heads,
        key_heads,
        EPS=eps,
        OFFSET=offset,
        HEAD_DIM=head_dim,
        HALF=cos.shape[1],
        IS_INTERLEAVED=is_interleaved,
        NORM=norm,
        HEADS=heads,
        WIDTH=width,
        num_warps=4,
    )
    return turned[0], turned[1]
