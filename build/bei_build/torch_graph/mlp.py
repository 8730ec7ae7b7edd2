"""The MLP of a layer, plain or gated."""

from __future__ import annotations

from torch import Tensor, nn

from bei_build.spec import MLPSpec
from bei_build.torch_graph.activation import activated
from bei_build.torch_graph.storage import Linear, Storage, project


class MLP(nn.Module):
    """``down(act(up(x)))``, or ``down(act(gate(x)) * up(x))``."""

    def __init__(self, spec: MLPSpec, hidden_size: int, storage: Storage) -> None:
        super().__init__()
        self._spec = spec
        self.up = Linear(hidden_size, spec.intermediate_size, spec.bias, storage)
        if spec.gated:
            self.gate = Linear(hidden_size, spec.intermediate_size, spec.bias, storage)
        self.down = Linear(spec.intermediate_size, hidden_size, spec.down_bias, storage)
        self.joinable = (("gate", "up"),) if spec.gated else ()

    def forward(self, value: Tensor) -> Tensor:
        """[T, hidden] of ``value`` [T, hidden]."""
        if not self._spec.gated:
            return self.down(activated(self.up(value), self._spec.activation))  # type: ignore[no-any-return]
        gate, up = project(self, value, ("gate", "up"))
        return self.down(activated(gate, self._spec.activation) * up)  # type: ignore[no-any-return]
