"""Attention on packed tokens as a Triton kernel: windows, soft caps, biases by distance, DeBERTa's scores, ALiBi; and
the rounding of its result to FP8.

One program computes a block of a sequence's queries in one head, by an online softmax (arXiv:2205.14135) over the
visible keys: blocks beyond a window, or after a causal query, are not read. Scores and sums are FP32. Floats are
constants: as arguments they would be FP64 in a package.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from bei_build.spec.parts import AttentionSpec
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.positions import ScoreTerms

_NARROWEST = 16  # the minimum of tl.dot


@triton.jit  # type: ignore[untyped-decorator]
def _ragged_attention_kernel(  # type: ignore[no-untyped-def]
    query,
    key,
    value,
    output,
    starts,  # [B + 1]
    key_lens,  # [B] or None, as all that follow
    slopes,  # [heads]
    bias,  # [2 * bias_reach + 1, heads]
    by_query,  # [T, heads, table]
    by_key,  # [T, heads, table]
    rows,  # [2 * rows_reach + 1]
    inverse,  # 1 or heads * HEAD_DIM numbers
    query_stride,
    key_stride,
    value_stride,
    output_stride,
    bias_reach,
    rows_reach,
    table,
    num_heads,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,  # 0: none
    GROUP: tl.constexpr,  # query heads that share a key head
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # HEAD_DIM, rounded up to a power of two
    WINDOW: tl.constexpr,  # -1: none
    CAUSAL: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    sequence, head = tl.program_id(1), tl.program_id(2)
    first = tl.load(starts + sequence)
    length = tl.load(starts + sequence + 1) - first
    begin = tl.program_id(0) * BLOCK_QUERIES
    if begin >= length:
        return
    num_keys = length
    if key_lens is not None:
        num_keys = tl.load(key_lens + sequence)

    first = first.to(tl.int64)
    at_query = begin + tl.arange(0, BLOCK_QUERIES)
    component = tl.arange(0, WIDTH)
    is_query = at_query < length
    is_component = component < HEAD_DIM
    query_token = first + at_query
    query_at = query_token[:, None] * query_stride + head * HEAD_DIM + component[None, :]
    queries = tl.load(query + query_at, mask=is_query[:, None] & is_component[None, :], other=0.0)

    most = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    context = tl.zeros([BLOCK_QUERIES, WIDTH], tl.float32)
    low = 0
    high = num_keys
    if WINDOW >= 0:
        low = tl.maximum(begin - WINDOW, 0) // BLOCK_KEYS * BLOCK_KEYS
        high = tl.minimum(high, begin + BLOCK_QUERIES + WINDOW)
    if CAUSAL:
        high = tl.minimum(high, begin + BLOCK_QUERIES)
    for start in range(low, high, BLOCK_KEYS):
        at_key = start + tl.arange(0, BLOCK_KEYS)
        is_key = at_key < num_keys
        key_token = first + at_key
        key_at = key_token[None, :] * key_stride + (head // GROUP) * HEAD_DIM + component[:, None]
        keys = tl.load(key + key_at, mask=is_key[None, :] & is_component[:, None], other=0.0)
        scores = tl.dot(queries, keys, input_precision="ieee")
        away = at_key[None, :] - at_query[:, None]
        visible = is_query[:, None] & is_key[None, :]
        if rows is not None:
            row = tl.load(rows + tl.minimum(tl.maximum(rows_reach - away, 0), 2 * rows_reach))
            if by_query is not None:
                query_row = (query_token[:, None] * num_heads + head) * table + row
                scores += tl.load(by_query + query_row, mask=visible, other=0.0).to(tl.float32)
            if by_key is not None:
                key_row = (key_token[None, :] * num_heads + head) * table + row
                scores += tl.load(by_key + key_row, mask=visible, other=0.0).to(tl.float32)
        scores = scores * SCALE
        if SOFTCAP > 0.0:
            # tanh(x) as 2 sigmoid(2 x) - 1: Triton's own is the GPU library's.
            scores = SOFTCAP * (2.0 * tl.sigmoid(2.0 * scores / SOFTCAP) - 1.0)
        if bias is not None:
            bias_row = tl.minimum(tl.maximum(away + bias_reach, 0), 2 * bias_reach)
            scores += tl.load(bias + bias_row * num_heads + head)
        if slopes is not None:
            scores -= tl.load(slopes + head) * tl.abs(away).to(tl.float32)
        if WINDOW >= 0:
            visible = visible & (tl.abs(away) <= WINDOW)
        if CAUSAL:
            visible = visible & (away <= 0)
        scores = tl.where(visible, scores, float("-inf"))

        new_most = tl.maximum(most, tl.max(scores, 1))
        # A query without a visible key so far has no largest score: nothing is subtracted from -inf.
        base = tl.where(new_most == float("-inf"), 0.0, new_most)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(most - base)
        total = total * shrink + tl.sum(weights, 1)
        value_at = key_token[:, None] * value_stride + (head // GROUP) * HEAD_DIM + component[None, :]
        values = tl.load(value + value_at, mask=is_key[:, None] & is_component[None, :], other=0.0)
        product = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        context = context * shrink[:, None] + product
        most = new_most

    context = context / tl.where(total == 0.0, 1.0, total)[:, None]
    if inverse is not None:
        if BY_CHANNEL:
            context *= tl.load(inverse + head * HEAD_DIM + component, mask=is_component, other=0.0)[None, :]
        else:
            context *= tl.load(inverse)
        context = tl.clamp(context, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    output_at = query_token[:, None] * output_stride + head * HEAD_DIM + component[None, :]
    tl.store(output + output_at, context.to(output.dtype.element_ty), mask=is_query[:, None] & is_component[None, :])


@triton_op("bei::ragged_attention", mutates_args={})
def _ragged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    key_lens: Tensor | None,
    slopes: Tensor | None,
    bias: Tensor | None,
    by_query: Tensor | None,
    by_key: Tensor | None,
    rows: Tensor | None,
    inverse: Tensor | None,
    longest: int,
    scale: float,
    softcap: float,
    window: int,
    is_causal: bool,
) -> Tensor:
    """The operator that ``torch.export`` records. ``softcap`` 0 and ``window`` -1: none."""
    num_heads, head_dim = query.shape[1:]
    dtype = query.dtype if inverse is None else torch.float8_e4m3fn
    output = torch.empty(query.shape, device=query.device, dtype=dtype)
    width = max(_NARROWEST, triton.next_power_of_2(head_dim))
    # With wide heads, three stages of keys and values exceed the shared memory of compute capability 8.9.
    block_queries, block_keys, num_stages = (64, 64, 3) if width <= 128 else (64, 32, 2)
    products = by_query if by_query is not None else by_key
    grid = ((longest + block_queries - 1) // block_queries, starts.shape[0] - 1, num_heads)
    wrap_triton(_ragged_attention_kernel)[grid](
        query,
        key,
        value,
        output,
        starts,
        key_lens,
        slopes,
        bias,
        by_query,
        by_key,
        rows,
        inverse,
        *(heads.stride(0) for heads in (query, key, value, output)),
        0 if bias is None else bias.shape[0] // 2,
        0 if rows is None else rows.shape[0] // 2,
        0 if products is None else products.shape[2],
        num_heads,
        SCALE=scale,
        SOFTCAP=softcap,
        GROUP=num_heads // key.shape[1],
        HEAD_DIM=head_dim,
        WIDTH=width,
        WINDOW=window,
        CAUSAL=is_causal,
        BY_CHANNEL=inverse is not None and inverse.numel() > 1,
        BLOCK_QUERIES=block_queries,
        BLOCK_KEYS=block_keys,
        num_stages=num_stages,
    )
    return output


def ragged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec,
    terms: ScoreTerms,
    step: PackedStep,
    *,
    partial_keys: bool,
    inverse: Tensor | None = None,
) -> Tensor:
    """Attention of ``query`` [T, heads, head_dim] to ``key`` and ``value`` [T, kv_heads, head_dim]; shape and type of
    ``query``. With ``inverse`` (``Rounding.inverse`` of the width heads * head_dim) the FP32 result is rounded to
    float8_e4m3fn, once.

    A query without a visible key gets zeros. Rows of tokens after the last sequence are uninitialized.
    """
    tables = (
        None if tensor is None else tensor.contiguous()
        for tensor in (terms.slopes, terms.relative_bias, terms.by_query, terms.by_key, terms.rows)
    )
    output: Tensor = _ragged(
        *(_rows_of_heads(heads) for heads in (query, key, value)),
        step["cu_query_lens"],
        step["key_lens"] if partial_keys else None,
        *tables,
        inverse,
        step["slot_ids"].shape[0],
        spec.scale,
        spec.softcap or 0.0,
        -1 if spec.window is None else spec.window,
        spec.causal,
    )
    return output


def _rows_of_heads(heads: Tensor) -> Tensor:
    """``heads`` [T, heads, head_dim] with contiguous heads: the kernel supports any stride between tokens, and no other
    gaps."""
    assert heads.stride()[1:] == (heads.shape[2], 1), "heads of a token must lie side by side"
    return heads
