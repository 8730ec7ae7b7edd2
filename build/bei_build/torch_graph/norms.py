"""LayerNorm and RMSNorm over the last axis."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from bei_build.spec import NormSpec
from bei_build.torch_graph.storage import Storage


class Norm(nn.Module):
    """The norm ``spec`` of ``width``. PyTorch's kernels compute its statistics in FP32.

    With an offset all of it is computed in FP32: 1 + w in BF16 would keep two or three digits of w.
    """

    def __init__(self, spec: NormSpec, width: int, storage: Storage) -> None:
        super().__init__()
        self._spec = spec
        self._width = width
        has_bias = spec.weight and spec.kind == "layer" and spec.bias
        self.weight = storage.empty(width) if spec.weight else None
        self.bias = storage.empty(width) if has_bias else None

    def forward(self, value: Tensor) -> Tensor:
        """``value`` [..., width], normalized."""
        if not self._spec.offset or self.weight is None:
            return self._normalized(value, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.float()
        wide = self._normalized(value.float(), self.weight.float() + self._spec.offset, bias)
        return wide.to(value.dtype)

    def _normalized(self, value: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if self._spec.kind == "rms":
            return functional.rms_norm(value, (self._width,), weight, self._spec.eps)
        return functional.layer_norm(value, (self._width,), weight, bias, self._spec.eps)
