"""Attention by kernels that packages of target cuda cannot call, beside those that they call: would an operator of our
own be worth its keep?

AOTInductor calls kernels of PyTorch by C functions. cuDNN's attention on packed tokens has none. FlashAttention 3 takes
the place of PyTorch's kernel in the dispatcher, which the C functions go around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention as of_pytorch

from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.positions import ScoreTerms
from benchmarks.gpu.kernels import attention
from benchmarks.gpu.peers import require
from benchmarks.gpu.record import Found
from tests.bei_build.torch_graph.gpu_cases import ATTENTION, Attention, Parts, attention_of


def by_cudnn(case: Attention, parts: Parts, terms: ScoreTerms, step: PackedStep) -> Callable[[], Tensor]:
    """The call of ``torch.nn.attention.varlen`` for cuDNN."""
    query, key, value = parts
    starts, longest = step["cu_query_lens"], step["slot_ids"].shape[0]
    lengths, flags = (starts, starts, longest, longest), (False, 0.0, case.spec.causal, False)

    def work() -> Tensor:
        forward = torch.ops.aten._cudnn_attention_forward
        output: Tensor = forward(query, key, value, None, *lengths, *flags, scale=case.spec.scale)[0]
        return output

    return work


@contextmanager
def flash_attention_3() -> Iterator[None]:
    """Within, PyTorch's operator of FlashAttention calls FlashAttention 3."""
    require("flash_attn_interface")
    of_pytorch.activate_flash_attention_impl("FA3")
    try:
        yield
    finally:
        of_pytorch.restore_flash_attention_impl()


@dataclass(frozen=True)
class Other:
    """A case of ``ATTENTION``, and how another kernel computes it."""

    case: str
    work_of: Callable[..., Callable[[], Tensor]] = attention_of
    within: Callable[[], Any] = nullcontext


OTHERS = {
    "BERT-large, by cuDNN": Other("BERT-large", by_cudnn),
    "BERT-large, by FlashAttention 3": Other("BERT-large", within=flash_attention_3),
    "Mistral-7B, by FlashAttention 3": Other("Mistral-7B", within=flash_attention_3),
}


def other_attention(other: Other, device: torch.device, *, budget_s: float) -> Found:
    """``kernels.attention`` by the other kernel."""
    with other.within():
        return attention(ATTENTION[other.case], device, budget_s=budget_s, work_of=other.work_of)
