"""Pooling by a learned row that attends to a sequence's tokens (SigLIP's head), over packed tokens."""

from __future__ import annotations

from torch import Tensor, nn

from bei_build.spec.parts import AttentionPoolSpec
from bei_build.torch_graph.activation import activated
from bei_build.torch_graph.norms import Norm
from bei_build.torch_graph.packed_step import PackedStep
from bei_build.torch_graph.parameters import Linear, TensorOptions


class AttentionPool(nn.Module):
    """Keys and values are products in the model's type; from the scores on it computes in FP32."""

    def __init__(self, spec: AttentionPoolSpec, options: TensorOptions) -> None:
        super().__init__()
        self._spec = spec
        self.reads = ("cu_query_lens", "sequence_ids", *(("first_index",) if spec.adds_first else ()))
        width, wide = spec.width, options.fp32
        self.probe = wide.empty(1, 1, width)
        self.input = Linear(width, 3 * width, True, options)
        self.output = Linear(width, width, True, wide)
        self.norm = Norm(spec.norm, width, wide)
        self.mlp = nn.ModuleDict(
            {
                "up": Linear(width, spec.intermediate_size, True, wide),
                **({"gate": Linear(width, spec.intermediate_size, True, wide)} if spec.gated else {}),
                "down": Linear(spec.intermediate_size, width, True, wide),
            }
        )

    def forward(self, hidden: Tensor, step: PackedStep) -> Tensor:
        """Result float32 [B, width] for ``hidden`` [T, width]."""
        heads, width = self._spec.num_heads, self._spec.width
        probe = self.input(self.probe[0].to(hidden.dtype))[0, :width].float().view(heads, -1)
        key, value = self.input(hidden)[:, width:].float().unflatten(-1, (2, heads, -1)).unbind(1)
        scores = (key * probe * probe.shape[1] ** -0.5).sum(-1)
        of_token = step["sequence_ids"]
        scores = (scores - step.of_sequences(scores, "max").index_select(0, of_token)).exp()
        shares = scores / step.of_sequences(scores, "sum").index_select(0, of_token)
        attended = self.output(step.of_sequences((value * shares.unsqueeze(-1)).flatten(1), "sum"))
        entering = self.norm(attended)
        inner = activated(self.mlp["gate" if self._spec.gated else "up"](entering), self._spec.activation)
        if self._spec.gated:
            inner = inner * self.mlp["up"](entering)
        beside = hidden.index_select(0, step["first_index"]).float() if self._spec.adds_first else attended
        result: Tensor = self.mlp["down"](inner) + beside
        return result
