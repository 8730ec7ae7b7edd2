"""Choice of a layer's attention kernel, and the two kernels made of PyTorch's own operators.

``flash``: FlashAttention on packed tokens, CUDA only. ``ragged``: our Triton kernel on packed tokens, for specs that
FlashAttention does not support. ``plain``: the twin of both, padded and composed in FP32; it runs anywhere.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from bei.errors import CompileError
from bei_build.spec.parts import AttentionSpec
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.positions import ScoreTerms

Kernel: TypeAlias = Literal["flash", "ragged", "plain"]

_HEAD_DIM_STEP = 8
_WIDEST_HEAD = 256
_PACKED_TYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class KernelChoice:
    """A kernel, and the reasons against faster ones; empty where there is none."""

    kernel: Kernel
    reasons: tuple[str, ...] = ()


def choose_kernel(spec: AttentionSpec, device: torch.device, dtype: torch.dtype, *, partial_keys: bool) -> KernelChoice:
    """The fastest kernel that computes ``spec``."""
    if spec.image_windows:
        return KernelChoice("plain", ("packed kernels attend within sequences, not within windows of images",))
    if device.type != "cuda":
        return KernelChoice("plain", (f"packed kernels need CUDA, and the device is {device.type}",))
    if dtype not in _PACKED_TYPES:
        return KernelChoice("plain", (f"packed kernels take bfloat16 and float16, and the model computes in {dtype}",))
    reasons = tuple(_against_flash(spec, partial_keys))
    if not reasons:
        return KernelChoice("flash")
    if spec.head_dim > _WIDEST_HEAD:
        return KernelChoice("plain", (*reasons, f"the Triton kernel takes heads of up to {_WIDEST_HEAD}"))
    if importlib.util.find_spec("triton") is None:
        return KernelChoice("plain", (*reasons, "Triton is not installed"))
    return KernelChoice("ragged", reasons)


def _against_flash(spec: AttentionSpec, partial_keys: bool) -> list[str]:
    """Parts of ``spec`` that PyTorch's FlashAttention does not support."""
    found = {
        f"heads of {spec.head_dim}, no multiple of {_HEAD_DIM_STEP}": spec.head_dim % _HEAD_DIM_STEP != 0,
        f"heads of {spec.head_dim}, wider than {_WIDEST_HEAD}": spec.head_dim > _WIDEST_HEAD,
        "soft cap": spec.softcap is not None,
        "ALiBi": spec.alibi,
        "relative bias": spec.relative_bias is not None,
        "disentangled scores": spec.disentangled is not None,
        # With fewer keys than queries it aligns both at their ends.
        "causal or windowed, with tokens that are no keys": partial_keys and (spec.causal or spec.window is not None),
    }
    return [reason for reason, is_so in found.items() if is_so]


def tensors_read(kernel: Kernel, spec: AttentionSpec, *, partial_keys: bool) -> tuple[str, ...]:
    """The tensors of a step that ``kernel`` reads for ``spec``. Raises CompileError where it does not compute that."""
    if windows := spec.image_windows:
        if kernel != "plain":
            raise CompileError(f"The attention kernel {kernel} does not compute windows of images: take plain.")
        return windows.pad_index, windows.slot_mask, windows.unpad_index
    if kernel == "plain":
        return ("pad_index", "unpad_index", "slot_ids", "key_mask" if partial_keys else "slot_mask")
    return ("cu_query_lens", "slot_ids", *(("key_lens",) if partial_keys else ()))


def flash(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, step: PackedStep, *, partial_keys: bool
) -> Tensor:
    """Attention of ``query`` [T, heads, head_dim] to ``key`` and ``value`` [T, kv_heads, head_dim]; shape and type of
    ``query``.

    This is the operator under ``torch.nn.attention.varlen.varlen_attn``: the function's arguments changed from 2.10 to
    2.13, the operator's did not. Rows of tokens after the last sequence are uninitialized.
    """
    starts, longest = step["cu_query_lens"], step["slot_ids"].shape[0]
    reach = -1 if spec.window is None else spec.window
    output, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        starts,
        starts,
        longest,
        longest,
        0.0,  # dropout
        spec.causal,
        False,  # no mask of dropped scores
        scale=spec.scale,
        window_size_left=reach,
        window_size_right=0 if spec.causal else reach,
        seqused_k=step["key_lens"] if partial_keys else None,
    )
    return output  # type: ignore[no-any-return]


def plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec,
    terms: ScoreTerms,
    step: PackedStep,
    *,
    partial_keys: bool,
) -> Tensor:
    """Attention with any mask and any terms, in FP32, on padded tokens: memory grows with the square of the longest
    sequence.

    A query without a visible key gets zeros.
    """
    repeat = spec.num_heads // spec.num_kv_heads
    windows = spec.image_windows
    index = step[windows.pad_index if windows else "pad_index"]
    queries, keys, values = (_padded(heads, index) for heads in (query, key, value))
    keys, values = (heads.repeat_interleave(repeat, dim=1) for heads in (keys, values))
    scores = (queries @ keys.transpose(2, 3) + _disentangled(terms, step)) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores + _by_distance(terms, step)
    hidden = ~_visible(spec, step, partial_keys=partial_keys)
    weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(hidden, 0.0)
    by_slot = (weights @ values).transpose(1, 2).flatten(0, 1)
    return by_slot.index_select(0, step[windows.unpad_index if windows else "unpad_index"]).to(query.dtype)


def _padded(heads: Tensor, index: Tensor) -> Tensor:
    """``heads`` [T, heads, any] by the ``index`` of tokens in slots, [B, S], as float32 [B, heads, S, any]."""
    rows = torch.unflatten(heads.index_select(0, index.flatten()), 0, (index.shape[0], index.shape[1]))
    return rows.transpose(1, 2).float()


def _distances(step: PackedStep) -> Tensor:
    """Key less query of each pair of slots, INT64 [S, S]."""
    slots = step["slot_ids"].long()
    return step.once("distances", lambda: slots[None, :] - slots[:, None])


def _visible(spec: AttentionSpec, step: PackedStep, *, partial_keys: bool) -> Tensor:
    """True where the query (row) sees the key (column), BOOL [B, 1, 1 or S, S]."""
    if spec.image_windows:
        return (step[spec.image_windows.slot_mask] > 0)[:, None, None, :]

    def made() -> Tensor:
        visible = (step["key_mask" if partial_keys else "slot_mask"] > 0)[:, None, None, :]
        if spec.causal:
            visible = visible & (_distances(step) <= 0)
        return visible if spec.window is None else visible & (_distances(step).abs() <= spec.window)

    return step.once(("visible", spec.causal, spec.window), made)


def _by_distance(terms: ScoreTerms, step: PackedStep) -> Tensor | float:
    """Score terms that depend on the distance alone, [heads, S, S]."""
    total: Tensor | float = 0.0
    if terms.relative_bias is not None:
        reach = terms.relative_bias.shape[0] // 2
        rows = (_distances(step) + reach).clamp(0, 2 * reach)
        total = total + terms.relative_bias[rows].permute(2, 0, 1)
    if terms.slopes is not None:
        total = total - terms.slopes[:, None, None] * _distances(step).abs()
    return total


def _disentangled(terms: ScoreTerms, step: PackedStep) -> Tensor | float:
    """DeBERTa's terms, added before the scale, [B, heads, S, S]."""
    total: Tensor | float = 0.0
    if terms.rows is None:
        return total
    reach = terms.rows.shape[0] // 2
    # By query less key, [query, key]; its transpose is by [key, query].
    rows = terms.rows[(reach - _distances(step)).clamp(0, 2 * reach)].long()
    if terms.by_query is not None:
        total = total + _gathered(_padded(terms.by_query, step["pad_index"]), rows)
    if terms.by_key is not None:
        total = total + _gathered(_padded(terms.by_key, step["pad_index"]), rows.T).transpose(2, 3)
    return total


def _gathered(products: Tensor, rows: Tensor) -> Tensor:
    """For each slot, the entries of ``products`` [B, heads, S, table] at ``rows`` [S, S]."""
    return products.gather(3, rows.expand(*products.shape[:2], -1, -1))
