"""Attention of tokens to learned rows (NV-Embed, arXiv:2405.17428, section 3.1), as a layer of a head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from bei_build.spec.parts import LatentAttentionSpec
from bei_build.torch_graph.norms import Norm
from bei_build.torch_graph.parameters import Linear, Table, TensorOptions


class LatentAttention(nn.Module):
    """Every token attends to all learned rows and goes through a gated MLP, each with a norm in front and a residual
    sum."""

    def __init__(self, spec: LatentAttentionSpec, options: TensorOptions) -> None:
        super().__init__()
        self._spec = spec
        width, inner = spec.width, spec.num_heads * spec.head_dim
        self.latents = Table(spec.num_latents, width, options)
        self.norm, self.latents_norm, self.mlp_norm = (Norm(spec.norm, width, options) for _ in range(3))
        self.query = Linear(width, inner, False, options)
        self.key_value = Linear(width, 2 * inner, False, options)
        self.output = Linear(inner, width, False, options)
        self.mlp = nn.ModuleDict(
            {
                "up": Linear(width, 2 * spec.intermediate_size, True, options),
                "down": Linear(spec.intermediate_size, width, True, options),
            }
        )

    def forward(self, value: Tensor) -> Tensor:
        """Result [T, width] for ``value`` [T, width]."""
        heads, head_dim = self._spec.num_heads, self._spec.head_dim
        query = self.query(self.norm(value)).unflatten(-1, (heads, head_dim))
        rows = self.key_value(self.latents_norm(self.latents.weight)).unflatten(-1, (2 * heads, head_dim))
        key, latent = rows.split(heads, dim=1)
        shares = (torch.einsum("thd,lhd->thl", query, key).float() * head_dim**-0.5).softmax(-1).to(value.dtype)
        attended = self.output(torch.einsum("thl,lhd->thd", shares, latent).flatten(1)) + value
        up, gate = self.mlp["up"](self.mlp_norm(attended)).chunk(2, dim=-1)
        return self.mlp["down"](up * functional.gelu(gate)) + attended  # type: ignore[no-any-return]
